"""Stand-ins: what takes the place of a stage's parameters while a forward runs whose backward will be split.

They are leaves of their own that share the parameters' memory, so nothing that happens in `I` reaches the parameters:

* An operation of `weight_gradients.RULES` puts its weights' gradients off: `I` keeps the output's gradient beside the saved
  input, and `W` computes.
* Whatever else touches a parameter (norms, biases, code of the user's) leaves its gradient on the stand-in, in `I`.

A checkpointed forward is recomputed with the same stand-ins, once, in `I`.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.graph import get_gradient_edge

from penstock.stage.backward.rules import RULES, Formula
from penstock.stage.backward.weight_use import NO_VIEWS, Owed, WeightUse, bare_of, run_backward

# What makes views of a weight whose products with an input are still a weight's.
VIEWS = frozenset(
    (Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.T.__get__, Tensor.mT.__get__, Tensor.chunk, Tensor.split)  # type: ignore[attr-defined]
)


class Weight(Tensor):
    """The stand-in of a matrix, an embedding or a kernel, or a view of one: operations that take it go through the rules."""

    later: "DeferredGradients"
    place: int | None  # of the parameter it stands for; None for a view of one
    bare: Tensor | None  # the same memory, outside the graph

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """By its rule, if there is one; a function made of others by theirs; a view of a weight as a weight; else as it is."""
        kwargs = kwargs or {}
        known = func in RULES or func in VIEWS
        if not known and isinstance(func, FunctionType) and func not in _running and torch.is_grad_enabled():
            _running.add(func)
            try:
                return _body(func)(*args, **kwargs)
            finally:
                _running.discard(func)
        with DisableTorchFunctionSubclass():
            if known and torch.is_grad_enabled():
                for each in (*args, *kwargs.values()):
                    if type(each) is Weight:
                        return each.later.call(func, args, kwargs)
            return func(*args, **kwargs)


_running: set[FunctionType] = set()  # functions made of others that are being looked into


class DeferredGradients:
    """What one microbatch on one stage has put off: stand-ins for its forward and `I`, gradients for its `W`.

    `active`: those of the `places` that get a stand-in.
    """

    def __init__(self, places: Sequence["ParameterSlot"], active: Iterable[int]) -> None:
        self.places = places
        self.standins = {index: places[index].stand_in(self, index) for index in active}
        self.views = False  # whether a use of a weight was ever through a view of it
        self.gradients: dict[WeightUse, tuple[Tensor | None]] = {}  # in the order in which the backward came by
        self._uses = itertools.count()
        self._casts: dict[int, Tensor] = {}  # place -> what autocast makes of the weight

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The stand-ins in the parameters' places."""
        try:
            for index, standin in self.standins.items():
                for owner, name in self.places[index].owners:
                    owner[name] = standin
            yield
        finally:
            for index in self.standins:
                place = self.places[index]
                for owner, name in place.owners:
                    owner[name] = place.parameter

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`func`, which has a rule or makes views of a weight."""
        if func in RULES:
            output = RULES[func](self, *args, **kwargs)
            return func(*args, **kwargs) if output is NotImplemented else output
        output = func(*args, **kwargs)
        return self._view(output) if isinstance(output, Tensor) else tuple(map(self._view, output))

    def _view(self, output: Tensor) -> Weight:
        view = output.as_subclass(Weight)
        view.later, view.place, view.bare = self, None, None
        return view

    # -- what the rules call ----------------------------------------------------------------------------------------

    def owns(self, weight: Tensor, bias: Tensor | None = None) -> bool:
        """Whether both are stand-ins or views of one; the bias may be frozen or None."""
        return self._is_ours(weight) and (bias is None or not bias.requires_grad or self._is_ours(bias))

    def _is_ours(self, tensor: Tensor) -> bool:
        return getattr(tensor, "later", None) is self or (tensor._is_view() and getattr(tensor._base, "later", None) is self)

    def operands(self, value: Tensor, *weights: Any) -> tuple[Any, ...]:
        """The input, and the weights outside the graph, as autocast would hand them to a product."""
        device = value.device.type
        if not torch.is_autocast_enabled(device) or not value.is_floating_point() or value.dtype is torch.float64:
            return value, *map(bare_of, weights)
        dtype = torch.get_autocast_dtype(device)
        return value.to(dtype), *[None if weight is None else self._cast(weight, dtype) for weight in weights]

    def _cast(self, weight: Any, dtype: torch.dtype) -> Tensor:
        place = getattr(weight, "place", None)
        if place is None:
            return bare_of(weight).to(dtype)
        if place not in self._casts:
            self._casts[place] = bare_of(weight).to(dtype)
        return self._casts[place]

    def put_off(self, output: Tensor, formula: Formula, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`output`, connected so that `I` keeps its gradient for `formula`."""
        use = WeightUse(next(self._uses), formula, value, weight, bias)
        self.views = self.views or use.views != NO_VIEWS
        keep: Any = partial(self.gradients.__setitem__, use)  # no Python runs when the backward calls this
        if use.saved is not None:
            keep = partial(use.unpack_and, keep)
        if not output.requires_grad:
            return _Arrival.apply(_ANCHOR, keep, output)
        output.grad_fn.register_prehook(keep)  # type: ignore[union-attr]
        return output

    # -- W ----------------------------------------------------------------------------------------------------------

    def taken(self) -> list[Owed]:
        """The uses of weights whose gradients are owed, in the order in which the backward came by; none afterwards.

        Those through views are passed on to the stand-ins at once.
        """
        owed = [(use, gradient) for use, (gradient,) in self.gradients.items() if gradient is not None]
        self.gradients.clear()
        self._casts.clear()
        self._uses = itertools.count()
        if self.views and (through_views := [pair for pair in owed if pair[0].views != NO_VIEWS]):
            self._pass_on(through_views)
            owed = [pair for pair in owed if pair[0].views == NO_VIEWS]
        return owed

    def _pass_on(self, owed: list[Owed]) -> None:
        edges, gradients = [], []
        for use, gradient in owed:
            for view, place, each in zip(use.views, use.targets, use.compute(gradient), strict=True):
                end = get_gradient_edge(self.standins[place]) if place is not None else view
                if end is not None and each is not None:
                    edges.append(end)
                    gradients.append(each)
        run_backward(edges, gradients)

    def held(self) -> list[Tensor | None]:
        """What is kept for `W`: inputs, gradients of outputs, and what `I` left on the stand-ins."""
        with DisableTorchFunctionSubclass():
            left = [standin.grad for standin in self.standins.values()]
        return [*left, *self._casts.values(), *(each for use, (grad,) in self.gradients.items() for each in (use.value, grad))]

    def left(self) -> dict[int, Tensor]:
        """ParameterSlot -> the gradient that `I` left on its stand-in; taken from there."""
        left = {}
        with DisableTorchFunctionSubclass():
            for place, standin in self.standins.items():
                if standin.grad is not None:
                    left[place], standin.grad = standin.grad, None
        return left


