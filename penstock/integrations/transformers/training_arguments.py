"""Add a pipeline's arguments to TrainingArguments, and refuse those that conflict with a pipeline."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import transformers

import penstock as ps
from penstock.comms.control_group import shared_control_group

OLDEST_RELEASE, NEWEST_RELEASE = (5, 23), (5, 24)  # of transformers, tested; before 5.23 arguments have other names
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # environment variables that accelerate reads
OPTIMIZERS = {"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"}  # update each parameter by itself

if TYPE_CHECKING:
    from transformers import TrainingArguments as Mixin
else:
    Mixin = object


@dataclass
class PipelineArguments(Mixin):
    """Options of the pipeline; a mixin for any subclass of transformers' TrainingArguments.

    Put it before that class among the bases of a dataclass. Fields are arguments of `ps.Pipeline`, except `replicas` and `cp`,
    which are axes of the mesh.
    """

    schedule: str = field(default="1f1b", metadata={"help": "A name of `penstock show`, or the path of a CSV table."})
    cuts: list[str] | None = field(
        default=None,
        metadata={"help": "Submodules that begin the stages after the first; by default by measured times."},
    )
    stages_per_rank: int | None = field(default=None, metadata={"help": "For schedules that have several."})
    recompute: str | None = field(
        default=None, metadata={"help": "`block` or `stage`: what to recompute; activation_checkpointing means block."}
    )
    replicas: int = field(default=1, metadata={"help": "How many pipelines share the rows, on ranks / replicas each."})
    slices: int = field(default=1, metadata={"help": "How many slices of tokens a microbatch passes the ranks in."})
    cp: int = field(default=1, metadata={"help": "How many ranks share the tokens of each sequence (context parallel)."})
    group: str | None = field(
        default=None,
        metadata={"help": "`planned`: regroup the rows of an optimizer step into batches of similar lengths."},
    )
    plan: str | None = field(default=None, metadata={"help": "A file of `penstock plan`: schedule, cuts, recomputation."})

    def __post_init__(self) -> None:
        check_release(transformers.__version__)
        super().__post_init__()
        arguments: Any = self  # whose other fields are those of transformers
        if arguments.activation_checkpointing:
            self.recompute = self.recompute or "block"
            arguments.activation_checkpointing = arguments.gradient_checkpointing = False

    @cached_property
    def _setup_devices(self) -> torch.device:
        """Join the ranks; then let transformers and accelerate see one process for each replica."""
        topology = ps.comms.init_distributed("gloo" if self.use_cpu else None)
        if self.replicas < 1 or topology.world_size % self.replicas:
            raise ps.MismatchError(f"replicas={self.replicas}: give a number that divides the {topology.world_size} ranks")
        if self.cp < 1 or topology.world_size // self.replicas % self.cp:
            ranks = topology.world_size // self.replicas
            raise ps.MismatchError(f"cp={self.cp}: give a number that divides the {ranks} ranks of a replica")
        with _without_launcher():
            super()._setup_devices  # noqa: B018 - makes `distributed_state`
        arguments: Any = self
        arguments._n_gpu = min(arguments._n_gpu, 1)
        if topology.device.type == "cuda":
            torch.cuda.set_device(topology.device)
        state = self.distributed_state
        state.device, state.num_processes = topology.device, self.replicas
        state.process_index = state.local_process_index = topology.rank // self.cp % self.replicas  # as `ps.comms.init_mesh`
        return topology.device

    @property
    def should_save(self) -> bool:
        """Return whether this process writes files."""
        return ps.comms.current_topology().rank == 0

    @property
    def should_log(self) -> bool:
        """Return whether this process logs more than warnings."""
        return ps.comms.current_topology().rank == 0

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the block on rank 0 first; the other ranks then read what a data set's `map` has cached."""
        topology = ps.comms.current_topology()
        if topology.world_size == 1:
            yield
            return
        control = shared_control_group(topology)
        with control.collective_call(f"main_process_first: {desc}"):
            if topology.rank > 0:
                control.all_gather_value(None, f"to do its part: {desc}")
            yield
            if topology.rank == 0:
                control.all_gather_value(None, f"to do its part: {desc}")

    @property
    def place_model_on_device(self) -> bool:
        """Return False, so that Trainer does not move the model: each rank places its own stages."""
        return False

    @property
    def cuts_tokens(self) -> bool:
        """Whether training cuts the tokens of a sequence."""
        return self.slices > 1 or self.cp > 1

    def pipeline_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `ps.Pipeline` that these arguments set, except `slices`."""
        options: dict[str, Any] = {"stages_per_rank": self.stages_per_rank, "recompute": self.recompute, "cuts": self.cuts}
        if self.plan is not None:
            options = {"plan": ps.plan.load(self.plan)}
        else:
            options |= {"schedule": self.schedule}
        options["microbatches"] = self.gradient_accumulation_steps
        return {name: value for name, value in options.items() if value is not None}


@dataclass
class TrainingArguments(PipelineArguments, transformers.TrainingArguments):
    """transformers' TrainingArguments, and those of `PipelineArguments`."""


