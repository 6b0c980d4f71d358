"""What `penstock train` can be told: typed options, checked before anything is started. No torch."""

import importlib.util
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from penstock.commands.source import nearest_path, table_of
from penstock.errors import PenstockError
from penstock.plan import load
from penstock.schedule import Schedule

Device = Literal["auto", "cpu", "cuda", "mps"]


@dataclass(frozen=True)
class TrainConfig:
    """Train a model cut over several ranks of this machine."""

    ranks: int = 4
    """Processes the model is cut over, P (under torchrun: its processes)."""
    dp: int = 1
    """Replicas of that pipeline, each with its share of a batch's rows: ranks x dp x tp processes."""
    tp: int = 1
    """Processes that share the products of each stage."""
    data_parallel: Literal["ddp", "fsdp"] = "ddp"
    """How replicas are held equal: whole copies (DistributedDataParallel), or parameters spread over them (fully_shard)."""
    schedule: str = "1f1b"
    """A name that `penstock schedules` lists, or the path of a CSV table."""
    plan: str | None = None
    """Take schedule, cut, microbatches and recomputation from this plan.json, or plan them before the first step: for ranks
    with `2GB` of memory, or with any (`auto`). A plan may use fewer ranks."""
    microbatches: int = 8
    """M: microbatches each batch is split into."""
    stages_per_rank: int | None = None
    """V, for schedules that leave it open."""
    group_size: int | None = None
    """Microbatches that pass through all stages of a rank together, for the interleaved schedules."""
    model: Literal["gpt", "mlp"] = "gpt"
    """A small GPT that learns bytes of text, or the 16-layer MLP on handwritten digits."""
    data: Path | None = None
    """Text for the GPT: a file or a folder. Default: the sources of Python's standard library."""
    steps: int = 200
    """Optimizer steps."""
    batch: int = 32
    """Rows of a batch: sequences of text, or images."""
    learning_rate: float = 1e-3
    """Adam's peak learning rate, after a short warm-up; it falls to a tenth."""
    layers: int | None = None
    """Blocks of the GPT (default 8), or hidden layers of the MLP (default 16)."""
    width: int = 128
    """Features of each layer."""
    context: int = 64
    """Bytes the GPT sees at once."""
    dropout: float = 0.0
    """Share of the GPT's features dropped in training."""
    seed: int = 0
    """Of weights, batches, dropout and the sample."""
    device: Device = "auto"
    """Where stages live; several ranks may share one GPU."""
    compare: bool = False
    """Run the same steps in one process too and compare: loss to the last bit, time, memory."""
    checkpoint_every: int | None = None
    """Steps between checkpoints, which are written while training goes on; 0: only one, at the end. Default: 100, or 10 for a
    run that may begin again."""
    keep: int = 3
    """Checkpoints that are kept, the last ones."""
    digests_every: int = 10
    """Steps between those whose digests are kept for `penstock audit`: of weights, gradients, optimizer state; 0: none."""
    resume: Path | None = None
    """The folder of a run to go on with, from its newest whole checkpoint. Options not given are as in that run; ranks,
    schedule and microbatches may be others, steps the same or more."""
    restarts: int = 0
    """How often ranks begin again after one has died, was stopped or raised (under torchrun: its --max-restarts): from the step
    before, which is kept in memory, or the newest checkpoint."""
    least: int | None = None
    """Begin again without the processes that failed, but with so many at least; default: with all of them."""
    timeline: bool = True
    """Keep the last steps' timeline in the run's folder, measured over planned: `timeline.html` to look at."""
    watch: bool = False
    """Serve the run's page on this machine while it trains: loss, speed, bubble, memory, the last timeline. `penstock watch`
    opens it later."""
    out: Path = Path("runs")
    """Folder in which the run gets a folder of its own."""

    @property
    def processes(self) -> int:
        """All of them."""
        return self.ranks * self.dp * self.tp

    @property
    def depth(self) -> int:
        """The number of layers, its default filled in."""
        return (8 if self.model == "gpt" else 16) if self.layers is None else self.layers

    def table(self) -> Schedule:
        """The proved table of this run."""
        if self.plan is not None and self.plan.endswith(".json"):
            return load(self.plan).schedule
        return table_of(
            self.schedule, self.ranks, self.microbatches, stages_per_rank=self.stages_per_rank, group_size=self.group_size
        )

    def check(self) -> Schedule:
        """The proved table of this run. Raises PenstockError, with a value that works, for what cannot be run."""
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
        most = self.depth + 3 if self.model == "gpt" else 2 * self.depth + 1
        if self.ranks > most and not (self.plan or "").endswith(".json"):
            raise PenstockError(f"--ranks {self.ranks} are more than the model's {most} layers: use --ranks {most} or fewer")
        table = self.table()
        if table.stages > most:
            ranks = most * table.ranks // table.stages
            fewer = f"--ranks {ranks}" if ranks else f"--stages-per-rank {most // table.ranks}"
            raise PenstockError(
                f"{table.stages} stages need more layers than the model's {most}: use {fewer} or fewer, or --layers"
            )
        return table

    def _check_digits(self) -> None:
        """Raises PenstockError without scikit-learn, and for a width that the images do not fit into."""
        if importlib.util.find_spec("sklearn") is None:
            raise PenstockError("--model mlp: the digits come with scikit-learn: pip install 'penstock[mlp]'")
        if self.width < PIXELS:
            raise PenstockError(f"--width {self.width} is less than the images' {PIXELS} pixels: use {PIXELS} or more")

    def _check_text(self, path: Path) -> None:
        """Raises PenstockError if there is no text at `path`, or too little to learn from."""
        if not path.exists():
            raise PenstockError(f"--data {path} does not exist{nearest_path(path)}")
        size = sum(file.stat().st_size for file in text_files(path))
        if int(size * HELD_OUT) <= self.context:
            raise PenstockError(
                f"--data {path} has {size} bytes: at least {int((self.context + 1) / HELD_OUT) + 1} are needed for a context "
                f"of {self.context}"
            )

    def _check_same_run(self, saved: dict[str, Any]) -> None:
        """Raises PenstockError where this is to be another run than the one it resumes."""
        mine = self.described()
        for name in SAME:
            if mine[name] != saved[name]:
                option = f"--{name.replace('_', '-')}"
                raise PenstockError(
                    f"{option} {mine[name]}: the run in {self.resume} has {saved[name]}, and a resumed run keeps it: "
                    f"leave out {option}, or start a new run"
                )

    def described(self) -> dict[str, Any]:
        """The options as JSON, paths as texts."""
        options = {**asdict(self), "layers": self.depth, "data": None if self.data is None else self.data.resolve()}
        return {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}


