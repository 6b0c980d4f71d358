"""Copies of tied parameters, and batches that several ranks are given, are compared by digests of their values.

All owners of a tied parameter get the same gradient, and the optimizer of each changes its own copy. If the copies differ, the
model is no longer the uncut one.

Batches are compared before each step: small tensors whole, larger ones by some values.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from penstock.comms.control_group import ControlGroup
from penstock.comms.encoding import tensor_bytes
from penstock.digest import hash_bytes, tensor_crc
from penstock.engine.observers import ObservedStep, Observer, Rows
from penstock.errors import MismatchError
from penstock.guards import is_power_of_two_or_zero
from penstock.mesh.position import MeshPosition
from penstock.rows import unwrap
from penstock.stage.tied_parameters import TiedParameters
from penstock.torch_private import tensor_version
from penstock.trees import leaves

MAX_STEPS_BETWEEN_CHECKS = 64
MISMATCH_CAUSES = (
    "usual causes are an optimizer whose groups are made by kinds of modules instead of names of pipe.named_parameters(), "
    "clipping by the norm of a list of parameters instead of pipe.clip_grad_norm_, another learning rate or optimizer on one "
    "rank, and weights loaded on one rank only; mend that, then load the weights on all ranks, as checkpoint.resume does"
)
MAX_DIGEST_BYTES = 2**18  # of a tensor of a batch that ranks compare whole, in 0.1 ms
MAX_HASHED_VALUES = 64  # of a larger one


def hash_batch(batch: Any) -> int:
    """Hash all values of each small tensor, some of a larger one, the same in every process; 0 without tensors.

    Never synchronises: 0 for a batch that is not on the CPU.
    """
    tensors = [leaf for leaf in map(unwrap, leaves(batch)) if isinstance(leaf, Tensor)]
    if not tensors or any(
        type(tensor) is not Tensor or tensor.layout != torch.strided or not tensor.is_cpu for tensor in tensors
    ):
        return 0
    return hash_bytes(b"".join(map(_digest_or_sample, tensors)))


def _digest_or_sample(tensor: Tensor) -> bytes:
    """Return the digest of a small tensor, a sample of a larger one."""
    return tensor_crc(tensor).to_bytes(4, "little") if tensor.nbytes <= MAX_DIGEST_BYTES else _sample_bytes(tensor)


def _sample_bytes(tensor: Tensor) -> bytes:
    """Return at most MAX_HASHED_VALUES values, spread over the tensor, of up to 16 rows."""
    values_left, slices = MAX_HASHED_VALUES, []
    for size in tensor.shape:
        count = min(size, values_left, 16) or 1
        slices.append(slice(None, None, max(1, math.ceil(size / count))))
        values_left //= count
    values = tensor[tuple(slices)].detach().resolve_conj().resolve_neg()
    return tensor_bytes(values.contiguous())


def describe_ranks_by_digest(digests: Mapping[str, str]) -> str:
    """Say which ranks have which digest, from the digest of each rank: "ranks 0/2 1b2c3d4e, rank 1 5f6a7b8c"."""
    ranks_by_digest: dict[str, list[str]] = {}
    for rank, digest in digests.items():
        ranks_by_digest.setdefault(digest, []).append(rank)
    return ", ".join(f"rank{'s' * (len(ranks) > 1)} {'/'.join(ranks)} {digest}" for digest, ranks in ranks_by_digest.items())


def has_several_readers(position: MeshPosition, placement: Sequence[int]) -> bool:
    """Whether several ranks of a replica read the inputs or the target. `placement`: stage -> rank of a pipeline."""
    return placement[0] != placement[-1] or len(position.pipelines[0]) > 1


class _Inputs(NamedTuple):
    """The tensors of a step's inputs, their versions, which an operation in place raises but not one in a layer, and a hash.

    Layers get microbatches, which share the memory of the inputs and not their versions.
    """

    tensors: Sequence[ref[Tensor]]
    versions: Sequence[int]
    hash: int


class BatchComparison(Observer):
    """Compares some values of the batches that several ranks were given: inputs must meet the target of the same rows.

    `placement`: stage -> rank of a pipeline.
    """

    num_numbers = 3

    def __init__(self, position: MeshPosition, placement: Sequence[int]) -> None:
        self._position, self._first_rank = position, placement[0]
        self._last_inputs = _Inputs([], [], 0)
        self._is_compared = position.pipeline.rank in (placement[0], placement[-1])

    def start(self, step: ObservedStep) -> Sequence[float]:
        """Return hashes of inputs and target, 0 if they are not taken, and whether the last step changed the inputs."""
        if not self._is_compared:
            return 0, 0, 0
        inputs_hash = hash_batch(step.call.inputs)
        return inputs_hash, hash_batch(step.call.target), self._are_changed(step.call.inputs, inputs_hash)

    def _are_changed(self, inputs: Any, inputs_hash: int) -> bool:
        """Whether the inputs are those of the last step, with other values that no operation of the user has written."""
        tensors = [leaf for leaf in map(unwrap, leaves(inputs)) if isinstance(leaf, Tensor) and not leaf.is_inference()]
        last, self._last_inputs = (
            self._last_inputs,
            _Inputs([ref(tensor) for tensor in tensors], [tensor_version(tensor) for tensor in tensors], inputs_hash),
        )
        if last.hash == inputs_hash or last.versions != self._last_inputs.versions:
            return False
        return all(reference() is tensor for reference, tensor in zip(last.tensors, tensors, strict=True))

    def compare(self, step: ObservedStep, rows: Rows) -> None:
        """Raise MismatchError, the same on every rank, if inputs of some rows would meet the target of others.

        If every rank that reads the inputs was given their target, only targets are compared: inputs on ranks that do not read
        them may differ, by a random crop for instance.
        """
        for replica, pipelines in enumerate(self._position.pipelines):
            replica_ranks = [rank for ranks in pipelines for rank in ranks]
            readers = [ranks[self._first_rank] for ranks in pipelines]
            input_ranks = readers if all(rows[rank][1] for rank in readers) else replica_ranks
            for name, index, ranks in (("target", 1, replica_ranks), ("inputs", 0, input_ranks)):
                hashes = {rank: rows[rank][index] for rank in ranks if rows[rank][index]}
                if len({*hashes.values()}) > 1:
                    changed = [rank for rank in hashes if name == "inputs" and rows[rank][2]]
                    raise _other_batch_error(self._position.replica_prefix(replica), name, hashes, changed)


def _other_batch_error(prefix: str, name: str, hashes: Mapping[int, float], changed: Sequence[int]) -> MismatchError:
    """Return the error. `changed`: the ranks whose tensors are those of the last step, with other values."""
    first_rank, expected = next(iter(hashes.items()))
    rank = next(rank for rank, value in hashes.items() if value != expected)
    if changed:
        return MismatchError(
            f"{prefix}rank {rank}'s batch is another than rank {first_rank}'s: on rank {changed[0]} the inputs are the tensors "
            "of its last step, whose values have changed since. If a layer changes its input in place (x.mul_(2)), let it work "
            "on a copy, as x * 2 makes one"
        )
    return MismatchError(
        f"{prefix}rank {rank}'s batch is another than rank {first_rank}'s: they were given different values as {name}. Give "
        "both the same rows (pipe.sampler(dataset), one seed for all loaders, no batch skipped on one rank alone), or None "
        "where they are not read"
    )


class TiedCopiesCheck(Observer):
    """Compares the copies of tied parameters before training steps 0, 1, 2, 4, .., then every `MAX_STEPS_BETWEEN_CHECKS`."""

    def __init__(self, control: ControlGroup, tied: TiedParameters) -> None:
        self._control, self._tied = control, tied

    def compare(self, step: ObservedStep, rows: Rows) -> None:
        """Raise as `check_tied_copies`, if it is due."""
        if step.call.is_training and self._tied.owners and is_tied_comparison_due(step.call.steps_before):
            check_tied_copies(self._control, self._tied, step.call.steps_before)


def is_tied_comparison_due(steps: int) -> bool:
    """Whether copies are compared after `steps` steps: 0, 1, 2, 4, .., then every `MAX_STEPS_BETWEEN_CHECKS`."""
    return steps % MAX_STEPS_BETWEEN_CHECKS == 0 or is_power_of_two_or_zero(steps)


def check_tied_copies(control: ControlGroup, tied: TiedParameters, steps: int) -> None:
    """Raise MismatchError, the same on every rank, if owners of a tied parameter have different values. All ranks call it."""
    own_digests = {name: f"{tensor_crc(copy):08x}" for name, copy in tied.copies.items()}
    rank_digests = control.all_gather_value(own_digests, "to compare tied parameters")
    for name in tied.owners:
        digests = {str(rank): digests[name] for rank, digests in enumerate(rank_digests) if name in digests}
        if len({*digests.values()}) > 1:
            raise MismatchError(
                f"after {steps} steps {name} is not the same on the ranks that share it ({describe_ranks_by_digest(digests)}): "
                f"{MISMATCH_CAUSES}"
            )
