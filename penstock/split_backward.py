"""The backward in two: `I`, the input's gradient now, and `W`, the weights' gradients later.

`I` leaves on the stand-ins of a microbatch (`standins.py`) what it knows of the weights' gradients. `W` hands each parameter
the sum of its gradients, once, in the order in which a full backward would have summed them, through the parameter's own
end of the autograd graph: hooks, and whoever else listens there, as DistributedDataParallel does, see what they see in a
full backward. No graph is walked and none is retained.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.standins import Place, PutOff, identity, places_of
from penstock.uses import Owed, Use, run_backward
from penstock.weight_gradients import PRODUCTS

SMALL = 1 << 18  # products in a weight's gradient; to put off one takes about as long as so many
NODE_BYTES = 1 << 18  # gradients handed over together; larger ones reach their parameter while still in the cache


class Splitter:
    """The places of a stage's parameters, and a stock of stand-ins for them.

    `merge`: products add to the gradient so far as they go, where no hook waits for it. The sum's order changes.
    `shared`: ids of parameters that other stages have too; they get their gradients in `I`.
    `in_order`: the microbatches' `W` come in the order of their `I`. Then gradients that would cost less than to put them off
    reach their parameters in `I`, with the same bits, from the second step on.
    """

    def __init__(self, module: nn.Module, merge: bool = False, shared: Collection[int] = (), in_order: bool = False) -> None:
        self.module, self.merge, self.shared, self.in_order = module, merge, shared, in_order
        self._places: list[Place] = []
        self._stock: list[PutOff] = []
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

    def begin(self) -> PutOff | None:
        """For one microbatch; None if nothing of it is to be put off."""
        if self._stock:
            return self._stock.pop()
        return PutOff(self._places, self._active) if self._active else None

    def end(
        self, put_off: Sequence[PutOff], last: bool = False, expect: Callable[[Sequence[Tensor]], None] | None = None
    ) -> None:
        """`W` of one microbatch, or of several as one: hand every parameter the sum of its gradients.

        `put_off` is empty if `I` has handed over all. `last`: no other follows in this step. `expect` is called before the
        gradients reach the parameters, with tensors that depend on those which get one.
        """
        if not put_off and expect is None:
            return
        owed = [each.taken() for each in put_off]
        if self._worth is None and put_off:
            self._worth = self._judged(put_off[0], owed[0])
        uses = owed[0] if len(owed) == 1 else joined(owed)
        others = self._stock if last else []  # a module may have kept a weight from an earlier microbatch
        uses += itertools.chain.from_iterable(each.taken() for each in others)
        left = added([each.left() for each in (*put_off, *others)])
        if self.merge:
            uses = [pair for pair in uses if not self._added_to_sum(*pair, left)]
        nodes = self._nodes(uses, left)
        if expect is None:
            nodes = [node for node in nodes if not self._added_to_gradients(node)]
        self._hand_over(nodes, expect)
        self._stock += put_off

    def _judged(self, put_off: PutOff, owed: Sequence[Owed]) -> Sequence[int]:
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
        places = [self._places[place] for place in node.places]
        if any(place.parameter.grad is None and place.parameter.nbytes >= NODE_BYTES for place in places):
            return False
        pairs = [(place.end, each) for place, each in zip(places, node.gradients(), strict=True) if each is not None]
        run_backward(*zip(*pairs, strict=True))
        return True

    def _hand_over(self, nodes: Sequence["_Node"], expect: Callable[[Sequence[Tensor]], None] | None) -> None:
        with torch.enable_grad():
            ends = [_HandOver.apply(node, *[self._places[place].parameter for place in node.places]) for node in nodes]
        gradients = list(ends)
        if expect is not None:  # who listens hears of all parameters, also of those that got their gradients in `I`
            placed = {id(place.parameter) for place in self._places}
            others = [each for each in self.module.parameters() if id(each) not in placed and each.grad is not None]
            gradients += map(torch.zeros_like, others)
            ends += others
            expect(ends)
        if ends:
            run_backward([get_gradient_edge(end) for end in ends], gradients)

    def _added_to_sum(self, use: Use, gradient: Tensor, left: dict[int, Tensor]) -> bool:
        """Whether the weight's gradient could be, and so was, added in the product itself."""
        place, bias = use.targets
        product = PRODUCTS.get(use.formula)
        if product is None or place is None or (bias is not None and bias in left):
            return False
        weight = self._places[place].parameter
        if weight.grad is None or use.weight.dtype != weight.dtype or _hooks(weight):
            return False
        with torch.no_grad():
            product(weight.grad, gradient, use.unpack())
            if bias is not None:
                left[bias] = gradient.sum_to_size(use.bias.shape)
        return True

    def _nodes(self, owed: Sequence[Owed], left: dict[int, Tensor]) -> list["_Node"]:
        key = tuple([use.targets for use, _ in owed]), tuple(left)
        if key not in self._groups:
            self._groups[key] = list(_grouped(owed, left))
        return [_Node([owed[index] for index in group.uses], left, group.places) for group in self._groups[key]]


def _hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def added(gradients: Sequence[dict[int, Tensor]]) -> dict[int, Tensor]:
    """Place -> the sum over several microbatches."""
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


class _Group(NamedTuple):
    """Parameters that are handed their gradients together."""

    uses: list[int]  # by their index
    places: list[int]


def _grouped(owed: Sequence[Owed], left: dict[int, Tensor]) -> Iterator[_Group]:
    """Groups of about `NODE_BYTES`; in one group, the parameters whose gradients have several sources."""
    sources = Counter(itertools.chain(left, *[use.targets for use, _ in owed]))
    several, group, size = _Group([], list(left)), _Group([], []), 0
    for index, (use, _) in enumerate(owed):
        places = [place for place in use.targets if place is not None]
        into = several if any(sources[place] > 1 for place in places) else group
        into.uses.append(index)
        into.places.extend(place for place in places if place not in into.places)
        size += use.bytes if into is group else 0
        if size >= NODE_BYTES:
            yield group
            group, size = _Group([], []), 0
    yield from (each for each in (several, group) if each.places)


class _Node:
    """What the gradients of a group are computed from."""

    def __init__(self, owed: Sequence[Owed], left: dict[int, Tensor], places: Sequence[int]) -> None:
        self.owed, self.left, self.places = owed, left, places

    def gradients(self) -> list[Tensor | None]:
        """Of every place, summed in the order of arrival (in the precision of autocast, where it is on)."""
        sums: dict[int, Tensor] = {}
        for use, gradient in self.owed:
            for place, each in zip(use.targets, use.compute(gradient), strict=True):
                if place is not None and each is not None:
                    sums[place] = sums[place] + each if place in sums else each
        for place in self.places:
            if place in self.left:
                mine = self.left.pop(place)
                sums[place] = mine + sums[place].to(mine.dtype) if place in sums else mine
        return [sums.pop(place, None) for place in self.places]


class _HandOver(torch.autograd.Function):
    """A node of the graph whose inputs are parameters and whose backward is their gradients."""

    @staticmethod
    def forward(ctx: Any, node: _Node, *parameters: Tensor) -> Tensor:
        ctx.node = node
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *ctx.node.gradients()
