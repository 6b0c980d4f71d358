"""Lab 19: the sequence axis, attention over ranks that have some of the tokens each.

A long text does not fit, however thin the layers: activations grow with its tokens. So cut the tokens over the ranks. Norms,
products and losses work token by token and notice nothing. Attention does: a token looks at all those before it. In a ring,
keys and values travel from rank to rank, and each rank adds up what its own tokens see of them (ring attention). Forward and
backward by hand, beside one process. Then in a pipeline, by Penstock: tokens over ranks, and tokens in slices.

    penstock lab 19
    python -m penstock.learn.labs.lab19_sequence
    torchrun --nproc-per-node 2 -m penstock.learn.labs.lab19_sequence

Try: leave the maximum out of `SoftmaxSums`. Which inputs break it, and in which dtype first?
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import penstock as ps
from penstock.learn.lab_helpers import check, on_ranks, percent, ranks_here, say
from penstock.schedule import build, simulate

RANKS, TOKENS, DIM = 4, 8, 16  # tokens of each rank
MICROBATCHES, SLICES = 4, 4
EXACT = 1e-12  # of float64 sums in another order


def main() -> None:
    """Ring attention against that of one process, who works how much, and both ways to cut tokens in a pipeline."""
    ranks = ranks_here(RANKS)
    tokens = ranks * TOKENS
    say(f"Lab 19: {tokens} tokens over {ranks} ranks, {TOKENS} each\n")
    say("Turn by turn, the block of keys and values that a rank has; a dot where no token of its own may look:\n")
    for rank in range(ranks):
        blocks = [(rank - turn) % ranks for turn in range(ranks)]
        say(f"  rank {rank}  " + "  ".join(f"{block}" if block <= rank else "." for block in blocks))
    off = {name: max(result) for name, result in together(on_ranks(compare, ranks)).items()}
    for name, error in off.items():
        check(error < EXACT, f"{name}: {error:.0e} off one process", f"{name} is {error:.0e} off that of one process")
    ring, full = (2 * 8 * DIM * value for value in (TOKENS, tokens))  # keys and values, of 8 bytes each
    say(f"\nA rank holds {ring:,} bytes of keys and values at once, not {full:,}, and no table of tokens x tokens at all.")
    say("Each is sent on while the rank works on it: with enough tokens the work takes longer than the way.")

    plain, zigzag = ([work(rank, ranks, turns) for rank in range(ranks)] for turns in (False, True))
    say("\nThe last tokens look at all, the first at themselves. Pairs of tokens that look at each other, rank by rank:")
    say(f"  neighbouring tokens   {plain}: the busiest rank has {percent(max(plain) / sum(plain))} of the work")
    say(f"  from both ends        {zigzag}: rank r has block r and block {2 * ranks - 1} - r, of {2 * ranks}")
    check(
        max(zigzag) == min(zigzag) and sum(zigzag) == sum(plain) == tokens * (tokens + 1) // 2,
        "taken from both ends, all ranks have the same work",
        f"the ranks should share {tokens * (tokens + 1) // 2} pairs evenly, they have {zigzag}",
    )
    say(CHANGES)
    say(f"\nThe same GPT of {tokens} tokens in Penstock, loss and gradients beside one process:")
    trained = {name: max(result) for name, result in together(on_ranks(train, ranks)).items()}
    for name, error in trained.items():
        check(
            error < EXACT, f"{name}: {error:.0e} off one process", f"with {name} they are {error:.0e} off those of one process"
        )
    say(f"\nSlices need no collective and no more ranks. {ranks} ranks run 1F1B with {MICROBATCHES} microbatches:")
    for slices in (1, SLICES):
        timeline = simulate(build("1f1b", ranks, MICROBATCHES, slices=slices))
        held = f"rank 0 holds {timeline.peak_in_flight[0]:g} microbatches"
        say(f"  in {slices} slice{'s' * (slices > 1)}: idle for {percent(timeline.bubble)} of the step, {held}")
    worst = max(*off.values(), *trained.values())
    say(f"\nMeasured: attention and GPT of {tokens} tokens on {ranks} ranks are those of one process within {worst:.0e}.")


CHANGES = """
What that changes in a pipeline (`init_mesh(pp=2, cp=2)`, with an all-to-all in place of the ring):
  the table     nothing: a stage is several ranks now, which all run the same action at the same time, as along tp
  messages      each rank sends its tokens' activations to the rank beside it in the next stage: a part of them each
  activations   of a microbatch a part on each rank, so that longer texts fit, where more stages or microbatches do not help
  the loss      a mean over tokens: each rank weighs its own by how many count, as `loss_weight` does for microbatches
  gradients     summed over the axis once a step, as over replicas
  positions     each rank must tell its layers which tokens it has: `ps.cache.first_position()`"""


class ToNext(torch.autograd.Function):
    """What the rank before has; its gradient goes the other way around."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """A tensor -> the same of the rank before."""
        return around(tensor, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Back to the rank whose it is."""
        return around(gradient, -1)


