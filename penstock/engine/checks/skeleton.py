"""A stage without its values, which a rank keeps to compute a microbatch of another rank's as that one did, to the bit."""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.comms.encoding import bytes_of
from penstock.errors import MismatchError
from penstock.partition.graph_stage import GraphStage
from penstock.randomness import aside
from penstock.stage.parameter_slot import installed
from penstock.stage.stage import Stage
from penstock.torch_private import is_compiled, tensor_slots, tree_leaves, tree_map_only


class Parcel(NamedTuple):
    """All that one microbatch's forward and backward on a stage depend on."""

    microbatch: int
    seed: int | None
    given: Any  # to the forward: (args, kwargs) of the batch, or what other stages gave
    target: Any  # the loss's, on the last stage
    gradients: Sequence[Any]  # of the output, on other stages
    whole: bool  # the backward gave the weights' gradients too
    weight: float  # of the loss, and of auxiliary ones
    random: Tensor  # state of the generator before the forward
    state: list[Tensor]  # parameters and buffers
    modes: list[bool]  # which modules are in training mode, which tensors require a gradient


MADE = ("output", "input's gradient", "weights' gradient")  # what is compared; of the last stage the loss is the output
Make = Callable[[int, nn.Module, int], Stage]  # stage's number, its module, the replica it is of


class Skeletons:
    """Hollow `modules`, by stage; `make` makes a stage of one that has been filled."""

    def __init__(self, modules: Mapping[int, nn.Module], make: Make, device: torch.device) -> None:
        self.modules, self._make, self._device = modules, make, device
        for module in modules.values():
            if isinstance(module, GraphStage):
                module.penstock.device = device

    def compute(self, index: int, replica: int, parcel: Parcel) -> list[str]:
        """What stage `index` makes of `parcel`, as digests: see MADE."""
        module, microbatch, gradients = self.modules[index], parcel.microbatch, parcel.gradients
        with filled(module, parcel, index), aside(self._device) as generator, torch.enable_grad():
            stage = self._make(index, module, replica)
            generator.set_state(parcel.random)
            output = stage.forward(microbatch, parcel.given, parcel.seed)
            if stage.loss_fn is not None:
                output = stage.loss(microbatch, output, parcel.target)
                gradients = [torch.full_like(output, parcel.weight) for _ in stage.kept[microbatch].edges]
            with weights_gradients(module, parcel.whole) as of_weights:
                made = stage.backward(microbatch, gradients, weight=parcel.weight)
            return [digest(output), digest(made), *of_weights]


@contextmanager
def weights_gradients(module: nn.Module, looked_at: bool = True) -> Iterator[list[str]]:
    """Around a full backward: digests of the gradients that it gives to the parameters, in a list of one."""
    told, found = list[str](), dict[int, str]()
    trained = [each for each in module.parameters() if each.requires_grad] if looked_at else []
    hooks = [each.register_hook(partial(_note, found, number)) for number, each in enumerate(trained)]
    try:
        yield told
    finally:
        for hook in hooks:
            hook.remove()
    told.append(" ".join(found[number] for number in sorted(found)))


def _note(found: dict[int, str], number: int, gradient: Tensor) -> None:
    found[number] = digest(gradient)


def digest(tree: Any) -> str:
    """Of the bytes of all tensors in it, in order."""
    made = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            made.update(bytes_of(leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()))
    return made.hexdigest()


def own(tree: Any) -> Any:
    """A copy of it that nobody writes to."""
    return tree_map_only(Tensor, lambda leaf: leaf.detach().clone().requires_grad_(leaf.requires_grad), tree)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return list({id(slot.tensor): slot.tensor for slot in tensor_slots(module)}.values())


def modes_of(module: nn.Module) -> list[bool]:
    """What decides, besides values, what a module computes."""
    return [each.training for each in module.modules()] + [each.requires_grad for each in tensors_of(module)]


def hollow(module: nn.Module, index: int) -> nn.Module:
    """A copy on the meta device, which takes no memory. Raises MismatchError for what cannot be copied."""
    if any(map(is_compiled, module.modules())):
        raise MismatchError(
            f"audit_every= computes stages on other ranks, but stage {index} is compiled: leave one of them out"
        )
    memo: dict[int, Any] = {}
    for each in tensors_of(module):
        empty = torch.empty_like(each, device="meta")
        memo[id(each)] = nn.Parameter(empty, each.requires_grad) if isinstance(each, nn.Parameter) else empty
    graph = copy.copy(module.penstock) if isinstance(module, GraphStage) else None
    if graph is not None:
        memo[id(module.penstock)] = graph
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        told = " ".join(str(error).split())
        raise MismatchError(f"audit_every= needs a copy of stage {index}, which copy.deepcopy cannot make: {told}") from error
    if graph is not None and isinstance(copied, GraphStage):
        graph.stage = copied
    return copied


@contextmanager
def filled(module: nn.Module, parcel: Parcel, index: int) -> Iterator[None]:
    """`module` with the values of `parcel`. Raises MismatchError if they are another module's."""
    tensors, modules = tensors_of(module), list(module.modules())
    kinds = [[(each.shape, each.dtype) for each in several] for several in (tensors, parcel.state)]
    if kinds[0] != kinds[1] or len(parcel.modes) != len(modules) + len(tensors):
        raise MismatchError(f"stage {index} has other layers than when the pipeline was built: audit_every= cannot follow that")
    for inner, mode in zip(modules, parcel.modes, strict=False):
        inner.training = mode
    values: dict[int, Tensor] = {}
    for each, value, trained in zip(tensors, parcel.state, parcel.modes[len(modules) :], strict=True):
        values[id(each)] = nn.Parameter(value, trained) if type(each) is nn.Parameter else value
    with installed([(slot, values[id(slot.tensor)]) for slot in tensor_slots(module)]):
        yield
