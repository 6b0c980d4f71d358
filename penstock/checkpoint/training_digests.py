"""Digests of weights, gradients and optimizer state, to compare replicas and runs.

A tensor's digest is computed by `penstock/digest.py`, and named as in the uncut model. A line of `digests.jsonl` is either
the header of a run, with the conditions that bits depend on; or a step, with digests of its gradients, and of weights and
optimizer state after it.
"""

import json
import platform
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.files import json_lines
from penstock.checkpoint.files.packing import pack
from penstock.comms.control_group import ControlGroup
from penstock.digest import tensor_crc
from penstock.engine.optimizers import optimizer_list
from penstock.errors import MismatchError, PenstockError, is_whole_number
from penstock.guards.equal_values import MISMATCH_CAUSES, describe_ranks_by_digest
from penstock.pipeline import Pipeline
from penstock.schedule.table import Kind
from penstock.stage.dtensor import local_shard, shard_coordinates
from penstock.torch_private import tree_map_only

Settings = Mapping[str, Any]
Digest = str | dict[str, str]  # eight hexadecimal digits; rank -> digits if ranks differ that share a parameter
Digests = dict[str, dict[str, Digest]]  # "weights", "gradients" or "optimizer" -> name in the uncut model -> digest
DIGEST_KINDS = ("gradients", "optimizer", "weights")  # in the order in which a step computes them
DIGESTS_FILE = "digests.jsonl"
STEPS_BETWEEN_DIGESTS = 10


def digests(pipe: Pipeline, optimizer: Any = None) -> Digests:
    """Return digests of `"weights"` (with buffers), `"gradients"` and `"optimizer"` state, by name; the same on every rank.

    All ranks call it, after the optimizer's step and before gradients are cleared. Tensors that are equal to the bit have equal
    digests in any cut, on any ranks and schedule, and in one process. A tied parameter is listed once, under its first name. A
    sharded parameter is gathered. A parameter without a gradient or state has no digest.

    `optimizer`: of this rank's `pipe.parameters()`, or a list of several.

    Each digest is eight hexadecimal digits; or rank -> digits if ranks differ that share a parameter.

        loss = pipe.step(inputs, target=targets)
        optimizer.step()
        before = checkpoint.digests(pipe, optimizer)["weights"]
    """
    with pipe.collective("checkpoint.digests()") as control:
        optimizers = optimizer_list(optimizer, "digests()", pipe.topology.world_size)
        return _gather_digests(control, pipe, optimizers, "to compare digests")


def value_digest(value: Any) -> str:
    """Return the digest of a tensor, or of nested tensors, numbers and texts. All ranks that have a shard of it call this."""
    tensors: dict[str, Tensor] = {}
    crc = zlib.crc32(json.dumps(pack(value, "", tensors)).encode())
    for tensor in tensors.values():
        crc = tensor_crc(tensor, crc)
    return f"{crc:08x}"


def tensor_description(kind: str, name: str) -> str:
    """Return in words which tensor a digest is of: `the gradient of 0.weight`."""
    return {"gradients": "the gradient of ", "optimizer": "the optimizer's state of "}.get(kind, "") + name


def check_replicas_equal(control: ControlGroup, pipe: Pipeline, optimizers: Sequence[Any]) -> None:
    """Raise MismatchError, on every rank, if ranks that have the same parameter, or the same shard, differ in a bit of it."""
    # Without replicas only tied parameters are on several ranks.
    only_names = None if pipe.position.num_ranks_per_stage > 1 else pipe._engine.tied.owners
    if only_names is not None and not only_names:  # nothing to compare, on any rank
        return
    own_digests: dict[str, dict[str, str]] = {}
    for kind, name, parameter, value in _tensors_to_digest(pipe, optimizers, only_names):
        if kind != "gradients":
            shard = "".join(f", shard {shard_coordinate}" for shard_coordinate in shard_coordinates(parameter))
            own_digests.setdefault(kind, {})[name + shard] = value_digest(tree_map_only(Tensor, local_shard, value))
    for kind, named in _merge_digests(control.all_gather_value(own_digests, "to compare replicas"), ()).items():
        for name, item in named.items():
            if isinstance(item, dict):
                ranks = describe_ranks_by_digest(item)
                differ = f"{tensor_description(kind, name)} is not the same on all ranks that have it: {ranks}"
                raise MismatchError(f"{differ}; {MISMATCH_CAUSES}" if name in pipe._engine.tied.owners else differ)


