"""The backward in two: `I`, the input's gradient now, and `W`, the weights' gradients later.

`I` leaves on the stand-ins of a microbatch (`standins.py`) what it knows of the weights' gradients. `W` hands each parameter
the sum of its gradients, once, in the order in which a full backward would have summed them (but what `I` left is one
summand), through the parameter's own end of the autograd graph: hooks, and whoever else listens there, as
DistributedDataParallel does, see what they see in a full backward. No graph is walked and none is retained.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.stage.backward.rules import PRODUCTS
from penstock.stage.backward.standins import DeferredGradients, ParameterSlot, identity, places_of
from penstock.stage.backward.weight_use import Owed, WeightUse, run_backward

SMALL = 1 << 18  # products in a weight's gradient; to put off one takes about as long as so many
TOGETHER = 1 << 21  # bytes of gradients that are handed over at once; more would only take memory
COPIED = 1 << 18  # bytes of a gradient that may be copied to become a parameter's first `.grad`


class Splitter:
    """The places of a stage's parameters, and a stock of stand-ins for them.

    `merge`: products add to the gradient so far as they go, where no hook waits for it. The sum's order changes.
    `shared`: ids of parameters that other stages have too; they get their gradients in `I`.
    `in_order`: the microbatches' `W` come in the order of their `I`. Then gradients that would cost less than to put them off
    reach their parameters in `I`, with the same bits, from the second step on.
    """

    def __init__(self, module: nn.Module, merge: bool = False, shared: Collection[int] = (), in_order: bool = False) -> None:
        self.module, self.merge, self.shared, self.in_order = module, merge, shared, in_order
        self._places: list[ParameterSlot] = []
        self._stock: list[DeferredGradients] = []
        self._groups: dict[Any, list[_Group]] = {}  # for uses of the same places in the same order
        self._active: Sequence[int] = ()  # those that get stand-ins
        self._worth: Sequence[int] | None = ()  # those that get them from the next step on; None until that is known

    def refresh(self) -> None:
        """Look at the module anew, before a step: parameters may have been frozen, replaced or moved."""
        places = [place for place in places_of(self.module) if id(place.parameter) not in self.shared]
        if [identity(place) for place in places] != [identity(place) for place in self._places]:
            self._places, self._stock, self._groups = places, [], {}
            self._active = range(len(places))
            self._worth = None if self.in_order and not self.merge else self._active
        elif self._worth is not None and len(self._worth) < len(self._active):
            self._active, self._stock = self._worth, []

    def begin(self) -> DeferredGradients | None:
        """For one microbatch; None if nothing of it is to be put off."""
        if self._stock:
            return self._stock.pop()
        return DeferredGradients(self._places, self._active) if self._active else None

    def end(
        self, put_off: Sequence[DeferredGradients], last: bool = False, expect: Callable[[Sequence[Tensor]], None] | None = None
    ) -> None:
        """`W` of one microbatch, or of several as one: hand every parameter the sum of its gradients.

        `put_off` is empty if `I` has handed over all. `last`: no other follows in this step. `expect` is called before the
        gradients reach the parameters, with tensors that depend on those which get one.
        """
        if not put_off and expect is None:
            return
        nodes = self._nodes(*self._due(put_off, self._stock if last else []))
        if expect is None:
            nodes = [node for node in nodes if not self._added_to_gradients(node)]
        self._hand_over(nodes, expect)
        self._stock += put_off

    def _due(
        self, put_off: Sequence[DeferredGradients], others: Sequence[DeferredGradients]
    ) -> tuple[list[Owed], dict[int, Tensor]]:
        """Uses whose gradients are to be computed, and what `I` left; `others` may still have some that a module kept."""
        owed = [each.taken() for each in put_off]
        if self._worth is None and put_off:
            self._worth = self._judged(put_off[0], owed[0])
        uses = owed[0] if len(owed) == 1 else joined(owed)
        uses += itertools.chain.from_iterable(each.taken() for each in others)
        left = added([each.left() for each in (*put_off, *others)])
        if self.merge:
            uses = [pair for pair in uses if not self._added_to_sum(*pair)]
        return uses, left

    def _judged(self, put_off: DeferredGradients, owed: Sequence[Owed]) -> Sequence[int]:
        """The places whose gradients are worth being put off, by what the `W` of one microbatch finds.

        Those with hooks of the user's are: what they do belongs to `W`.
        """
        if put_off.views:
            return self._active
        work: Counter[int | None] = Counter()
        for use, gradient in owed:
            work[use.targets[0]] += gradient.numel() * (use.weight.numel() // len(use.weight))
        hooked = {index for index, place in enumerate(self._places) if _hooks(place.parameter)}
        large = [use.targets for use, _ in owed if work[use.targets[0]] >= SMALL or hooked.intersection(use.targets)]
        return sorted(place for place in hooked.union(*large) if place is not None)

    def _added_to_gradients(self, node: "_Node") -> bool:
        """Whether the node's gradients could be, and so were, given straight to the ends of the graph.

        That is less work. But what the caller still holds cannot become a parameter's first `.grad` without a copy.
        """
        if any(parameter.grad is None for parameter in node.group.large):
            return False
        run_backward(node.group.ends, node.gradients())
        return True

    def _hand_over(self, nodes: Sequence["_Node"], expect: Callable[[Sequence[Tensor]], None] | None) -> None:
        with torch.enable_grad():
            ends = [_HandOver.apply(node, *[self._places[place].parameter for place in node.group.places]) for node in nodes]
        gradients = list(ends)
        if expect is not None:  # who listens hears of all parameters, also of those that got their gradients in `I`
            placed = {id(place.parameter) for place in self._places}
            others = [each for each in self.module.parameters() if id(each) not in placed and each.grad is not None]
            gradients += map(torch.zeros_like, others)
            ends += others
            expect(ends)
        if ends:
            run_backward([get_gradient_edge(end) for end in ends], gradients)

    def _added_to_sum(self, use: WeightUse, gradient: Tensor) -> bool:
        """Whether the weight's gradient could be, and so was, added in the product itself."""
        place, _ = use.targets
        product = PRODUCTS.get(use.formula)
        if product is None or place is None:
            return False
        weight = self._places[place].parameter
        if weight.grad is None or use.weight.dtype != weight.dtype or _hooks(weight):
            return False
        with torch.no_grad():
            product(weight.grad, gradient, use.unpack())
        return True

    def _nodes(self, uses: Sequence[Owed], left: dict[int, Tensor]) -> list["_Node"]:
        key = tuple([use.targets for use, _ in uses]), tuple(left)
        if key not in self._groups:
            self._groups[key] = list(_grouped(uses, tuple(left), self._places))
        return [_Node(group, [uses[index] for index in group.uses], left) for group in self._groups[key]]


