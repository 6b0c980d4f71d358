"""Load torch.profiler's traces as a record, with a progress bar if they are large; `penstock export-costs`."""

import sys
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import Progress

from penstock.commands.command_options import command
from penstock.errors import PenstockError
from penstock.integrations.torch_trace import is_traces, read_record, trace_files
from penstock.plan import LayerCost, ModelProfile
from penstock.schedule import Kind, Measurement
from penstock.view.files import report_write_errors
from penstock.view.reading import load
from penstock.view.record import Record

MIN_BAR_BYTES = 50_000_000


def read_traces(source: Path, stages_per_rank: int = 1) -> tuple[Record, list[str]]:
    """Return the steps in the traces at `source`, and notes on how they were read. Arguments, errors: as `read_record`."""
    size = sum(file.stat().st_size for file in trace_files(source))
    is_shown = size >= MIN_BAR_BYTES and sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=not is_shown) as bar:
        task = bar.add_task(f"reading {source}", total=size)
        return read_record(source, on_bytes=lambda count: bar.advance(task, count), stages_per_rank=stages_per_rank)


def layer_costs(record: Record, rows: int = 1) -> ModelProfile:
    """Return the costs of the stages, as layers `stage0`, `stage1`, .. of a model, for microbatches of `rows` rows.

    Raises ScheduleError if a stage ran no forward or no backward.
    """
    measurement = Measurement.from_timelines(*record.steps, layers=record.layers)
    times, gaps = measurement.seconds, measurement.engine_seconds
    layers = []
    for stage in range(measurement.schedule.stages):
        forward, inputs, weights = (times[kind][stage] + gaps[kind][stage] for kind in (Kind.F, Kind.I, Kind.W))
        sizes = measurement.activation_sizes[stage] if measurement.activation_sizes else (0.0, 0.0)
        layers.append(LayerCost(f"stage{stage}", forward, inputs, weights, *sizes))
    return ModelProfile.from_layers(layers, rows)


@command(source="RUN | TRACES", out="[FILE]", rows="ROWS")
class ExportCostsCommand:
    """Write each stage's costs in a run or traces to a file.

    `penstock plan --costs` and `penstock search --costs` read it.
    """

    source: tyro.conf.Positional[Path]
    """Folder of a run, its timeline.json, or a folder of torch.profiler's traces, one a rank."""
    out: tyro.conf.Positional[Path] = Path("costs.json")
    """File to write."""
    rows: int = 1
    """Rows of a microbatch. With 1, `penstock plan --batch` counts microbatches."""

    def run(self) -> None:
        """Read, measure, write."""
        if self.rows < 1:
            raise PenstockError(f"--rows {self.rows} is too small: use 1 or more")
        record, notes = read_traces(self.source) if is_traces(self.source) else (load(self.source), list[str]())
        layers = layer_costs(record, self.rows)
        with report_write_errors(self.out):
            layers.save(self.out)
        print("\n".join([*notes, f"wrote {self.out}: {_contents(layers)}"]))


def _contents(profile: ModelProfile) -> str:
    """Return what a file of stages' costs has in it, and what not."""
    [sample] = profile.samples
    count, memory = len(sample.layers), any(stage.activation for stage in sample.layers)
    missing = f"{'' if memory else 'memory, '}parameters, messages"
    return (
        f"seconds of forward and backward of {count} stage{'s' * (count > 1)}{', bytes of their activations' * memory}, for "
        f"microbatches of {sample.rows} row{'s' * (sample.rows > 1)}; not in it: {missing}"
    )