def _gather_digests(control: ControlGroup, pipe: Pipeline, optimizers: Sequence[Any], purpose: str) -> Digests:
    """Return the digests of all ranks, merged, in the order of the model's names."""
    own_digests: dict[str, dict[str, str]] = {}
    for kind, name, _, value in _tensors_to_digest(pipe, optimizers):
        own_digests.setdefault(kind, {})[name] = value_digest(value)
    return _merge_digests(control.all_gather_value(own_digests, purpose), pipe._engine.parameters.order)


def _merge_digests(digests_of_ranks: Sequence[Mapping[str, Mapping[str, str]]], name_order: Sequence[str]) -> Digests:
    digests_by_rank: dict[str, dict[str, dict[str, str]]] = {}
    for rank, digests in enumerate(digests_of_ranks):
        for kind, digest_of_name in digests.items():
            for name, digest in digest_of_name.items():
                digests_by_rank.setdefault(kind, {}).setdefault(name, {})[str(rank)] = digest
    merged, position = dict[str, dict[str, Digest]](), {name: number for number, name in enumerate(name_order)}
    for kind, ranks in digests_by_rank.items():
        for name in sorted(ranks, key=lambda name: position.get(name, len(position))):
            are_equal = len({*ranks[name].values()}) == 1
            merged.setdefault(kind, {})[name] = next(iter(ranks[name].values())) if are_equal else ranks[name]
    return merged


def _tensors_to_digest(
    pipe: Pipeline, optimizers: Sequence[Any], only_names: Collection[str] | None = None
) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (kind, name, the model's tensor, this rank's value) for all tensors, or for those named in `only_names`."""
    aliases, yielded = pipe._engine.parameters.aliases, set[tuple[str, str]]()
    candidates = [("weights", name, value, value) for name, value in pipe.state_dict().items()]
    for name, parameter in pipe.named_parameters():
        states = [optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state]
        state = states if len(states) > 1 else next(iter(states), None)
        candidates += [("gradients", name, parameter, parameter.grad), ("optimizer", name, parameter, state)]
    for kind, name, parameter, value in candidates:
        key = kind, aliases.get(name, name)
        if value is not None and key not in yielded and (only_names is None or key[1] in only_names):
            yielded.add(key)
            yield *key, parameter, value


# -- the file of a run --------------------------------------------------------------------------------------------------


class DigestLog:
    """Writes digests of a run's steps to `folder/digests.jsonl`. All ranks create one, and call `record_step`.

    `folder`: of the run; rank 0 creates it, and writes. Lines there of steps after `pipe.step_count` are deleted.
    `pipe`, `optimizer`: write digests of these. `optimizer` has this rank's `pipe.parameters()`; or a list of several.
    `every`: write a line after each step whose number divides by this, 1 or more; other steps cost nothing.
    `settings`: other settings that the numbers depend on (data, learning rate, ..), name -> JSON, the same on every rank. Runs
        with different settings are not compared.

        trail = checkpoint.DigestLog("runs/a", pipe, optimizer, settings={"data": "v2", "learning_rate": 1e-3})
        for inputs, targets in batches:
            pipe.step(inputs, target=targets)
            optimizer.step()
            trail.record_step()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        folder: str | Path,
        pipe: Pipeline,
        optimizer: Any = None,
        every: int = STEPS_BETWEEN_DIGESTS,
        settings: Settings | None = None,
    ) -> None:
        self.path, self.pipe, self.every = Path(folder) / DIGESTS_FILE, pipe, every
        with pipe.collective("checkpoint.DigestLog(..)") as control:
            self.optimizers = optimizer_list(optimizer, "DigestLog(..)", pipe.topology.world_size)
            if not is_whole_number(every, 1):
                raise PenstockError(f"every={every!r} is no number of steps: use a whole number, 1 or more")
            try:
                json.dumps(dict(settings or {}))
            except (TypeError, ValueError) as error:
                raise PenstockError(f"settings= goes into a file as JSON ({error}): give texts and numbers") from error
            self._write_on_first_rank(control, lambda: self._write_run_header(settings or {}))

    def _write_run_header(self, settings: Settings) -> None:
        """Append the settings and conditions of this run; drop records of steps that it runs again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        pipe, names, step_count = self.pipe, self.pipe._engine.parameters, self.pipe.step_count
        records = [value for value in json_lines.read(self.path) if value["step"] < step_count + ("run" not in value)]
        run = {
            "settings": {**settings, "microbatches": pipe.schedule.microbatches, "layers' seed": pipe.seed},
            "conditions": reproducibility_conditions(pipe),
            "names": list(dict.fromkeys(names.aliases.get(name, name) for name in names.order)),
        }
        json_lines.write(self.path, [*records, {"step": step_count, "run": run}])

    def record_step(self) -> None:
        """Write a line if one is due. Call it after the optimizer's step, before gradients are cleared."""
        if self.pipe.step_count % self.every == 0:
            with self.pipe.collective("DigestLog.record_step()") as control:
                line = {
                    "step": self.pipe.step_count,
                    **_gather_digests(control, self.pipe, self.optimizers, "to write their digests"),
                }
                self._write_on_first_rank(control, lambda: json_lines.append(self.path, line))

    def _write_on_first_rank(self, control: ControlGroup, write: Callable[[], None]) -> None:
        """Call `write` on rank 0. If that fails, all ranks raise."""
        if control.topology.rank == 0:
            try:
                write()
            except OSError as error:
                why = f"digests cannot be written to {self.path}: {error.strerror or error}"
                raise PenstockError(f"{why}; make room there, or train without them") from error
        control.all_gather_row((), "to keep their digests")