def around(tensor: Tensor, way: int) -> Tensor:
    """Send `tensor` `way` ranks on in the ring, and return what comes."""
    rank, ranks, comes = dist.get_rank(), dist.get_world_size(), torch.empty_like(tensor)
    if ranks == 1:
        return tensor.clone()
    promises = [dist.irecv(comes, (rank - way) % ranks), dist.isend(tensor.contiguous(), (rank + way) % ranks)]
    for promise in promises:
        if promise is not None:
            promise.wait()
    return comes


@dataclass(frozen=True)
class SoftmaxSums:
    """What tokens have added up so far: of softmax the maximum, the sum below the line, and the values above it."""

    most: Tensor  # (tokens, 1)
    below: Tensor  # (tokens, 1)
    above: Tensor  # (tokens, dim)

    def and_also(self, scores: Tensor, values: Tensor) -> "SoftmaxSums":
        """(tokens, others) scores of other tokens, (others, dim) their values: added, at the scale of the new maximum."""
        highest = torch.maximum(self.most, scores.amax(1, keepdim=True)).detach()
        scale, weights = (self.most - highest).exp(), (scores - highest).exp()
        return SoftmaxSums(highest, self.below * scale + weights.sum(1, keepdim=True), self.above * scale + weights @ values)


def ring_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """(tokens, dim) of this rank each -> (tokens, dim): every token sees itself and those before it, on all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    causal_mask = torch.ones(len(queries), len(queries), dtype=torch.bool).tril()
    zeros = torch.zeros_like(queries[:, :1])
    sums = SoftmaxSums(zeros - torch.inf, zeros, torch.zeros_like(values))
    block = torch.stack([keys, values])
    for turn in range(ranks):
        source = (rank - turn) % ranks  # whose keys and values these are
        keys, values = block
        scores = queries @ keys.t() / DIM**0.5
        if source == rank:
            scores = scores.masked_fill(~causal_mask, -torch.inf)
        if source <= rank:  # later tokens are not looked at
            sums = sums.and_also(scores, values)
        if turn < ranks - 1:
            block = ToNext.apply(block)
    # A block that nobody looked at has no gradient of its own, and yet must take its turn on the way back.
    return sums.above / sums.below + 0 * block.sum()


def compare() -> dict[str, float]:
    """How far output and gradients are from those of one process, on this rank."""
    topology = ps.comms.init_distributed(backend="gloo")
    generator, shape = torch.Generator().manual_seed(0), (4, topology.world_size * TOKENS, DIM)
    *tensors, gradient = torch.randn(*shape, dtype=torch.float64, generator=generator)
    own_rows = slice(topology.rank * TOKENS, (topology.rank + 1) * TOKENS)
    uncut, parts = ([result[rows].clone().requires_grad_() for result in tensors] for rows in (slice(None), own_rows))
    uncut_output = scaled_dot_product_attention(uncut[0][None], uncut[1][None], uncut[2][None], is_causal=True)[0]
    uncut_output.backward(gradient)
    output = ring_attention(*parts)
    output.backward(gradient[own_rows])
    pairs = [(output, uncut_output), *((part.grad, value.grad) for part, value in zip(parts, uncut, strict=True))]
    names = ("the output", *(f"the gradient of the {tensor_name}" for tensor_name in ("queries", "keys", "values")))
    return {name: (part - pair[own_rows]).abs().max().item() for name, (part, pair) in zip(names, pairs, strict=True)}


def train() -> dict[str, float]:
    """How far loss and gradients of a GPT are from those of one process, its tokens cut over ranks or into slices."""
    ranks = ps.comms.init_distributed(backend="gloo").world_size
    tokens, target = torch.randint(DIM, (2, MICROBATCHES, ranks * TOKENS), generator=torch.Generator().manual_seed(0))

    def gpt() -> torch.nn.Module:
        torch.manual_seed(0)
        return ps.model.GPT(ps.model.GPTConfig(DIM, ranks * TOKENS, width=DIM, layers=ranks, heads=4)).double()

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), target.flatten())

    def gradients(module: torch.nn.Module | ps.Pipeline) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}

    uncut = gpt()
    uncut_loss = loss_fn(uncut(tokens), target)
    uncut_loss.backward()
    errors, uncut_gradients = {}, gradients(uncut)
    for name, arguments in (
        (f"tokens over {ranks} ranks", {"mesh": ps.comms.init_mesh(pp=1, cp=ranks)}),
        (f"{ranks} stages, tokens in {SLICES} slices", {"slices": SLICES}),
    ):
        pipe = ps.Pipeline(gpt(), loss_fn, "1f1b", MICROBATCHES, **arguments)
        differences = [pipe.step(tokens, target=target) - uncut_loss]
        differences += [gradient - uncut_gradients[key] for key, gradient in gradients(pipe).items()]
        errors[name] = max(difference.abs().max().item() for difference in differences)
    return errors


def together(ranks: list[dict[str, float]]) -> dict[str, list[float]]:
    """The errors of all ranks, by what they are of."""
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def work(rank: int, ranks: int, both_ends: bool) -> int:
    """Pairs of tokens that a rank's tokens look at."""
    half = TOKENS // 2
    ends = (*range(rank * half, (rank + 1) * half), *range((2 * ranks - 1 - rank) * half, (2 * ranks - rank) * half))
    tokens = ends if both_ends else range(rank * TOKENS, (rank + 1) * TOKENS)
    return sum(token + 1 for token in tokens)


if __name__ == "__main__":
    main()