def check_release(version: str) -> None:
    """Raise MismatchError for a release of transformers that is too old; warn about one that is not tested yet."""
    major, minor, *_ = version.split(".")
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST_RELEASE, NEWEST_RELEASE))
    if (int(major), int(minor)) < OLDEST_RELEASE:
        raise ps.MismatchError(f"transformers {version} is too old for a Trainer over ranks: install {oldest} or a newer one")
    if (int(major), int(minor)) > NEWEST_RELEASE:
        warnings.warn(
            f"a Trainer over ranks was tested with transformers {oldest} to {newest}, and this is {version}", stacklevel=3
        )


@contextmanager
def _without_launcher() -> Iterator[None]:
    """Hide the launcher's variables from accelerate, so that it sees one process; silence transformers' warning about it."""
    hidden = {name: os.environ.pop(name) for name in LAUNCHER_VARIABLES if name in os.environ}
    logger = logging.getLogger("transformers.training_args")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        os.environ.update(hidden)
        logger.setLevel(level)


CONFLICTS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda args: args.group not in (None, "planned"), "group= is None or 'planned'"),
    (lambda args: args.slices < 1, "slices= is a number of slices, 1 or more"),
    (lambda args: args.slices > 1 and args.cp > 1, "slices= and cp= cut the same tokens: leave out one"),
    (
        lambda args: args.slices > 1 and (args.plan or args.schedule.endswith((".csv", ".py"))),
        "slices= needs a schedule's name, for instance 1f1b, because evaluation runs the same cut without slices: leave out "
        "plan=, or the path of a table",
    ),
    (lambda args: args.deepspeed, "deepspeed= cuts the model in its own way: leave it out"),
    (lambda args: args.fsdp, "fsdp= shards the model in its own way: leave it out; replicas= trains several pipelines"),
    (lambda args: args.parallelism_config, "parallelism_config= spreads the model in its own way: leave it out"),
    (lambda args: args.torch_compile, "torch_compile= compiles a whole model, of which a rank has a part: leave it out"),
    (lambda args: args.auto_find_batch_size, "auto_find_batch_size= would change the batch on one rank alone: leave it out"),
    (lambda args: args.fp16_full_eval or args.bf16_full_eval, "*_full_eval casts the whole model: evaluate with bf16=True"),
    (lambda args: args.neftune_noise_alpha, "neftune_noise_alpha= hooks into the uncut model: leave it out"),
    (lambda args: args.use_liger_kernel, "use_liger_kernel= replaces the model's forward, which is cut here: leave it out"),
    (lambda args: args.debug, "debug= looks into the uncut model; on_nonfinite= of ps.Pipeline does it: leave it out"),
    (lambda args: args.save_on_each_node, "save_on_each_node= is not built: all ranks must see one output_dir"),
    (lambda args: args.enable_jit_checkpoint, "enable_jit_checkpoint= saves on one rank alone: leave it out"),
    (lambda args: getattr(args, "predict_with_generate", False), "predict_with_generate= is not built: leave it out"),
    (
        lambda args: set(args.activation_checkpointing_kwargs or {}) - {"use_reentrant"},
        "activation_checkpointing_kwargs= has no place in a pipeline: recompute='block' or 'stage' says what is computed again",
    ),
    (
        lambda args: args.optim.value not in OPTIMIZERS,
        f"optim= may look at all parameters at once, of which a rank has a part: use one of {', '.join(sorted(OPTIMIZERS))}",
    ),
    (
        lambda args: (
            args.replicas > 1 and (args.include_num_input_tokens_seen != "no" or not args.average_tokens_across_devices)
        ),
        "with replicas= tokens are averaged over all of them and not counted: leave include_num_input_tokens_seen and "
        "average_tokens_across_devices as they are by default",
    ),
]


def check_arguments(args: Any) -> None:
    """Raise MismatchError for arguments that conflict with a pipeline."""
    if not isinstance(args, PipelineArguments):
        problem = f"args is a {type(args).__name__}: make it with penstock.integrations.transformers.TrainingArguments"
        raise ps.MismatchError(f"{problem}, or with a subclass of PipelineArguments and yours")
    for has_conflict, message in CONFLICTS:
        if has_conflict(args):
            raise ps.MismatchError(message)
