"""Lab 19: the sequence axis, attention over ranks that have some of the tokens each.

A long text does not fit on a device, however small the layers, because activations grow with its tokens. So cut the tokens over
the ranks. Norms, products and losses work token by token, and need no change. Attention does, because a token attends to all
tokens before it. In ring attention keys and values travel from rank to rank, and each rank accumulates the attention of its own
tokens. The lab writes forward and backward by hand, and compares them with one process. Then Penstock trains a GPT with tokens
over ranks, and with tokens in slices.

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
EXACT = 1e-12  # error of float64 sums in another order


def main() -> None:
    """Compare ring attention with one process, balance its work, and train with both ways to cut tokens."""
    ranks = ranks_here(RANKS)
    tokens = ranks * TOKENS
    say(f"Lab 19: {tokens} tokens over {ranks} ranks, {TOKENS} each\n")
    say("The block of keys and values on a rank, step by step; a dot if no token of the rank attends to it:\n")
    for rank in range(ranks):
        blocks = [(rank - step) % ranks for step in range(ranks)]
        say(f"  rank {rank}  " + "  ".join(f"{block}" if block <= rank else "." for block in blocks))
    attention_errors = largest_errors(on_ranks(compare_ring_attention, ranks))
    for name, error in attention_errors.items():
        check(error < EXACT, f"{name}: {error:.0e} off one process", f"{name} is {error:.0e} off one process")
    ring_bytes, full_bytes = (2 * 8 * DIM * count for count in (TOKENS, tokens))  # keys and values, in float64
    say(f"\nA rank holds {ring_bytes:,} bytes of keys and values at a time, not {full_bytes:,}, and no tokens x tokens matrix.")
    say("A block can be sent on while the rank computes with it: with enough tokens, computing takes longer than sending.")

    contiguous, zigzag = (
        [count_attended_pairs(rank, ranks, both_ends) for rank in range(ranks)] for both_ends in (False, True)
    )
    say("\nThe last token attends to all, the first only to itself. Pairs of tokens that each rank computes:")
    say(f"  contiguous tokens     {contiguous}: the busiest rank has {percent(max(contiguous) / sum(contiguous))} of the work")
    say(f"  from both ends        {zigzag}: rank r has block r and block {2 * ranks - 1} - r, of {2 * ranks}")
    check(
        max(zigzag) == min(zigzag) and sum(zigzag) == sum(contiguous) == tokens * (tokens + 1) // 2,
        "with tokens from both ends, all ranks have the same work",
        f"the ranks should share {tokens * (tokens + 1) // 2} pairs evenly, they have {zigzag}",
    )
    say(PIPELINE_CHANGES)
    say(f"\nA GPT of {tokens} tokens in Penstock, loss and gradients compared with one process:")
    training_errors = largest_errors(on_ranks(compare_training, ranks))
    for name, error in training_errors.items():
        check(error < EXACT, f"{name}: {error:.0e} off one process", f"with {name} they are {error:.0e} off one process")
    say(f"\nSlices need no collective and no more ranks. {ranks} ranks run 1F1B with {MICROBATCHES} microbatches:")
    for slices in (1, SLICES):
        timeline = simulate(build("1f1b", ranks, MICROBATCHES, slices=slices))
        in_flight = f"rank 0 holds {timeline.peak_in_flight[0]:g} microbatches"
        say(f"  in {slices} slice{'s' * (slices > 1)}: idle for {percent(timeline.bubble)} of the step, {in_flight}")
    worst = max(*attention_errors.values(), *training_errors.values())
    say(f"\nMeasured: attention and GPT of {tokens} tokens on {ranks} ranks are those of one process within {worst:.0e}.")


PIPELINE_CHANGES = """
What tokens over ranks change in a pipeline (`init_mesh(pp=2, cp=2)`, with an all-to-all instead of the ring):
  the table     does not change: a stage is several ranks, which run the same action at the same time, as along tp
  messages      each rank sends its tokens' activations to the rank with the same tokens in the next stage
  activations   each rank holds a part of a microbatch's, so longer texts fit; more stages or microbatches would not help
  the loss      a mean over tokens: each rank weights its own by the number that count, as `loss_weight` does for microbatches
  gradients     are summed over the axis once a step, as over replicas
  positions     layers must know which tokens a rank has: `ps.cache.first_position()`"""


class ReceiveFromPrevious(torch.autograd.Function):
    """Sends a tensor to the next rank, and receives the previous rank's. Gradients travel the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return the tensor of the previous rank."""
        return send_around_ring(tensor, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Send the gradient back to the previous rank, and return the one for this rank's tensor."""
        return send_around_ring(gradient, -1)


def send_around_ring(tensor: Tensor, offset: int) -> Tensor:
    """Send `tensor` to the rank `offset` places on in the ring. Returns the tensor that arrives."""
    rank, ranks, received = dist.get_rank(), dist.get_world_size(), torch.empty_like(tensor)
    if ranks == 1:
        return tensor.clone()
    handles = [dist.irecv(received, (rank - offset) % ranks), dist.isend(tensor.contiguous(), (rank + offset) % ranks)]
    for handle in handles:
        if handle is not None:
            handle.wait()
    return received


@dataclass(frozen=True)
class SoftmaxSums:
    """The softmax of tokens over the keys so far: the largest score, and denominator and numerator of the weighted mean."""

    max_score: Tensor  # (tokens, 1)
    denominator: Tensor  # (tokens, 1)
    numerator: Tensor  # (tokens, dim)

    def add(self, scores: Tensor, values: Tensor) -> "SoftmaxSums":
        """Return the sums with more keys, at the scale of the new maximum: scores (tokens, keys), values (keys, dim)."""
        new_max = torch.maximum(self.max_score, scores.amax(1, keepdim=True)).detach()
        scale, weights = (self.max_score - new_max).exp(), (scores - new_max).exp()
        denominator = self.denominator * scale + weights.sum(1, keepdim=True)
        return SoftmaxSums(new_max, denominator, self.numerator * scale + weights @ values)


def ring_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return causal attention (tokens, dim) over the tokens of all ranks. Arguments: this rank's (tokens, dim)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    causal_mask = torch.ones(len(queries), len(queries), dtype=torch.bool).tril()
    zeros = torch.zeros_like(queries[:, :1])
    sums = SoftmaxSums(zeros - torch.inf, zeros, torch.zeros_like(values))
    block = torch.stack([keys, values])
    for step in range(ranks):
        source = (rank - step) % ranks  # the rank of these keys and values
        keys, values = block
        scores = queries @ keys.t() / DIM**0.5
        if source == rank:
            scores = scores.masked_fill(~causal_mask, -torch.inf)
        if source <= rank:  # a token does not attend to later ones
            sums = sums.add(scores, values)
        if step < ranks - 1:
            block = ReceiveFromPrevious.apply(block)
    # In the backward every rank must pass on every block; this gives a gradient to the blocks that the rank did not use.
    return sums.numerator / sums.denominator + 0 * block.sum()


def compare_ring_attention() -> dict[str, float]:
    """Run ring attention. Returns the largest errors of output and gradients compared with one process, by name."""
    topology = ps.comms.init_distributed(backend="gloo")
    generator, shape = torch.Generator().manual_seed(0), (4, topology.world_size * TOKENS, DIM)
    *tensors, gradient = torch.randn(*shape, dtype=torch.float64, generator=generator)
    own_rows = slice(topology.rank * TOKENS, (topology.rank + 1) * TOKENS)
    uncut, parts = ([tensor[rows].clone().requires_grad_() for tensor in tensors] for rows in (slice(None), own_rows))
    uncut_output = scaled_dot_product_attention(uncut[0][None], uncut[1][None], uncut[2][None], is_causal=True)[0]
    uncut_output.backward(gradient)
    output = ring_attention(*parts)
    output.backward(gradient[own_rows])
    pairs = [(output, uncut_output), *((part.grad, tensor.grad) for part, tensor in zip(parts, uncut, strict=True))]
    names = ("the output", *(f"the gradient of the {tensor_name}" for tensor_name in ("queries", "keys", "values")))
    return {name: (part - tensor[own_rows]).abs().max().item() for name, (part, tensor) in zip(names, pairs, strict=True)}


def compare_training() -> dict[str, float]:
    """Train a GPT with tokens over ranks and in slices. Returns the largest error of loss and gradients, by the cut."""
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


def largest_errors(rank_errors: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest error of all ranks for each name."""
    return {name: max(errors[name] for errors in rank_errors) for name in rank_errors[0]}


def count_attended_pairs(rank: int, ranks: int, both_ends: bool) -> int:
    """Return the number of pairs of a token of the rank and a token that it attends to."""
    half = TOKENS // 2
    ends = (*range(rank * half, (rank + 1) * half), *range((2 * ranks - 1 - rank) * half, (2 * ranks - rank) * half))
    tokens = ends if both_ends else range(rank * TOKENS, (rank + 1) * TOKENS)
    return sum(token + 1 for token in tokens)


if __name__ == "__main__":
    main()