@functools.cache
def _body(func: FunctionType) -> FunctionType:
    """`func` without the look for overrides at its beginning, which would lead back here."""
    names = func.__globals__ | dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no
    )
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _no(*tensors: Any) -> bool:
    return False


class _Arrival(torch.autograd.Function):
    """Makes what was computed without a graph a part of it: its gradient is kept and goes no further."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, keep: Any, output: Tensor) -> Tensor:
        ctx.keep = keep
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(output)  # the output is the same tensor: a layer may change it in place
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None, None]:
        ctx.keep((gradient,))
        return None, None, None


_ANCHOR = torch.empty(0, requires_grad=True)


class ParameterSlot:
    """A trainable parameter of a stage, and every module that has it under some name."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.owners: list[tuple[dict[str, Any], str]] = []
        self.memory = parameter.data_ptr()
        self.end = get_gradient_edge(parameter)  # of the graph, where gradients become the parameter's

    def stand_in(self, later: DeferredGradients, index: int) -> Tensor:
        """A leaf that shares the parameter's memory."""
        kind: type[Tensor] = Weight if self.parameter.dim() > 1 else nn.Parameter
        bare = self.parameter.detach()
        standin: Any = torch.Tensor._make_subclass(kind, bare, True)
        standin._is_param = True  # isinstance(standin, nn.Parameter)
        standin.later, standin.place, standin.bare = later, index, bare
        return standin


def places_of(module: nn.Module) -> list[ParameterSlot]:
    """Of the trainable parameters; none if the module is compiled, whose graph is bound to the parameters themselves."""
    places: dict[int, ParameterSlot] = {}
    for each in module.modules():
        if each._compiled_call_impl is not None or type(each).__name__ == "OptimizedModule":
            return []
        for name, parameter in each._parameters.items():
            if type(parameter) is nn.Parameter and parameter.requires_grad:
                places.setdefault(id(parameter), ParameterSlot(parameter)).owners.append((each._parameters, name))
    return list(places.values())


def identity(place: ParameterSlot) -> tuple[int, int, list[tuple[int, str]]]:
    """Equal as long as stand-ins made for `place` can be used."""
    return id(place.parameter), place.memory, [(id(owner), name) for owner, name in place.owners]
