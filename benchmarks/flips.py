"""Bit flips: each is found by the digests of its step, and traced to what it hit, beside a run that was left in peace.

python benchmarks/flips.py                          1,000 flips in one process and 1,000 on two ranks, about a minute
python benchmarks/flips.py --flips 200 --seed 7

A tiny GPT is trained for a few steps, again and again from the same start. In each run one random bit is flipped, at a random
step on a random rank: in a gradient, the optimizer's state or a weight.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from torch import Tensor, nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.training_digests import DIGEST_KINDS, compare_runs, tensor_description

STEPS = 3


@dataclass
class FlipOptions:
    """Flip bits and look for them."""

    flips: int = 1000  # on each number of ranks
    ranks: tuple[int, ...] = (1, 2)
    seed: int = 0


class Flip(NamedTuple):
    """What is hit in a run."""

    kind: str
    step: int
    rank: int
    seed: int  # of which tensor, byte and bit of that rank


def flip_bit(tensor: Tensor, rng: random.Random) -> None:
    """Flip one bit of the tensor's memory, behind the back of autograd."""
    data = tensor.data.contiguous() if tensor.dim() else tensor.data.view(1)
    assert data.data_ptr() == tensor.data_ptr()
    data.view(torch.uint8).flatten()[rng.randrange(data.nbytes)] ^= 1 << rng.randrange(8)


class FlipSubject:
    """A pipeline that is trained from the same start again and again."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = ps.model.GPT(ps.model.GPTConfig(vocabulary=17, context=6, width=8, layers=2, heads=2))
        loss_fn = nn.CrossEntropyLoss()
        self.pipe = ps.Pipeline(model, lambda logits, target: loss_fn(logits.flatten(0, 1), target.flatten()), "1f1b", 2)
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)
        self.rank = self.pipe.position.world.rank
        text = torch.randint(17, (STEPS, 4, 7))
        self.batches = [(character[:, :-1], character[:, 1:]) for character in text]
        self.start = {name: value.clone() for name, value in self.pipe.state_dict().items()}

    def run(self, folder: Path, flip: Flip | None = None) -> tuple[str, str]:
        """Train, with digests of every step in `folder`, to the `flip` if there is one; kind and name of what it hit."""
        self.pipe.load_state_dict(self.start)
        self.pipe.step_count = 0
        self.optimizer.state.clear()
        trail, hit = checkpoint.DigestLog(folder, self.pipe, self.optimizer, every=1), ""
        for number, (inputs, target) in enumerate(self.batches[: flip.step if flip else STEPS], 1):
            here = flip is not None and (flip.step, flip.rank) == (number, self.rank)
            hit = self._step(inputs, target, trail, flip if here else None) or hit
        return flip.kind if flip else "", "".join(self.pipe.gather(lambda: hit))

    def _step(self, inputs: Tensor, target: Tensor, trail: checkpoint.DigestLog, flip: Flip | None) -> str:
        kind, rng = (flip.kind, random.Random(flip.seed)) if flip else ("", random.Random())
        hit = ""
        self.pipe.step(inputs, target=target)
        if kind == "gradients":
            hit = self._hit(rng, lambda parameter: [parameter.grad])
        self.optimizer.step()
        if kind in ("weights", "optimizer"):
            state: Any = self.optimizer.state
            hit = self._hit(rng, lambda value: [value] if kind == "weights" else list(state[value].values()))
        trail.record_step()
        self.optimizer.zero_grad()
        return hit

    def _hit(self, rng: random.Random, tensors: Callable[[nn.Parameter], list[Any]]) -> str:
        name, parameter = rng.choice(list(self.pipe.named_parameters()))
        flip_bit(rng.choice(tensors(parameter)), rng)
        return name


def rank_flips(folder: Path, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """How many flips of each kind were found and traced, and what of those that were not was said; run on every rank."""
    ranks = ps.comms.init_distributed().world_size
    subject, rng = FlipSubject(), random.Random(seed)
    subject.run(folder / "undisturbed")
    found, missed = Counter[str](), list[str]()
    for number in range(count):
        flip = Flip(rng.choice(DIGEST_KINDS), rng.randint(1, STEPS), rng.randrange(ranks), rng.getrandbits(32))
        kind, name = subject.run(folder / "flipped", flip)
        if subject.rank == 0:
            same, text = compare_runs(folder / "undisturbed", folder / "flipped")
            hit = tensor_description(kind, name)
            if same or f"step {flip.step} is the first that differs" not in text or f": {hit}\n" not in text:
                missed.append(f"{number}: {flip} hit {hit}; {text}")
            else:
                found[kind] += 1
    return found, missed


def main(options: FlipOptions) -> None:
    """Flip, and print what was found."""
    print(f"seed {options.seed}: {options.flips} flips on each number of ranks, {STEPS} steps a run, digests of every step")
    lost = 0
    for ranks in options.ranks:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found, missed = ps.launch(rank_flips, ranks, Path(folder), options.flips, options.seed)[0]
        kinds = ", ".join(f"{found[kind]} in {kind}" for kind in DIGEST_KINDS)
        print(f"{ranks} rank{'s' * (ranks > 1)}: {found.total()} of {options.flips} found at their step and traced: {kinds}")
        print(f"  {time.perf_counter() - begin:.0f} s")
        for text in missed[:5]:
            print(f"  missed {text}")
        lost += len(missed)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main(tyro.cli(FlipOptions))
