"""torch.distributed.checkpoint both ways: what Penstock exports torch loads, what torch saves Penstock imports, to the bit."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import plain_training
import pytest
import torch
import torch.distributed.checkpoint
from error_text import error_text
from plain_training import STEPS, STOP, Net, batch, loss_fn, optimizers_of, train
from reference import assert_same, merged
from runners import on_ranks
from slow_cases import slow_except
from torch import Tensor, nn

import penstock as ps
from penstock import checkpoint
from penstock.checkpoint.files import dcp_files
from penstock.checkpoint.files.tensor_files import DTYPES

pytestmark = pytest.mark.ranks


def never_stopped() -> dict[str, Tensor]:
    model = Net()
    return dict(train(model, optimizers_of(model.named_parameters()), 0, STEPS))


def pipeline(schedule: Any, cuts: list[str] | None, lr: float = 0.02, **options: Any) -> tuple[ps.Pipeline, list[Any]]:
    pipe = ps.Pipeline(Net(), loss_fn, schedule, 4, cuts=cuts, **options)
    return pipe, optimizers_of(pipe.named_parameters(), lr)


def go_on(pipe: ps.Pipeline, optimizers: list[Any], begin: int, end: int) -> dict[str, Any]:
    for step in range(begin, end):
        pipe.step(batch(step), target=batch(step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in pipe.state_dict().items()}


def export(folder: Path) -> None:
    pipe, optimizers = pipeline("1f1b", ["layers.1", "norm"])
    go_on(pipe, optimizers, 0, STOP)
    checkpoint.export(pipe, folder, optimizers, format="dcp")
    checkpoint.export(pipe, folder, optimizers, format="dcp")  # over the first one


def resume(folder: Path, schedule: Any, cuts: list[str] | None) -> dict[str, Any]:
    pipe, optimizers = pipeline(schedule, cuts, lr=1.0)
    checkpoint.import_weights(pipe, folder, optimizers)
    return go_on(pipe, optimizers, STOP, STEPS)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "dcp"
    on_ranks(export, 3, folder)
    return folder


def test_torch_loads_what_three_ranks_exported_in_a_process_without_penstock_and_goes_on_to_the_bit(
    exported: Path, tmp_path: Path
) -> None:
    assert sorted(path.name for path in exported.iterdir()) == [".metadata", *(f"__{rank}_0.distcp" for rank in range(3))]
    subprocess.run([sys.executable, "-W", "ignore", plain_training.__file__, exported, tmp_path / "state"], check=True)
    assert_same(torch.load(tmp_path / "state"), never_stopped())


def test_another_cut_imports_what_ranks_exported(exported: Path) -> None:
    assert_same(merged(on_ranks(resume, 2, exported, "zb-h1", ["layers.1"])), never_stopped())


def save_with_torch(folder: Path, kind: str) -> None:
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model = Net()
    optimizers = optimizers_of(model.named_parameters())
    train(model, optimizers, 0, STOP)
    options = StateDictOptions(flatten_optimizer_state_dict=kind != "by number")
    weights, state = get_state_dict(model, optimizers, options=options)
    parts = {
        "flat": {**weights, **state},
        "parts": {"model": weights, "optimizer": state, "step": 2, "loader": {"position": torch.arange(3)}},
        "by number": {"app": {"model": weights, "optim": state}},
        "torchtitan": {
            **weights,
            "optimizer": state,
            "train_state": {"step": torch.tensor(2)},
            "lr_scheduler": {"last_epoch": 2},
        },
        "numbers": {"model": model.state_dict(), "optimizer": optimizers[1].state_dict()},
    }
    save(parts[kind], checkpoint_id=folder)


@pytest.mark.parametrize("kind", slow_except(["flat", "torchtitan"], ["flat", "parts", "by number", "torchtitan"]))
def test_a_training_that_torch_has_saved_goes_on_over_ranks_to_the_bit(kind: str, tmp_path: Path) -> None:
    save_with_torch(tmp_path, kind)
    assert_same(resume(tmp_path, "1f1b", None), never_stopped())
    if kind in ("flat", "torchtitan"):
        assert_same(merged(on_ranks(resume, 3, tmp_path, "gpipe", ["layers.0", "norm"])), never_stopped())


class Deep(nn.Sequential):
    """Layers whose shards on two ranks are unequal, unless `width` is even."""

    def __init__(self, width: int = 7) -> None:
        torch.manual_seed(0)
        super().__init__(*[nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6)) for _ in range(4)])


def deep_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)


def deep_steps(pipe: ps.Pipeline, optimizer: Any, begin: int, end: int) -> dict[str, Any]:
    for step in range(begin, end):
        inputs, target = deep_batch(step)
        pipe.step(inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
    full = lambda value: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()  # noqa: E731
    return {name: full(value) for name, value in pipe.state_dict().items()}


def deep_pipeline(mesh: tuple[int, int, int] | None, data_parallel: str) -> tuple[ps.Pipeline, Any]:
    plan = None
    if mesh is not None and mesh[2] > 1:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        plan = {"*.0": ColwiseParallel(), "*.2": RowwiseParallel()}
    device_mesh = None if mesh is None else ps.comms.init_mesh(*mesh[:2], tp=mesh[2])
    pipe = ps.Pipeline(
        Deep(8 if plan else 7),
        nn.functional.mse_loss,
        "1f1b",
        2,
        mesh=device_mesh,
        data_parallel=data_parallel,
        tensor_parallel=plan,
    )
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.05)


def deep_export(folder: Path, mesh: tuple[int, int, int], data_parallel: str) -> dict[str, Any]:
    pipe, optimizer = deep_pipeline(mesh, data_parallel)
    deep_steps(pipe, optimizer, 0, STOP)
    checkpoint.export(pipe, folder, optimizer, format="dcp")
    return deep_steps(pipe, optimizer, STOP, STEPS)


def deep_resume(folder: Path, mesh: tuple[int, int, int], data_parallel: str) -> dict[str, Any]:
    pipe, optimizer = deep_pipeline(mesh, data_parallel)
    checkpoint.import_weights(pipe, folder, optimizer)
    return deep_steps(pipe, optimizer, STOP, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "data_parallel"), [((2, 2, 1), "fsdp"), ((2, 2, 1), "ddp"), ((2, 1, 2), "ddp")], ids=str)
def test_shards_are_exported_whole_and_imported_as_shards(mesh: Any, data_parallel: str, tmp_path: Path) -> None:
    expected = merged(on_ranks(deep_export, 4, tmp_path, mesh, data_parallel))
    assert_same(merged(on_ranks(deep_resume, 4, tmp_path, mesh, data_parallel)), expected)


def save_shards_with_torch(folder: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard

    ps.comms.init_distributed()  # only to have a group
    model = Deep()
    for layer in [*model, model]:
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def train_both(begin: int, end: int) -> None:
        for step in range(begin, end):
            inputs, target = deep_batch(step)
            for piece, wanted in zip(inputs.chunk(2), target.chunk(2), strict=True):
                loss = nn.functional.mse_loss(model(piece), wanted)
                loss.backward(torch.full_like(loss, 0.5))
            optimizer.step()
            optimizer.zero_grad()

    train_both(0, STOP)
    states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    train_both(STOP, STEPS)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def test_uneven_shards_that_torch_has_saved_on_other_ranks_are_joined(tmp_path: Path) -> None:
    expected = on_ranks(save_shards_with_torch, 2, tmp_path)[0]
    assert_same(merged(on_ranks(resume_deep, 3, tmp_path)), expected)


def resume_deep(folder: Path) -> dict[str, Any]:
    return deep_resume(folder, None, "ddp")


def errors_of_ranks(folder: Path, exported: Path) -> list[str]:
    pipe, (muon, adam) = pipeline("gpipe", ["layers.1"])
    rank = pipe.position.world.rank
    sgd = torch.optim.SGD(pipe.parameters())
    calls = [
        lambda: checkpoint.export(pipe, folder / "x", format="npz"),
        lambda: checkpoint.export(pipe, folder / "x", adam),
        lambda: checkpoint.export(pipe, folder / "x", [muon, adam][: 2 - rank], format="dcp"),
        lambda: checkpoint.export(pipe, folder / "file", [muon, adam], format="dcp"),
        lambda: checkpoint.export(pipe, folder / "x", [adam, torch.optim.AdamW(pipe.parameters())], format="dcp"),
        lambda: checkpoint.import_weights(pipe, exported, sgd if rank == 0 else adam),
        lambda: checkpoint.import_weights(pipe, exported, [muon, adam][: 2 - rank]),
        lambda: checkpoint.import_weights(pipe, folder / "numbers", adam),
        lambda: checkpoint.import_weights(pipe, folder / "weights", adam),
        lambda: checkpoint.import_weights(pipe, folder / "safetensors", adam),
        lambda: checkpoint.import_weights(pipe, folder / "twice"),
    ]
    return [error_text(call, ps.PenstockError) for call in calls]


def test_what_cannot_be_exported_or_imported_is_one_sentence_on_every_rank(exported: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import save

    (tmp_path / "file").touch()
    save_with_torch(tmp_path / "numbers", "numbers")
    weights = {name: value.detach() for name, value in Net().state_dict().items()}
    save({"model": weights}, checkpoint_id=tmp_path / "weights")
    save({"student": weights, "teacher": weights}, checkpoint_id=tmp_path / "twice")
    checkpoint.export(pipeline("1f1b", None)[0], tmp_path / "safetensors")
    everyone = on_ranks(errors_of_ranks, 2, tmp_path, exported)
    assert everyone[0] == everyone[1]
    expected = [
        "format='npz' is no format: use 'safetensors' or 'dcp'",
        "files of safetensors hold no optimizer: give format='dcp', or save a checkpoint",
        "the ranks do not export alike: rank 0 gives 2 optimizers, rank 1 gives 1",
        "is a file, and torch.distributed.checkpoint has folders",
        "two optimizers have the same parameter, and ",
        "has other options for ",
        "the ranks do not import alike: rank 0 gives 2 optimizers, rank 1 gives 1",
        "has an optimizer whose parameters are numbers: save what torch.distributed.checkpoint.state_dict.get_state_dict",
        "holds no optimizer state of this model's parameters: leave out optimizer=",
        "has no optimizer: give a folder of torch.distributed.checkpoint, or resume from a checkpoint of Penstock",
        "has the weights 2 times, under 'student.' and 'teacher.': give a folder that has them once",
    ]
    for text, error in zip(expected, everyone[0], strict=True):
        assert text in error, (text, error)
    assert not (tmp_path / "x").exists()


def test_the_optimizer_of_another_class_is_refused(tmp_path: Path) -> None:
    pipe = ps.Pipeline(Deep(), nn.functional.mse_loss, microbatches=1)
    checkpoint.export(pipe, tmp_path, torch.optim.AdamW(pipe.parameters()), format="dcp")
    with pytest.raises(
        ps.MismatchError, match=r"has the options of another optimizer than SGD: amsgrad, betas, .*, and not dampening"
    ):
        checkpoint.import_weights(pipe, tmp_path, torch.optim.SGD(pipe.parameters()))


def test_every_dtype_and_layout_is_written_as_torch_reads_it_and_read_as_torch_writes_it(tmp_path: Path) -> None:
    values = torch.arange(24).reshape(4, 6)
    tensors = {str(dtype): values.to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "transposed": values.t(),
        "part": values.float()[1:3, ::2],
    }
    entries = dcp_files.write_rank_file(tmp_path / "ours", 0, tensors, {"a value": (1, 2.5, None)})
    dcp_files.write_metadata(tmp_path / "ours", [entries], {"further": "scalar"})
    loaded = {name: torch.zeros_like(value) for name, value in tensors.items()} | {
        "further": torch.tensor(0.0),
        "a value": None,
    }
    torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path / "ours")
    assert loaded.pop("a value") == (1, 2.5, None)
    assert_same(loaded, tensors | {"further": tensors["scalar"]})

    torch.distributed.checkpoint.save(dict(tensors), checkpoint_id=tmp_path / "torch")
    files = dcp_files.DcpFiles(tmp_path / "torch")
    assert_same({name: files.tensor(name) for name in files.tensors}, tensors)
