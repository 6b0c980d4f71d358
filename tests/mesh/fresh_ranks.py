"""What ranks do that share nothing but the rendezvous; `fresh_ranks.py FOLDER CASE ..` leaves their results in FOLDER."""

import io
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from error_text import named_outcome
from models import MLPBlock
from torch import Tensor, nn

import penstock as ps
from penstock import checkpoint
from penstock.commands.cli import main
from penstock.stage.dtensor import gather_full_tensor

WIDTH = 8
TUTORIAL, FEW = Path(__file__).parents[2] / "examples" / "tutorial.py", ("--steps", "3", "--layers", "4")
SMALL = {"steps": 3, "batch": 8, "width": 16, "context": 16, "layers": 2, "microbatches": 4, "dropout": 0}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, WIDTH), MLPBlock(WIDTH), MLPBlock(WIDTH), MLPBlock(WIDTH), nn.Linear(WIDTH, 3)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator).double(), torch.randn(8, 3, generator=generator).double()


def gradients(pipe: ps.Pipeline) -> dict[str, Tensor]:
    return {name: gather_full_tensor(parameter.grad) for name, parameter in pipe.named_parameters()}


def stepped(schedule: str = "1f1b", microbatches: int = 4, mesh: tuple[int, int, int] | None = None, **options: Any) -> Any:
    """The loss and the gradients of one step, on a mesh of (pp, dp, tp) or on one pipeline."""
    if mesh is not None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
        options |= {"mesh": ps.comms.init_mesh(*mesh), "tensor_parallel": plan if mesh[2] > 1 else None}
    pipe = ps.Pipeline(model(), nn.functional.mse_loss, schedule, microbatches, **options)
    position = pipe.position
    inputs, target = (microbatch.tensor_split(position.replicas)[position.replica] for microbatch in batch(0))
    return pipe.step(inputs, target=target), gradients(pipe)


def adam(pipe: ps.Pipeline) -> torch.optim.Optimizer:
    return torch.optim.Adam(pipe.parameters(), lr=0.1)


def trained(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer, until: int) -> dict[str, Tensor]:
    """Go on from the steps that are done; returns the parameters then."""
    for step in range(pipe.step_count, until):
        inputs, target = batch(step)
        pipe.step(inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
    return dict(pipe.state_dict())


def resumed(folder: Path) -> dict[str, Tensor]:
    pipe = ps.Pipeline(model(), nn.functional.mse_loss, microbatches=4)
    optimizer = adam(pipe)
    assert checkpoint.resume(folder.parent / "saved", pipe, optimizer) == {"told": ["text", 1]}
    return trained(pipe, optimizer, 3)


def llama() -> nn.Module:
    import transformers

    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 17}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_key_value_heads=1, max_position_embeddings=12))


def sentences() -> tuple[dict[str, Any], Tensor]:
    ids = torch.randint(1, 17, (4, 7), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(6)[None] < 3 + torch.arange(4)[:, None]).long()  # where there is one, kernels are the uncut model's
    return {"input_ids": ids[:, :-1], "attention_mask": mask, "use_cache": False}, ids[:, 1:]


def token_loss(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def exported(pipeline: Any = ps.Pipeline) -> Any:
    inputs, target = sentences()
    example = {name: value[:2] if isinstance(value, Tensor) else value for name, value in inputs.items()}
    pipe = pipeline(llama(), token_loss, "1f1b", 2, cuts=["model.layers.1"], example_args=(), example_kwargs=example)
    return pipe.step(target=target, **inputs), gradients(pipe)


def t5() -> nn.Module:
    import transformers

    shape = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 17}
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, dropout_rate=0, decoder_start_token_id=0))


def no_decay_for_embeddings(model: Any) -> torch.optim.Optimizer:
    """AdamW with groups made by names, as scripts make them."""
    names = dict(model.named_parameters())
    embeddings = [name for name in names if "shared" in name or "embed" in name]
    groups = [[names[name] for name in names if (name in embeddings) == chosen] for chosen in (True, False)]
    return torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1]}], lr=0.05, weight_decay=0.5)


def translation(step: int) -> tuple[dict[str, Any], Tensor]:
    ids = torch.randint(1, 17, (3, 4, 5), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids[0], "decoder_input_ids": ids[1], "use_cache": False}, ids[2]


def tied(pipeline: Any = ps.Pipeline) -> tuple[list[str], dict[str, Tensor]]:
    """The names on this rank, and the state after four steps."""
    inputs, _ = translation(0)
    example = {name: value[:2] if isinstance(value, Tensor) else value for name, value in inputs.items()}
    pipe = pipeline(t5(), token_loss, "1f1b", 2, cuts=["decoder"], example_args=(), example_kwargs=example)
    optimizer = no_decay_for_embeddings(pipe)
    for step in range(4):
        inputs, target = translation(step)
        pipe.step(target=target, **inputs)
        pipe.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [name for name, _ in pipe.named_parameters()], dict(pipe.state_dict())


def failed() -> list[str]:
    """What each of two steps raises here: the model does on rank 1, and then the ranks have different tables."""
    pipe = ps.Pipeline(model(), nn.functional.mse_loss, microbatches=4)
    inputs, target = batch(0)
    hooks = [stage[-1].register_forward_pre_hook(lambda *_: 1 / 0) for stage in pipe.stages.values() if pipe.topology.rank == 1]
    expected_message = [named_outcome(lambda: pipe.step(inputs, target=target))]
    for hook in hooks:
        hook.remove()
    pipe.step(inputs, target=target)  # works again
    schedule = "1f1b" if pipe.topology.rank else "gpipe"
    return [*expected_message, named_outcome(lambda: ps.Pipeline(model(), nn.functional.mse_loss, schedule, 4))]


