"""The options of `penstock train`, checked before anything is started. No torch."""

import importlib.util
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from penstock.commands.source import check_size, nearest_path, table_from_python, table_of
from penstock.errors import PenstockError
from penstock.plan import load
from penstock.schedule import Schedule, verify

Device = Literal["auto", "cpu", "cuda", "mps"]


@dataclass(frozen=True)
class TrainConfig:
    """Train a model cut over several ranks of this machine."""

    ranks: int = 4
    """P, the processes that the model is cut over, a table's own for a table; torchrun's number under torchrun."""
    dp: int = 1
    """Replicas of the pipeline, which share the rows of a batch; ranks x dp x tp processes are started."""
    tp: int = 1
    """Processes that share the matrix products of each stage."""
    data_parallel: Literal["ddp", "fsdp"] = "ddp"
    """Replicas as whole copies (DistributedDataParallel), or with sharded parameters (fully_shard)."""
    schedule: str = "1f1b"
    """Name that `penstock schedules` lists, CSV table, or a .py with a function that makes one, which is run here."""
    plan: str | None = None
    """Plan before the first step, for any memory (auto) or ranks with 2GB, or follow a plan.json; may use fewer ranks."""
    microbatches: int = 8
    """M, the microbatches that a batch is split into, a table's own for a table."""
    stages_per_rank: int | None = None
    """V, the stages on each rank, for the schedules that take any number."""
    group_size: int | None = None
    """Microbatches that pass through all stages of a rank together, for the interleaved schedules."""
    model: Literal["gpt", "mlp"] = "gpt"
    """Small GPT that learns bytes of text, or MLP that learns handwritten digits."""
    data: Path | None = None
    """Text for the GPT, a file or a folder; by default the sources of Python's standard library."""
    steps: int = 100
    """Optimizer steps."""
    batch: int = 32
    """Rows of a batch: sequences of text, or images."""
    learning_rate: float = 1e-3
    """Peak learning rate; it rises in a short warm-up and falls to a tenth."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW; or Muon for the matrices between the first and the last layer, and AdamW for the other parameters."""
    layers: int | None = None
    """Blocks of the GPT, 8 by default, or hidden layers of the MLP, 16 by default."""
    width: int = 128
    """Features of each layer."""
    context: int = 64
    """Bytes that the GPT sees at once."""
    dropout: float = 0.0
    """Share of the GPT's features that training drops."""
    seed: int = 0
    """Seed of weights, batches, dropout and the sample."""
    device: Device = "auto"
    """Device of the stages; several ranks may share one GPU."""
    compare: bool = False
    """Run the same steps in one process too, and compare loss, time and memory."""
    checkpoint_every: int | None = None
    """Steps between checkpoints, 100 by default, 10 with --restarts; 0 writes only the one at the end."""
    keep: int = 3
    """Number of checkpoints to keep, the newest ones."""
    digests_every: int = 10
    """Steps between digests of weights, gradients and optimizer state, for `penstock audit`; 0 writes none."""
    resume: Path | None = None
    """Continue this run from its newest whole checkpoint, with its options where no others are given."""
    restarts: int = 0
    """Number of times that the ranks start again after a rank failed; torchrun's --max-restarts under torchrun."""
    least: int | None = None
    """Start again without the ranks that failed, with this many or more; by default all ranks start again."""
    timeline: bool = True
    """Write timeline.html to the run's folder: the last steps, measured and predicted."""
    watch: bool = False
    """Serve the run's page while it trains: loss, speed, bubble, memory, timeline."""
    out: Path = Path("runs")
    """Folder in which the run makes its folder."""

    @property
    def processes(self) -> int:
        """Return the number of processes: ranks x dp x tp."""
        return self.ranks * self.dp * self.tp

    @property
    def depth(self) -> int:
        """Return the number of layers, the model's default if none is given."""
        return (8 if self.model == "gpt" else 16) if self.layers is None else self.layers

    @property
    def _is_fixed(self) -> bool:
        """Whether the table is a file's, for as many ranks as it has."""
        return self.schedule.endswith(".csv") or (self.plan or "").endswith(".json")

    def _min_depth(self, stages: int) -> int:
        """Return the fewest --layers of a model that can be cut into so many stages."""
        return stages - 3 if self.model == "gpt" else stages // 2

    def table(self) -> Schedule:
        """Return the proved table of this run."""
        if self.plan is not None and self.plan.endswith(".json"):
            plan = load(self.plan)
            typed_ranks = None if plan.ranks * plan.dp == self.ranks * self.dp else self.ranks  # a plan may set the replicas
            check_size(self.plan, (plan.ranks, plan.microbatches), typed_ranks, self.microbatches)
            return plan.schedule
        options = {"stages_per_rank": self.stages_per_rank, "group_size": self.group_size}
        if self.schedule.endswith(".py"):
            table = table_from_python(self.schedule, self.ranks, self.microbatches, **options)
            verify(table)
            return table
        return table_of(self.schedule, self.ranks, self.microbatches, **options)

    def check(self) -> Schedule:
        """Check all options and return the proved table. Raises PenstockError, with a value that works."""
        for name in ("ranks", "dp", "tp", "microbatches", "steps", "batch", "depth", "width", "context", "keep"):
            if getattr(self, name) < 1:
                raise PenstockError(f"--{name.replace('depth', 'layers')} {getattr(self, name)} is too small: use 1 or more")
        if not 0 <= self.seed < 2**63:
            raise PenstockError(f"--seed {self.seed} is no seed: use 0 or more, less than 2**63")
        if self.restarts < 0:
            raise PenstockError(f"--restarts {self.restarts} is no number of times: use 0 (none) or more")
        if self.least is not None and not 1 <= self.least <= self.processes:
            raise PenstockError(f"--least {self.least} of {self.processes} processes cannot be: use 1 to {self.processes}")
        if self.checkpoint_every is not None and self.checkpoint_every < 0:
            raise PenstockError(f"--checkpoint-every {self.checkpoint_every} is no number of steps: use 0 (at the end) or more")
        if self.digests_every < 0:
            raise PenstockError(f"--digests-every {self.digests_every} is no number of steps: use 0 (none) or more")
        if self.resume is not None:
            self._check_same_run(saved_options(self.resume))
        if self.device == "cuda" and not [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("dxg")]:
            raise PenstockError("--device cuda: this machine has no NVIDIA GPU; use --device cpu")
        if self.batch < self.dp:
            raise PenstockError(f"--batch {self.batch} has no row for each of {self.dp} replicas: use {self.dp} or more")
        if self.tp > 1 and (self.model != "gpt" or HEADS % self.tp):
            raise PenstockError(f"--tp {self.tp}: the GPT's {HEADS} heads can be shared by 1, 2 or 4 ranks, the MLP by none")
        if self.optimizer == "muon" and (self.tp > 1 or (self.dp > 1 and self.data_parallel == "fsdp")):
            raise PenstockError(
                "--optimizer muon takes whole matrices, and --tp and --data-parallel fsdp divide them: use --tp 1 and ddp"
            )
        if self.tp > 1 and self.dropout:
            raise PenstockError(
                f"--tp {self.tp} --dropout {self.dropout}: ranks that share products drop alike; use --dropout 0"
            )
        if self.width % HEADS and self.model == "gpt":
            raise PenstockError(
                f"--width {self.width} does not divide by {HEADS} heads: use {max(1, self.width // HEADS) * HEADS}"
            )
        if not 0 <= self.learning_rate < math.inf:
            raise PenstockError(f"--learning-rate {self.learning_rate} is no rate: use a number like 1e-3")
        if not 0 <= self.dropout < 1:
            raise PenstockError(f"--dropout {self.dropout} is not a share: use 0 up to, but not including, 1")
        if self.model == "mlp":
            self._check_digits()
        if self.data is not None:
            self._check_text(self.data)
        num_layers = self.depth + 3 if self.model == "gpt" else 2 * self.depth + 1
        if self.ranks > num_layers and not (self.plan or "").endswith(".json"):
            raise PenstockError(
                f"--ranks {self.ranks} are more than the model's {num_layers} layers: use --ranks {num_layers} or fewer"
            )
        table = self.table()
        if table.num_stages > num_layers:
            ranks = num_layers * table.ranks // table.num_stages
            fewer = f"--ranks {ranks}" if ranks else f"--stages-per-rank {num_layers // table.ranks}"
            fewer = "" if self._is_fixed else f"{fewer} or fewer, or "
            more = f"--layers {self._min_depth(table.num_stages)} or more"
            raise PenstockError(f"{table.num_stages} stages need more layers than the model's {num_layers}: use {fewer}{more}")
        return table

    def _check_digits(self) -> None:
        """Raise PenstockError without scikit-learn, and for a width smaller than the images."""
        if importlib.util.find_spec("sklearn") is None:
            raise PenstockError("--model mlp: the digits come with scikit-learn: pip install 'penstock-pipeline[mlp]'")
        if self.width < PIXELS:
            raise PenstockError(f"--width {self.width} is less than the images' {PIXELS} pixels: use {PIXELS} or more")

    def _check_text(self, path: Path) -> None:
        """Raise PenstockError if there is no text at `path`, or too little to learn from."""
        if not path.exists():
            raise PenstockError(f"--data {path} does not exist{nearest_path(path)}")
        size = sum(file.stat().st_size for file in text_files(path))
        if int(size * HELD_OUT) <= self.context:
            raise PenstockError(
                f"--data {path} has {size} bytes: at least {int((self.context + 1) / HELD_OUT) + 1} are needed for a context "
                f"of {self.context}"
            )

    def _check_same_run(self, saved: dict[str, Any]) -> None:
        """Raise PenstockError if an option that decides the numbers differs from the resumed run's."""
        options = self.to_json()
        for name in FIXED_OPTIONS:
            if options[name] != saved[name]:
                option = f"--{name.replace('_', '-')}"
                raise PenstockError(
                    f"{option} {options[name]}: the run in {self.resume} has {saved[name]}, and a resumed run keeps it: "
                    f"leave out {option}, or start a new run"
                )

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON values, with paths as strings."""
        options = {**asdict(self), "layers": self.depth, "data": None if self.data is None else self.data.resolve()}
        return {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}


HEADS = 4
PIXELS = 64  # of an image of a digit
HELD_OUT = 0.05  # share of a text
SETTINGS, PLAN, REPORT = "run.json", "plan.json", "report.txt"  # file names in the folder of a run
BETTER_PLAN = "better_plan.json"  # there too, at the end, if there is one
# A resumed run must keep these options.
FIXED_OPTIONS = ("model", "data", "batch", "learning_rate", "optimizer", "layers", "width", "context", "dropout", "seed")


def text_files(path: Path) -> list[Path]:
    """Return the file `path`, or all files below the folder `path`."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def saved_options(folder: Path, typed: str = "") -> dict[str, Any]:
    """Return the options of the run in `folder`. Raises PenstockError, which names what was `typed`, if there is none."""
    path = folder / SETTINGS
    if not path.is_file():
        advice = ": give the folder of a run" if folder.is_dir() else nearest_path(folder)
        raise PenstockError(f"{typed or f'--resume {folder}'} is no run, it has no {SETTINGS}{advice}")
    try:
        saved = {"plan": None, "optimizer": "adamw", **json.loads(path.read_text())["config"]}
        kinds = get_type_hints(TrainConfig)
        known_options = {*saved, *FIXED_OPTIONS, "out"} - {"resume", "compare", "watch"}
        options = {name: saved[name] for name in kinds if name in known_options}
        if wrong := [name for name, value in options.items() if not _has_type(kinds[name], value)]:
            raise ValueError(f"{wrong[0]} is {options[wrong[0]]!r}")
        return options
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        advice = f"{'give' if typed else 'resume'} another run"
        raise PenstockError(f"{path} is damaged, it is not what `penstock train` wrote there: {advice}") from error


def _has_type(kind: Any, value: Any) -> bool:
    """Return whether the JSON value `value` can be an option of type `kind`."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kinds := get_args(kind):
        return any(_has_type(member, value) for member in kinds)
    return type(value) in {Path: (str,), float: (float, int)}.get(kind, (kind,))
