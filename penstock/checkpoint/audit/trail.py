"""The file of a run's digests: every few steps a line, by which `penstock audit` compares the run with another.

`digests.jsonl` has two kinds of lines. One is written where the run is started or resumed: what it is started with, and where
it has what. One is of a step: digests of the layers' outputs, of the gradients, and of weights and optimizer state after it.
"""

import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.audit.digests import merged, own
from penstock.checkpoint.audit.outputs import Outputs, layers, summed
from penstock.checkpoint.files import json_lines
from penstock.comms.control import Control
from penstock.errors import PenstockError
from penstock.pipeline import Pipeline
from penstock.schedule.table import Kind

FILE = "digests.jsonl"
EVERY = 10  # steps


class Trail:
    """Keeps digests of a run's steps in `folder/digests.jsonl`. All ranks make one, and call `note`, alike.

    `folder`: of the run; rank 0 makes it, and writes. What is there of the steps that `pipe` has done stays, the rest goes.
    `pipe`, `optimizer`: whose. Of an optimizer of this rank's `pipe.parameters()`.
    `every`: so many steps are a line, 1 or more; those between cost nothing.
    `settings`: what decides the numbers besides - data, learning rate, .. - as JSON by name, the same on every rank. Runs
        of other settings are not compared.

        trail = checkpoint.Trail("runs/a", pipe, optimizer, settings={"data": "v2", "learning_rate": 1e-3})
        for inputs, targets in batches:
            pipe.step(inputs, target=targets)
            optimizer.step()
            trail.note()
            optimizer.zero_grad()
        trail.close()
    """

    def __init__(
        self,
        folder: str | Path,
        pipe: Pipeline,
        optimizer: Any = None,
        every: int = EVERY,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.pipe, self.optimizer, self.every = Path(folder) / FILE, pipe, optimizer, every
        with pipe.collective("checkpoint.Trail(..)") as control:
            _check(every, settings)
            everyone = control.gather_objects([[stage, name] for stage, name, _ in layers(pipe)], "to begin their digests")
            self._layers = sorted((each for rank in everyone for each in rank), key=lambda each: each[0])
            self._places = places(pipe)
            self._write(control, lambda: self._begin(settings or {}))
        self._outputs = self._listening()

    def _begin(self, settings: Mapping[str, Any]) -> None:
        """Leave what goes on, and say with what it does."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        done = self.pipe.step_count
        kept = [each for each in json_lines.read(self.path) if each["step"] < done + ("run" not in each)]
        run = {
            "settings": {**settings, "microbatches": self.pipe.schedule.microbatches, "layers' seed": self.pipe.seed},
            "conditions": conditions(self.pipe),
            "parameters": self._places,
            "layers": {name: stage for stage, name in self._layers},
            "ranks": [self.pipe.position.stages[place] for place in self.pipe.schedule.placement],
        }
        json_lines.write(self.path, [*kept, {"step": done, "run": run}])

    def _listening(self) -> Outputs | None:
        """To the layers, if the next step is one that gets a line."""
        return None if (self.pipe.step_count + 1) % self.every else Outputs(self.pipe)

    def note(self) -> None:
        """Write the step's line, if it gets one. Call it after the optimizer's step, before gradients are let go."""
        if self.pipe.step_count % self.every == 0:
            with self.pipe.collective("Trail.note()") as control:
                everyone = control.gather_objects(self._own(), "to write their digests")
                line = {"step": self.pipe.step_count, **self._line(everyone)}
                self._write(control, lambda: json_lines.add(self.path, line))
        self.close()
        self._outputs = self._listening()

    def close(self) -> None:
        """The layers are listened to no more; after the last step."""
        if self._outputs is not None:
            self._outputs.close()
            self._outputs = None

    def _write(self, control: Control, write: Callable[[], None]) -> None:
        """Have rank 0 write to the file. If it cannot, all ranks are told."""
        if control.topology.rank == 0:
            try:
                write()
            except OSError as error:
                why = f"digests cannot be written to {self.path}: {error.strerror or error}"
                raise PenstockError(f"{why}; make room there, or train without them") from error
        control.gather_objects(None, "to keep their digests")

    def _own(self) -> dict[str, dict[str, str]]:
        report, heard = self.pipe.report, {}
        if self._outputs is not None and not (report and report.nonfinite and not report.skipped):  # else of two attempts
            heard = {"outputs": self._outputs.close()}
        return heard | own(self.pipe, self.optimizer)

    def _line(self, everyone: list[dict[str, dict[str, str]]]) -> dict[str, Any]:
        """All ranks' as one. Replicas have outputs of their own rows: they count together."""
        heard = [each.pop("outputs", {}) for each in everyone]
        outputs = {name: [each[name] for each in heard if name in each] for _, name in self._layers}
        found = merged(everyone, list(self._places))
        return {
            "outputs": {name: summed(each) for name, each in outputs.items() if each},
            **{kind: found[kind] for kind in ("gradients", "weights", "optimizer") if kind in found},
        }


def _check(every: int, settings: Mapping[str, Any] | None) -> None:
    """Raises PenstockError for arguments that a trail cannot have."""
    if not isinstance(every, int) or every < 1:
        raise PenstockError(f"every={every!r} is no number of steps: use a whole number, 1 or more")
    try:
        json.dumps(dict(settings or {}))
    except (TypeError, ValueError) as error:
        why = f"settings= goes into a file as JSON, which cannot hold it ({error})"
        raise PenstockError(f"{why}: give texts and numbers") from error


def places(pipe: Pipeline) -> dict[str, list[int]]:
    """Every name in the uncut model's state, in its order, tied ones under the first -> its stages."""
    found, aliases = dict[str, list[int]](), pipe.aliases
    for name, stages in pipe.homes.items():
        first = aliases.get(name, name)
        found[first] = sorted({*found.get(first, []), *stages})
    return found


def conditions(pipe: Pipeline) -> dict[str, Any]:
    """What bits depend on besides the numbers that go in: two runs that are alike in these have the same."""
    device = pipe.topology.device
    cuda = device.type == "cuda"
    return {
        "dp": pipe.position.replicas,
        "tp": pipe.position.copies // pipe.position.replicas,
        "sharded": any(hasattr(each, "placements") for each in pipe.parameters()),
        "order": _order(pipe),
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "deterministic": device.type == "cpu" or torch.are_deterministic_algorithms_enabled(),
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }


def _order(pipe: Pipeline) -> str:
    """In which the microbatches' gradients of a weight are summed up."""
    table = pipe.schedule
    for stage in range(table.stages):
        row = table.actions[table.placement[stage]]
        added = [each.microbatch for each in row if each.stage == stage and each.kind in (Kind.B, Kind.W)]
        if added != sorted(added) or pipe.merge_weight_gradients:
            return f"{table.name} {table.digest()[:12]}{' merged' if pipe.merge_weight_gradients else ''}"
    return "of the microbatches"
