"""The digest of a tensor: the CRC-32 of its dtype, shape and bytes, the same in every process and release of Python and torch.

It differs for certain where the change lies within 32 bits in a row, as one flipped bit does, and else but for one case in four
billion. It is the fastest hash of the standard library of which all that is true (`benchmarks/watching.py` measures them).

Copies of a tied parameter on several ranks are compared by it now and then: all owners get the same gradient, and the optimizer
of each changes its own copy. Where that is not the same on all of them, the model is no longer the uncut one.
"""

import ctypes
import hashlib
import zlib
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor, nn

from penstock.comms.control_group import ControlGroup
from penstock.engine.checks import is_power_of_two
from penstock.errors import MismatchError
from penstock.stage.tied_parameters import TiedParameters

MOST_STEPS_BETWEEN = 64
CAUSES = (
    "usual causes are an optimizer whose groups are made by kinds of modules instead of names of pipe.named_parameters(), "
    "clipping by the norm of a list of parameters instead of pipe.clip_grad_norm_, another learning rate or optimizer on one "
    "rank, and weights loaded on one rank only; mend that, then load the weights on all ranks, as checkpoint.resume does"
)
BLOCK = 2**20  # words that become one


def crc_of(tensor: Tensor, before: int = 0) -> int:
    """The digest, going on from that of what came `before`.

    A tensor that is not on the CPU is condensed where it is, so that it need not be copied.
    """
    crc = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), before)
    dense = tensor.detach().to_dense().resolve_conj().resolve_neg().contiguous()
    dense = dense if dense.device.type == "cpu" else condensed(dense).cpu()
    return zlib.crc32((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()), crc) if dense.nbytes else crc


def condensed(tensor: Tensor) -> Tensor:
    """Eight bytes for each `BLOCK` words of four, which a change inside one word changes for certain.

    A sum of words, each times a random odd number of 64 bits, modulo 2**64 (multilinear hashing: Lemire and Kaser, "Strongly
    universal string hashing is fast", 2014): integers, so its bits do not depend on the order in which a device sums.
    """
    data = tensor.flatten().view(torch.uint8)
    words = nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    odd = _odd_numbers(tensor.device)
    return torch.stack([(block * odd[: len(block)]).sum() for block in words.split(BLOCK)])


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    """Random ones, the same everywhere and for ever."""
    stream = bytearray(hashlib.shake_256(b"penstock").digest(8 * BLOCK))
    return torch.frombuffer(stream, dtype=torch.int64).bitwise_or(1).to(device)


def ranks_by_digest(by_rank: Mapping[str, str]) -> str:
    """Which ranks have which digest, in words."""
    ranks: dict[str, list[str]] = {}
    for rank, digest in by_rank.items():
        ranks.setdefault(digest, []).append(rank)
    return ", ".join(f"rank{'s' * (len(those) > 1)} {'/'.join(those)} {digest}" for digest, those in ranks.items())


def is_due(steps: int) -> bool:
    """Whether copies are compared after so many `steps`: 0, 1, 2, 4, .., then every `MOST_STEPS_BETWEEN`."""
    return steps % MOST_STEPS_BETWEEN == 0 or is_power_of_two(steps)


def check_copies(control: ControlGroup, tied: TiedParameters, steps: int) -> None:
    """Raises MismatchError, the same on every rank, where owners of a tied parameter have other values. All ranks call it."""
    mine = {name: f"{crc_of(copy):08x}" for name, copy in tied.copies.items()}
    everyone = control.all_gather_object(mine, "to compare tied parameters")
    for name in tied.owners:
        by_rank = {str(rank): digests[name] for rank, digests in enumerate(everyone) if name in digests}
        if len({*by_rank.values()}) > 1:
            told = f"after {steps} steps {name} is not the same on the ranks that share it ({ranks_by_digest(by_rank)})"
            raise MismatchError(f"{told}: {CAUSES}")