def _hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def added(gradients: Sequence[dict[int, Tensor]]) -> dict[int, Tensor]:
    """ParameterSlot -> the sum over several microbatches."""
    sums: dict[int, Tensor] = {}
    for more in gradients:
        for place, gradient in more.items():
            sums[place] = sums[place] + gradient if place in sums else gradient
    return sums


def joined(owed: Sequence[Sequence[Owed]]) -> list[Owed]:
    """The uses of several microbatches, those of the same place in the forward as one over the joined rows."""
    groups: dict[Any, list[Owed]] = {}
    for pair in itertools.chain.from_iterable(owed):
        groups.setdefault(pair[0].alike(pair[1]), []).append(pair)
    return [group[0] if len(group) == 1 else _join(group) for group in groups.values()]


def _join(group: Sequence[Owed]) -> Owed:
    use = copy.copy(group[0][0])
    use.value = torch.cat([each.unpack() for each, _ in group])
    use.version = use.value._version
    return use, torch.cat([gradient for _, gradient in group])


class _Group:
    """Parameters that are handed their gradients together; `summed` if those may have several sources."""

    def __init__(self, owed: Sequence[Owed], uses: Sequence[int], left: Sequence[int], places: Sequence[ParameterSlot]) -> None:
        self.uses = uses  # by their index
        targets = [place for index in uses for place in owed[index][0].targets]
        self.wanted = [place is not None for place in targets]  # of what the uses compute
        self.targets = [place for place in targets if place is not None]
        self.places = list(dict.fromkeys((*left, *self.targets)))
        self.summed = bool(left) or len(self.places) < len(self.targets)
        self.ends = [places[place].end for place in self.places]
        self.large = [places[place].parameter for place in self.places if places[place].parameter.nbytes >= COPIED]


def _grouped(owed: Sequence[Owed], left: Sequence[int], places: Sequence[ParameterSlot]) -> Iterator[_Group]:
    """Groups of about `TOGETHER` bytes; one of them has all the parameters whose gradients have several sources."""
    sources = Counter(itertools.chain(left, *[use.targets for use, _ in owed]))
    summed, uses, size = list[int](), list[int](), 0
    for number, (use, _) in enumerate(owed):
        if any(place is not None and sources[place] > 1 for place in use.targets):
            summed.append(number)
            continue
        uses.append(number)
        size += use.bytes
        if size >= TOGETHER:
            yield _Group(owed, uses, (), places)
            uses, size = [], 0
    if summed or left:
        yield _Group(owed, summed, left, places)
    if uses:
        yield _Group(owed, uses, (), places)


class _Node:
    """What the gradients of a group are computed from, in one microbatch."""

    def __init__(self, group: _Group, owed: list[Owed], left: dict[int, Tensor]) -> None:
        self.group, self.owed, self.left = group, owed, left

    def gradients(self) -> list[Tensor]:
        """Of every place of the group."""
        computed: Iterable[Any] = itertools.chain.from_iterable([use.compute(gradient) for use, gradient in self.owed])
        mine = itertools.compress(computed, self.group.wanted)
        return self._sums(mine) if self.group.summed else list(mine)

    def _sums(self, computed: Iterable[Tensor]) -> list[Tensor]:
        """In the order of arrival (in the precision of autocast, where it is on)."""
        sums: dict[int, Tensor] = {}
        for place, each in zip(self.group.targets, computed, strict=True):
            sums[place] = sums[place] + each if place in sums else each
        for place in self.group.places:
            if place in self.left:
                mine = self.left.pop(place)
                sums[place] = mine + sums[place].to(mine.dtype) if place in sums else mine
        return [sums[place] for place in self.group.places]


class _HandOver(torch.autograd.Function):
    """A node of the graph whose inputs are parameters and whose backward is their gradients."""

    @staticmethod
    def forward(ctx: Any, node: _Node, *parameters: Tensor) -> Tensor:
        ctx.node = node
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *ctx.node.gradients()