HEADS = 4
PIXELS = 64  # of an image of a digit
HELD_OUT = 0.05  # share of a text
SETTINGS, PLAN = "run.json", "plan.json"  # their names in the folder of a run
SAME = ("model", "data", "batch", "learning_rate", "layers", "width", "context", "dropout", "seed")  # if resumed


def text_files(path: Path) -> list[Path]:
    """The file at `path`, or all below the folder."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def saved_options(folder: Path, told: str = "") -> dict[str, Any]:
    """The options of the run in `folder`, which was `told` as that. Raises PenstockError if there is none."""
    path = folder / SETTINGS
    if not path.is_file():
        instead = ": give the folder of a run" if folder.is_dir() else nearest_path(folder)
        raise PenstockError(f"{told or f'--resume {folder}'} is no run, it has no {SETTINGS}{instead}")
    try:
        saved = {"plan": None, **json.loads(path.read_text())["config"]}
        kinds = get_type_hints(TrainConfig)
        kept = {name: saved[name] for name in kinds if name in {*saved, *SAME, "out"} - {"resume", "compare", "watch"}}
        if wrong := [name for name, value in kept.items() if not _is_of(kinds[name], value)]:
            raise ValueError(f"{wrong[0]} is {kept[wrong[0]]!r}")
        return kept
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        instead = f"{'give' if told else 'resume'} another run"
        raise PenstockError(f"{path} is damaged, it is not what `penstock train` wrote there: {instead}") from error


def _is_of(kind: Any, value: Any) -> bool:
    """Whether `value`, as JSON has it, can be an option of that kind."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kinds := get_args(kind):
        return any(_is_of(each, value) for each in kinds)
    return type(value) in {Path: (str,), float: (float, int)}.get(kind, (kind,))