def differed(folder: Path) -> list[str]:
    """What a save on rank 0 alone comes to, and one on a rank that has left the loop early."""
    pipe = ps.Pipeline(model(), nn.functional.mse_loss, microbatches=4)
    optimizer, rank = adam(pipe), pipe.topology.rank

    def train_and_save(until: int, saves: bool) -> None:
        trained(pipe, optimizer, until)
        if saves:
            checkpoint.save(folder / "alone", pipe, optimizer)

    expected_message = [named_outcome(lambda: train_and_save(1 + rank, saves=rank == 0))]
    return [*expected_message, named_outcome(lambda: train_and_save(3 - rank, saves=rank == 1))]


def own_stages() -> Any:
    """A step of the stages that a V places here, and what is said of one of them that is given bare."""
    table, layers = ps.schedule.build("zb-v", ranks=2, microbatches=4), model()
    stages = [layers[:1], layers[1:2], layers[2:4], layers[4:]]
    own = {stage: stages[stage] for stage in table.stages_of(ps.comms.init_distributed().rank)}
    pipe = ps.Pipeline(own, nn.functional.mse_loss, table)
    inputs, target = batch(0)
    loss = pipe.step(inputs, target=target)
    return loss, gradients(pipe), named_outcome(lambda: ps.Pipeline(MLPBlock(WIDTH), nn.functional.mse_loss, table))


def said(program: Callable[[], Any], *words: object) -> str:
    """What it prints here for these words."""
    sys.argv = list(map(str, words))
    with redirect_stdout(io.StringIO()) as output:
        program()
    return output.getvalue()


def trains(folder: Path, data: str, out: str, *words: object) -> str:
    """What `penstock train` says of a small run."""
    options = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    return said(main, "penstock", "train", "--data", folder / data, "--out", folder / out, *words, *options)


def tutorial() -> str:
    return said(lambda: runpy.run_path(str(TUTORIAL), run_name="__main__"), TUTORIAL, "--schedule", "1f1b", *FEW)


def summed(pipeline: Any = ps.Pipeline) -> Any:
    """One step whose loss is a sum."""
    pipe, (inputs, target) = pipeline(model(), nn.MSELoss(reduction="sum"), "1f1b", 4, reduction="sum"), batch(0)
    return pipe.step(inputs, target=target), gradients(pipe)


LABELS = torch.tensor([2, -100, 0, -100, -100, -100, 1, 2])  # 1, 1, 0 and 2 count in four microbatches
CLASS_WEIGHTS = torch.tensor([0.5, 3.0, 1.0]).double()


def counted() -> Any:
    """One step of which some rows do not count, and some more than others; and what is said without a loss_weight."""
    loss_fn = nn.CrossEntropyLoss(CLASS_WEIGHTS)
    pipe = ps.Pipeline(model(), loss_fn, "1f1b", 4, ps.tokens(weight=CLASS_WEIGHTS))
    found = pipe.step(batch(0)[0], target=LABELS), gradients(pipe)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps.Pipeline(model(), nn.CrossEntropyLoss(), "1f1b", 4).step(batch(0)[0], target=LABELS)
    return *found, [str(warning.message) for warning in caught]


def clipped_steps(pipe: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The norms of three steps, clipped by torch's own line, and the parameters after them."""
    optimizer, norms = adam(pipe), []
    for step in range(3):
        pipe.step(batch(step)[0], target=batch(step)[1])
        norms.append(nn.utils.clip_grad_norm_(pipe.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.clone() for name, value in pipe.state_dict().items()}


def clipped() -> Any:
    """`clipped_steps`, and what is told of a list."""
    pipe = ps.Pipeline(model(), nn.functional.mse_loss, "1f1b", 4)
    steps = clipped_steps(pipe)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            pipe.step(batch(0)[0], target=batch(0)[1])
            nn.utils.clip_grad_norm_(list(pipe.parameters()), 0.05)
    return steps, [str(warning.message) for warning in caught], named_outcome(lambda: torch.optim.LBFGS(pipe.parameters()))


CASES: dict[str, Callable[[Path], Any]] = {
    "tp": lambda _: stepped(mesh=(1, 1, 2)),
    "pp and tp": lambda _: stepped(mesh=(2, 1, 2)),
    "fsdp": lambda _: stepped(mesh=(1, 2, 1), microbatches=1, data_parallel="fsdp"),
    "split backward": lambda _: stepped("zb-h1"),
    "own stages": lambda _: own_stages(),
    "resume": resumed,
    "transformers": lambda _: exported(),
    "tied": lambda _: tied(),
    "errors": lambda _: failed(),
    "sum": lambda _: (summed(), named_outcome(lambda: ps.Pipeline(model(), nn.MSELoss(reduction="sum")))),
    "counted": lambda _: counted(),
    "clipped": lambda _: clipped(),
    "different calls": differed,
    "train": lambda folder: trains(folder, "text", "own"),
    "train with tp": lambda folder: trains(folder, "text/a.txt", "shared", "--ranks", 1, "--tp", 2),
    "tutorial": lambda _: tutorial(),
}


def run(folder: Path, cases: list[str]) -> None:
    """Run the cases on this rank."""
    torch.set_num_threads(1)
    rank = ps.comms.init_distributed().rank
    results = {case: CASES[case](folder) for case in cases}
    torch.save({"hash": hash("the same text"), **results}, folder / f"rank-{rank}.pt")


def spawned(rank: int, ranks: int, store: Path, folder: Path, cases: list[str]) -> None:
    """The first function of a process that `multiprocessing` has spawned."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    run(folder, cases)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    run(Path(sys.argv[1]), sys.argv[2:])