def reproducibility_conditions(pipe: Pipeline) -> dict[str, Any]:
    """Return the conditions that bits depend on besides inputs and settings: with equal conditions, runs have equal bits."""
    device = pipe.topology.device
    return {
        "dp": pipe.position.replicas,
        "cp": pipe.position.cp_size,
        "tp": pipe.position.num_ranks_per_stage // len(pipe.position.batch_parts),
        "sharded": any(hasattr(parameter, "placements") for parameter in pipe.parameters()),
        "order": _gradient_sum_order(pipe),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "deterministic": device.type == "cpu" or torch.are_deterministic_algorithms_enabled(),
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }


def _gradient_sum_order(pipe: Pipeline) -> str:
    """Return, as text, the order in which the microbatches' gradients of a weight are summed."""
    table = pipe.schedule
    for stage in range(table.num_stages):
        row = table.actions[table.placement[stage]]
        microbatches = [cell.microbatch for cell in row if cell.stage == stage and cell.kind in (Kind.B, Kind.W)]
        if microbatches != sorted(microbatches):
            return f"{table.name} {table.digest()[:12]}"
    return "of the microbatches"


# -- two runs -----------------------------------------------------------------------------------------------------------


class RunsNotComparableError(PenstockError):
    """Two runs cannot be compared, or differ although nothing promises them equal bits."""


StepDigests = dict[int, tuple[dict[str, Any], dict[str, dict[str, Any]]]]  # step -> (header of its run, digests)


def read_run_digests(folder: Path) -> StepDigests:
    """Return the digests of the run in `folder` by step. Raises RunsNotComparableError if it has none."""
    path = folder / DIGESTS_FILE
    if not path.is_file():
        raise RunsNotComparableError(
            f"{folder} has no {DIGESTS_FILE}: give the folder of a run that keeps digests (--digests-every, DigestLog)"
        )
    steps, run = StepDigests(), dict[str, Any]()
    try:
        for record in json_lines.read(path):
            if "run" in record:
                run = {key: record["run"][key] for key in ("settings", "conditions", "names")}
            else:
                steps[int(record["step"])] = run, {kind: dict(record[kind]) for kind in DIGEST_KINDS if kind in record}
        run["conditions"]["deterministic"]  # a file without a header is damaged, too
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunsNotComparableError(f"{path} is damaged, it is not what this Penstock writes there") from error
    return steps


