"""Digests, the same in every process and release of Python and torch: of bytes, of plain values, of tensors.

A tensor's is the CRC-32 of its dtype, shape and bytes. It certainly differs if the change lies within 32 bits in a row, as one
flipped bit does, and else in all but one case in four billion. It is the fastest hash of the standard library with these
properties (`benchmarks/watching.py` measures them).

Files and tables have the SHA-256 of their bytes, which other programs can check.
"""

import ctypes
import hashlib
import zlib
from collections.abc import Hashable
from functools import cache, lru_cache

import torch
from torch import Tensor, nn

BLOCK_WORDS = 2**20  # words of four bytes that `block_sums` adds up


def hash_bytes(data: bytes, size: int = 6) -> int:
    """Hash `data` to `size` bytes; a float64 holds six exactly."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=size).digest(), "little")


@lru_cache(256, typed=True)  # data that repeats from step to step; 8 and 8.0 have different texts
def hash_values(*values: Hashable) -> int:
    """Hash values of plain types to six bytes, by their text."""
    return hash_bytes(repr(values).encode())


def tensor_crc(tensor: Tensor, previous_crc: int = 0) -> int:
    """Return the digest of a tensor, continuing that of earlier tensors.

    A tensor that is not on the CPU is reduced to sums where it is, so that it need not be copied.
    """
    crc = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), previous_crc)
    dense = tensor
    if not (tensor.layout is torch.strided and tensor.is_contiguous() and tensor.is_cpu) or tensor.is_conj() or tensor.is_neg():
        dense = tensor.detach().to_dense().resolve_conj().resolve_neg().contiguous()
        dense = dense if dense.device.type == "cpu" else block_sums(dense).cpu()
    return zlib.crc32((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()), crc) if dense.nbytes else crc


def block_sums(tensor: Tensor) -> Tensor:
    """Return eight bytes for each `BLOCK_WORDS` words of four. A change inside of one word certainly changes them.

    A sum of words, each times a random odd number of 64 bits, modulo 2**64 (multilinear hashing: Lemire and Kaser, "Strongly
    universal string hashing is fast", 2014). Integers, so the bits do not depend on the order in which a device sums.
    """
    data = tensor.flatten().view(torch.uint8)
    words = nn.functional.pad(data, (0, -len(data) % 4)).view(torch.int32)
    factors = _random_odd_numbers(tensor.device)
    return torch.stack([(block * factors[: len(block)]).sum() for block in words.split(BLOCK_WORDS)])


@cache
def _random_odd_numbers(device: torch.device) -> Tensor:
    """Return BLOCK_WORDS numbers, the same in every process and release."""
    stream = bytearray(hashlib.shake_256(b"penstock").digest(8 * BLOCK_WORDS))
    return torch.frombuffer(stream, dtype=torch.int64).bitwise_or(1).to(device)