def compare_runs(a: Path, b: Path) -> tuple[bool, str]:
    """Return whether the runs in two folders have equal digests in all steps of both, and a text that says where they differ.

    Raises RunsNotComparableError for runs with different settings or models, for runs without a common step, and for runs that
    differ although nothing promises them equal bits.
    """
    runs = {folder: read_run_digests(folder) for folder in (a, b)}
    common, equal = sorted(runs[a].keys() & runs[b].keys()), 0
    if not common:
        steps = " and ".join(f"{_step_range_text(list(run))} in {folder}" for folder, run in runs.items())
        raise RunsNotComparableError(f"the runs have no step in common: {steps}")
    for number in common:
        (run, digests_a), (other_run, digests_b) = runs[a][number], runs[b][number]
        _check_same_settings_and_model(run, other_run)
        if mismatches := list(_digest_mismatches(digests_a, digests_b, run["names"])):
            kind, name = mismatches[0]
            equal_text = f", {equal} is the same" if equal else ""
            lines = [f"step {number} is the first that differs{equal_text}: {tensor_description(kind, name)}"]
            for folder, named in ((a, digests_a), (b, digests_b)):
                value = named[kind].get(name, "nothing")
                lines.append(f"  {describe_ranks_by_digest(value) if isinstance(value, dict) else value} in {folder}")
            kind_counts = Counter(kind for kind, _ in mismatches)
            counts = [f"{count} of {len(digests_a[kind])} {kind}" for kind, count in kind_counts.items()]
            lines.append(f"  different in that step: {', '.join(counts)}")
            if (between := number - equal) > 1:
                lines.append(f"  it began in one of the {between} steps up to that: --digests-every 1 (every=1) shows which")
            text = "\n".join(lines)

            # Equal bits are promised under equal conditions only.
            pairs = [(key, value, other_run["conditions"].get(key)) for key, value in run["conditions"].items()]
            doubts = [f"{key} {value_a} and {value_b}" for key, value_a, value_b in pairs if value_a != value_b]
            if doubts or not run["conditions"]["deterministic"]:
                why = ", ".join(doubts) or "kernels are not deterministic"
                raise RunsNotComparableError(f"no bits are promised between these runs ({why})\n{text}")
            return False, text
        equal = number
    counts = [f"{len(digests_a[kind])} {kind}" for kind in DIGEST_KINDS if kind in digests_a and kind in digests_b]
    return True, f"the same to the bit in {_step_range_text(common)}: {', '.join(counts)}"


def _check_same_settings_and_model(run_a: Mapping[str, Any], run_b: Mapping[str, Any]) -> None:
    """Raise RunsNotComparableError if the runs have different settings or models."""
    settings, other_settings = run_a["settings"], run_b["settings"]
    pairs = [(name, settings.get(name), other_settings.get(name)) for name in {**settings, **other_settings}]
    if unlike := [f"{name} {value_a} and {value_b}" for name, value_a, value_b in pairs if value_a != value_b]:
        raise RunsNotComparableError(f"the runs cannot be compared, they have {', '.join(unlike)}")
    if lacking := {*run_a["names"]} ^ {*run_b["names"]}:
        raise RunsNotComparableError(f"the runs cannot be compared, they have other models: only one has {min(lacking)}")


def _digest_mismatches(
    step_a: Mapping[str, Any], step_b: Mapping[str, Any], name_order: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of each difference of two steps, in the order of computation: gradients from the last layer on."""
    order = {name: place for place, name in enumerate(name_order)}
    for kind in DIGEST_KINDS:
        digests_a, digests_b = step_a.get(kind, {}), step_b.get(kind, {})
        if digests_a and digests_b:
            for name in sorted(
                digests_a.keys() | digests_b.keys(), key=lambda name: order.get(name, 0), reverse=kind == "gradients"
            ):
                if digests_a.get(name) != digests_b.get(name):
                    yield kind, name


def _step_range_text(steps: Sequence[int]) -> str:
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0] if steps else 'none'}"
