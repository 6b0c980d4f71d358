"""A pipeline that is rebuilt goes on with the bits of one that was so from the start; what it left behind is refused."""

import io
import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from error_text import NO_ERROR, outcome
from models import CASES, OPTIMIZERS, Oddities, toy
from prompt import torchrun
from reference import assert_same, data, make, merged
from runners import cases_on_ranks, on_ranks
from safetensors.torch import load_file
from slow_cases import slow_except
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

import penstock as ps
from penstock import checkpoint

pytestmark = pytest.mark.ranks

M = 4


class Setting(NamedTuple):
    """What a pipeline is built with, or rebuilt, and how many steps it does then."""

    schedule: str
    steps: int = 2
    options: tuple[tuple[str, Any], ...] = ()  # by name

    def named(self) -> dict[str, Any]:
        return {"schedule": self.schedule, **dict(self.options)}


class RebuildResult(NamedTuple):
    """What a training came to on one rank."""

    told: list[Tensor]  # losses and norms
    state: dict[str, Any]
    kept: dict[str, Any]  # of the optimizer, by parameter
    groups: list[list[str]]  # of the optimizer, by name


def result(message: list[Tensor], pipe: Any, optimizer: Any) -> RebuildResult:
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    kept = {names[id(p)]: dict(optimizer.state[p]) for p in pipe.parameters() if id(p) in names and p in optimizer.state}
    state = {name: value.clone() if isinstance(value, Tensor) else value for name, value in pipe.state_dict().items()}
    return RebuildResult(
        message, state, kept, [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    )


def assert_goes_on(ours: list[RebuildResult], straight: list[RebuildResult]) -> None:
    """On every rank to the bit; `straight`: the training that was so from the start."""
    for mine, theirs in zip(ours, straight, strict=True):
        assert [float(message) for message in mine.told] == [float(message) for message in theirs.told]
        assert_same(*({name: v for name, v in value.state.items() if isinstance(v, Tensor)} for value in (mine, theirs)))
        assert mine.kept.keys() == theirs.kept.keys()
        for name, state in mine.kept.items():
            assert_same(
                *(
                    {k: v if isinstance(v, Tensor) else torch.tensor(v or 0) for k, v in value.items()}
                    for value in (state, theirs.kept[name])
                )
            )
            assert [v.stride() for v in state.values() if isinstance(v, Tensor)] == [
                v.stride() for v in theirs.kept[name].values() if isinstance(v, Tensor)
            ]
        assert mine.groups == theirs.groups


def steps_of(settings: tuple[Setting, ...], pipe: Any, optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the pipeline, built as the first setting says, and its optimizer for each step; between settings it is rebuilt."""
    for setting in settings:
        if setting is not settings[0]:
            pipe, optimizer = pipe.rebuild(**setting.named(), optimizer=optimizer)
        for _ in range(setting.steps):
            yield pipe, optimizer


def grouped(pipe: Any) -> list[dict[str, Any]]:
    """As people group them: no decay for what is no matrix."""
    named = list(pipe.named_parameters())
    return [
        {"params": [(name, parameter) for name, parameter in named if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [(name, parameter) for name, parameter in named if parameter.dim() <= 1], "weight_decay": 0.0},
    ]


def rank_gpt(settings: tuple[Setting, ...]) -> RebuildResult:
    """A GPT with dropout, AdamW in groups by name, a learning rate that changes, clipping."""
    model, loss_fn = make("gpt", dropout=0.2, depth=7)
    pipe = ps.Pipeline(model, loss_fn, **{"microbatches": M, **settings[0].named()})
    optimizer = torch.optim.AdamW(grouped(pipe), lr=1e-2)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=40)
    results: list[Tensor] = []
    steps = steps_of(settings, pipe, optimizer)
    for pipe, optimizer in steps:
        inputs, target = data("gpt", 8, seed=pipe.step_count)
        results += [pipe.step(inputs, target=target), pipe.clip_grad_norm_(0.1)]
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    assert pipe.step_count == sum(setting.steps for setting in settings)
    return result(results, pipe, optimizer)


def chain(ranks: int) -> tuple[Setting, ...]:
    """After each family another one: half of them on two ranks, the others on four."""
    names = ps.schedule.names()[ranks == 4 :: 2]
    return tuple(Setting(name, 1) for name in [*names, names[0]])


@pytest.mark.parametrize("ranks", slow_except([2], [2, 4]))
def test_from_every_family_of_schedules_to_another_a_training_keeps_its_bits(ranks):
    ours, last = chain(ranks), chain(ranks)[-1]
    runs = cases_on_ranks(rank_gpt, ranks, (((ours),), ((last._replace(steps=len(ours)),),)))
    assert_goes_on(*runs.values())


# ---- every kind of model


def cuts(case: str, stages: int) -> tuple[str, ...]:
    """Where that model is cut into so many stages, one unit as long as another."""
    order = ps.partition.CuttableModel(CASES[case].model(), []).unit_order
    return tuple(order[len(order) * stage // stages] for stage in range(1, stages))


def rank_case(case: str, settings: tuple[Setting, ...], by: str, meta: bool = False) -> RebuildResult:
    """One of `models.py`, cut by names or on an example, from the meta device too; SGD with momentum, and evaluation."""
    kind = CASES[case]
    with torch.device("meta" if meta else "cpu"):
        model = kind.model()
    batch = kind.batch(2, 0)
    example = {"example_args": batch.args, "example_kwargs": batch.kwargs} if by == "example" else {}
    pipe = ps.Pipeline(model, kind.loss_fn, microbatches=M, **example, **settings[0].named())
    if meta:
        pipe.load_state_dict(kind.model().state_dict())
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
    results: list[Tensor] = []
    steps = steps_of(settings, pipe, optimizer)
    for pipe, optimizer in steps:
        batch = kind.batch(8, pipe.step_count)
        results.append(pipe.step(*batch.args, target=batch.target, **batch.kwargs))
        optimizer.step()
        optimizer.zero_grad()
    batch = kind.batch(8, 99)
    results.append(pipe.eval(*batch.args, target=batch.target, **batch.kwargs)[1])
    return result(results, pipe, optimizer)


def by_names(case: str, *schedules: str) -> tuple[Setting, ...]:
    """Two steps of each, cut into as many stages as it has on two ranks."""
    return tuple(Setting(schedule, 2, (("cuts", cuts(case, 4 if schedule in TWO_EACH else 2)),)) for schedule in schedules)


TWO_EACH = ("interleaved-1f1b", "zb-v")  # stages on a rank


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_any_model_cut_by_names_is_cut_anew_with_its_skips_ties_buffers_and_frozen_parts(case):
    settings = {case: by_names(case, "1f1b", "zb-v", "gpipe") for case in CASES}
    straight = {case: (settings[case][-1]._replace(steps=6),) for case in CASES}
    runs = cases_on_ranks(rank_case, 2, tuple((case, how[case], "names") for case in CASES for how in (settings, straight)))
    assert_goes_on(*(runs[case, how[case], "names"] for how in (settings, straight)))


@pytest.mark.slow
def test_a_cut_inside_a_layer_has_the_random_numbers_of_one_that_was_so_from_the_start():
    inside = (("cuts", ("layers.0", "layers.1.linear1", "layers.3")),)
    settings = (
        Setting("1f1b", 0, (("cuts", ("layers.2",)),)),
        Setting("zb-v", 3, inside),
        Setting("interleaved-1f1b", 1, inside),
    )
    straight = (Setting("interleaved-1f1b", 4, inside),)
    case = "transformer with dropout"
    assert_goes_on(*cases_on_ranks(rank_case, 2, ((case, settings, "names"), (case, straight, "names"))).values())


def rank_measured() -> tuple[int, RebuildResult]:
    """How often layers were measured here."""
    from penstock.partition import cutting

    measure, calls = cutting.measure_unit_seconds, []
    cutting.measure_unit_seconds = lambda *args: calls.append(args) or measure(*args)
    try:
        ran = rank_case("wide", (Setting("1f1b"), Setting("zb-v"), Setting("gpipe")), "example")
    finally:
        cutting.measure_unit_seconds = measure
    return len(calls), ran


@pytest.mark.slow
def test_a_model_cut_on_an_example_is_measured_once():
    (calls, ours), (none, others) = on_ranks(rank_measured, 2)
    assert (calls, none) == (1, 0)
    straight = on_ranks(rank_case, 2, "wide", (Setting("gpipe", 6),), "example")
    assert_same(merged([ours.state, others.state]), merged([loss.state for loss in straight]))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["names", "example"])
def test_a_model_from_the_meta_device_is_rebuilt_with_its_weights(by):
    case = "tied" if by == "names" else "wide"
    settings = by_names(case, "1f1b", "zb-v")
    if by == "example":
        settings = tuple(setting._replace(options=()) for setting in settings)
    straight = (settings[-1]._replace(steps=4),)
    ours, theirs = cases_on_ranks(rank_case, 2, ((case, settings, by, True), (case, straight, by, True))).values()
    if by == "names":
        assert_goes_on(ours, theirs)
    assert_same(merged([value.state for value in ours]), merged([value.state for value in theirs]))


def rank_memory() -> Any:
    """Parameters that have memory, before and after; tensors that this rank sent, by where they went."""
    from penstock.comms.control_group import ControlGroup

    with torch.device("meta"):
        model, loss_fn = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)]), nn.functional.mse_loss
    pipe = ps.Pipeline(model, loss_fn, microbatches=M)
    optimizer = torch.optim.Adam(pipe.parameters())
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4)), optimizer.step(), optimizer.zero_grad()
    had = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    sent, send = [], ControlGroup.send
    ControlGroup.send = lambda control, tensor, peer, what: sent.append(peer) or send(control, tensor, peer, what)
    try:
        pipe, optimizer = pipe.rebuild("zb-v", optimizer=optimizer)
    finally:
        ControlGroup.send = send
    has = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert has == set(pipe.state_dict())
    assert {id(value) for value in optimizer.state} == {id(parameter) for parameter in pipe.parameters()}
    return had, has, sent


def test_each_tensor_goes_once_from_its_rank_to_the_next_and_leaves_no_memory_behind():
    (had, has, sent), (others, other, back) = on_ranks(rank_memory, 2)
    assert had == {f"{layer}.{name}" for layer in range(4) for name in ("weight", "bias")}
    assert has == {f"{layer}.{name}" for layer in (0, 1, 6, 7) for name in ("weight", "bias")}
    assert had | others == has | other
    assert sent == [1] * len(had - has) * 4  # weight or bias, two moments and a count
    assert back == [0] * len(others - other) * 4


# ---- every optimizer


def rank_optimizers(settings: tuple[Setting, ...]) -> dict[str, RebuildResult]:
    """Oddities in two groups by name, with a gradient that is not yet stepped with when the pipeline is rebuilt."""
    results = {}
    for name, make_optimizer in OPTIMIZERS.items():
        torch.manual_seed(3)
        model = nn.Sequential(Oddities(), Oddities(), Oddities(), nn.Flatten(), nn.Linear(64, 2))
        pipe = ps.Pipeline(model, nn.functional.mse_loss, microbatches=M, **settings[0].named())
        optimizer = make_optimizer(grouped(pipe))
        generator, expected_message = torch.Generator().manual_seed(5), []
        steps = steps_of(settings, pipe, optimizer)
        for pipe, optimizer in steps:
            inputs, target = torch.randn(8, 4, 4, 4, generator=generator), torch.randn(8, 2, generator=generator)
            expected_message.append(pipe.step(inputs, target=target, scale=0.5))
            if pipe.step_count % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        results[name] = result(expected_message, pipe, optimizer)
    return results


@pytest.mark.slow
def test_any_optimizer_goes_on_and_so_do_gradients_that_were_not_stepped_with_and_states_of_modules():
    settings = Setting("1f1b", 3), Setting("zb-v", 2), Setting("gpipe", 1)
    ours, straight = (on_ranks(rank_optimizers, 2, value) for value in (settings, (Setting("gpipe", 6),)))
    for name in OPTIMIZERS:
        assert_goes_on([value[name] for value in ours], [loss[name] for loss in straight])
    extra = {key: value["calls"] for item in ours for key, value in item["Adam"].state.items() if "extra" in key}
    assert extra == dict.fromkeys(["0._extra_state", "1._extra_state", "2._extra_state"], 6 * M)


def rank_several(settings: tuple[Setting, ...]) -> Any:
    """Muon for matrices of layers and Adam for the rest, a scaler, and a rate for each, as one list."""
    model, loss_fn = make("mlp", depth=6)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    pipe = ps.Pipeline(model, loss_fn, microbatches=M, scaler=scaler, **settings[0].named())
    matrices = [
        parameter for parameter in pipe.parameters() if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]
    ]
    rest = [parameter for parameter in pipe.parameters() if parameter.dim() == 1 or parameter.shape[0] != parameter.shape[1]]
    optimizers = [torch.optim.Muon(matrices, lr=0.1), torch.optim.Adam([{"params": rest}], lr=0.1)]
    rates = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    results = []
    steps = steps_of(settings, pipe, optimizers)
    for pipe, again in steps:
        assert [id(value) for value in again] == [id(optimizer) for optimizer in optimizers]
        inputs, target = data("mlp", 8, seed=pipe.step_count)
        results.append(pipe.step(inputs, target=target))
        for optimizer, rate in zip(optimizers, rates, strict=True):
            scaler.step(optimizer)
            optimizer.zero_grad()
            rate.step()
        scaler.update()
    assert pipe.scaler is scaler
    return [result([*results, torch.tensor(scaler.get_scale())], pipe, optimizer) for optimizer in optimizers]


def test_muon_beside_adam_with_a_scaler_and_learning_rates_go_on():
    settings = Setting("1f1b"), Setting("zb-v")
    ours, straight = (on_ranks(rank_several, 2, value) for value in (settings, (Setting("zb-v", 4),)))
    for number in range(2):
        assert_goes_on([value[number] for value in ours], [loss[number] for loss in straight])


# ---- what else is taken over, and what may change


def rank_options() -> list[Any]:
    """Modes, frozen parts, attributes, an option of the family, recomputation, another loss, a plan, a table."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(8)]
    pipe = ps.Pipeline(
        nn.Sequential(*layers), nn.functional.mse_loss, "interleaved-1f1b", M, seed=5, stages_per_rank=2, on_nonfinite="skip"
    )
    for stage in pipe.stages.values():
        stage[0][1].eval()  # of layers 0, 2, 4 and 6
        for layer in stage:
            layer[2].p, layer[2].history = 0.25, [layers.index(layer)]
    for name, parameter in pipe.named_parameters():
        parameter.requires_grad_("1.bias" not in name)
    inputs = torch.randn(16, 4)
    pipe.step(inputs, target=inputs)
    results: list[Any] = []

    def note() -> None:
        modes = {layer: layers[layer][1].training for stage in pipe.stages.values() for layer in map(layers.index, stage)}
        frozen = sorted(name for name, parameter in pipe.named_parameters() if not parameter.requires_grad)
        attributes = {layer: (layers[layer][2].p, layers[layer][2].history) for layer in modes}
        schedule = pipe.schedule
        results.append((schedule.name, schedule.stages, schedule.microbatches, pipe.seed, modes, len(frozen), attributes))
        pipe.step(inputs, target=inputs)

    own_loss = toy(lambda self, output, target: nn.functional.mse_loss(output, target), "OwnLoss")
    for change in (
        {"stages_per_rank": 4, "slices": None},
        {"schedule": "1f1b", "microbatches": 2},
        {"schedule": ps.schedule.build("gpipe", ranks=2, microbatches=8)},
        {
            "schedule": "zb-v",
            "recompute": "block",
            "loss_fn": own_loss,
        },
    ):
        pipe = pipe.rebuild(**change)
        note()
    results.append(type(pipe.loss_fn).__name__)
    return results


def test_modes_frozen_parts_attributes_and_options_go_along_and_any_of_them_may_change():
    first, second = on_ranks(rank_options, 2)
    assert [value[:4] for value in first[:-1]] == [
        ("interleaved-1f1b", 8, M, 5),
        ("1f1b", 2, 2, 5),
        ("gpipe", 2, 8, 5),
        ("zb-v", 4, 8, 5),
    ]
    for one, other in zip(first[:-1], second[:-1], strict=True):
        assert one[4] | other[4] == {layer: layer % 2 == 1 for layer in range(8)}
        assert one[5] == other[5] == 4
        assert one[6] | other[6] == {layer: (0.25, [layer]) for layer in range(8)}
    assert first[-1] == second[-1] == "OwnLoss"


def stages_of(ranks: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(2 * ranks)]


def rank_listed(settings: tuple[Setting, ...]) -> RebuildResult:
    """A list with one module for each stage, which may go to other ranks but stay the stages that they are."""
    results = list[Tensor]()
    pipe = ps.Pipeline(stages_of(2), nn.functional.mse_loss, microbatches=M, **settings[0].named())
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
    steps = steps_of(settings, pipe, optimizer)
    for step, (pipe, optimizer) in enumerate(steps):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        results.append(pipe.step(inputs, target=inputs))
        optimizer.step(), optimizer.zero_grad()
    return result(results, pipe, optimizer)


def test_stages_of_a_list_go_to_the_ranks_where_the_next_schedule_has_them():
    settings = Setting("interleaved-1f1b"), Setting("zb-v")
    straight = (Setting("zb-v"), Setting("zb-v"))
    assert_goes_on(*cases_on_ranks(rank_listed, 2, ((settings,), (straight,))).values())


def rank_saved(folder: Any) -> dict[str, Tensor]:
    """A checkpoint of a pipeline that was rebuilt while one before was being written."""
    model, loss_fn = make("gpt", dropout=0.2, depth=7)
    pipe = ps.Pipeline(model, loss_fn, "1f1b", M)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    for schedule in ("zb-v", "gpipe"):
        inputs, target = data("gpt", 8, seed=pipe.step_count)
        pipe.step(inputs, target=target), optimizer.step(), optimizer.zero_grad()
        checkpoint.save(folder, pipe, optimizer, wait=False)
        pipe, optimizer = pipe.rebuild(schedule, optimizer=optimizer)
    checkpoint.save(folder, pipe, optimizer)
    again = ps.Pipeline(make("gpt", dropout=0.2, depth=7)[0], loss_fn, "1f1b", M)
    checkpoint.resume(folder, again, other := torch.optim.Adam(again.parameters(), lr=1e-2))
    for value, using in ((pipe, optimizer), (again, other)):
        inputs, target = data("gpt", 8, seed=2)
        value.step(inputs, target=target), using.step()
    checkpoint.export(pipe, folder / "rebuilt.safetensors"), checkpoint.export(again, folder / "resumed.safetensors")
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step"))


def test_checkpoints_of_a_rebuilt_pipeline_are_those_of_any(tmp_path):
    assert on_ranks(rank_saved, 2, tmp_path)[0] == ["step-00000001", "step-00000002"]
    assert_same(load_file(tmp_path / "rebuilt.safetensors"), load_file(tmp_path / "resumed.safetensors"))


# ---- where else a pipeline may be


def rank_replicas(settings: tuple[Setting, ...]) -> RebuildResult:
    """Two replicas, held equal by DistributedDataParallel, with rows of their own and a gradient not yet stepped with."""
    model, loss_fn = make("mlp", depth=6)
    pipe = ps.Pipeline(model, loss_fn, microbatches=M, mesh=ps.comms.init_mesh(pp=2, dp=2), **settings[0].named())
    optimizer, results = torch.optim.Adam(pipe.parameters(), lr=0.1), list[Tensor]()
    steps = steps_of(settings, pipe, optimizer)
    for pipe, optimizer in steps:
        inputs, target = data("mlp", 8, seed=2 * pipe.step_count + pipe.position.replica)
        results += [pipe.step(inputs, target=target, scale=0.5), pipe.clip_grad_norm_(0.1)]
        if pipe.step_count % 2 == 0:
            optimizer.step(), optimizer.zero_grad()
    return result(results, pipe, optimizer)


def test_replicas_go_on_too():
    settings = Setting("1f1b", 3), Setting("zb-v", 3)
    assert_goes_on(*cases_on_ranks(rank_replicas, 4, ((settings,), ((Setting("zb-v", 6),),))).values())


def rank_sharded() -> list[str]:
    """What is said of parameters that several ranks have pieces of."""
    said = []
    for mesh, options in (
        ({"pp": 2, "dp": 2}, {"data_parallel": "fsdp"}),
        ({"pp": 2, "tp": 2}, {"tensor_parallel": {"*": ColwiseParallel(output_layouts=Replicate())}}),
    ):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        pipe = ps.Pipeline(model, nn.functional.mse_loss, "1f1b", M, mesh=ps.comms.init_mesh(**mesh), **options)
        pipe.step(torch.ones(8, 4), target=torch.ones(8, 4))
        said.append(outcome(partial(pipe.rebuild, "zb-v")))
    return said


def test_what_is_in_shards_is_refused_in_a_sentence():
    for said in zip(*on_ranks(rank_sharded, 4), strict=True):
        assert len(set(said)) == 1
        assert "parameters are in shards on several ranks (fsdp, tp): save a checkpoint, build the other" in said[0]


def rank_own(schedule: str) -> list[float]:
    """This rank's own stages, which stay where they are."""
    rank, losses = ps.comms.init_distributed().rank, []
    torch.manual_seed(rank)
    pipe = ps.Pipeline({rank: nn.Sequential(nn.Linear(4, 4), nn.Dropout())}, nn.functional.mse_loss, schedule, M)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
    for step in range(4):
        if step == 2 and schedule != "gpipe":
            said = [outcome(partial(pipe.rebuild, **change)) for change in ({"schedule": "zb-v"}, {"cuts": ["0"]})]
            assert "zb-v places stages 0 and 3 of 4 on rank 0, which gives stage 0" in said[0]
            assert "cuts= are for a model that was cut" in said[1]
            pipe, optimizer = pipe.rebuild("gpipe", optimizer=optimizer)
        losses.append(float(pipe.step(torch.ones(8, 4), target=torch.zeros(8, 4))))
        optimizer.step(), optimizer.zero_grad()
    return losses


def test_stages_that_a_rank_was_given_alone_go_on_where_they_are_and_are_refused_elsewhere():
    ours, straight = cases_on_ranks(rank_own, 2, (("1f1b",), ("gpipe",))).values()
    assert ours == straight


def rank_planned(by_plan: bool) -> RebuildResult:
    """A plan in the place of schedule, cuts and recomputation; it, and what is said beside it, may be left again."""
    model, loss_fn = make("mlp", depth=6)
    table, order = ps.schedule.build("zb-v", ranks=2, microbatches=M), ps.partition.CuttableModel(model).unit_order
    chosen: Any = {"cuts": order[1:4], "recompute": [None, "stage", None, "block"]}
    if by_plan:
        chosen = {"plan": SimpleNamespace(schedule=table, microbatches=M, layers=order, **chosen)}
    else:
        chosen["schedule"] = table
    pipe = ps.Pipeline(model, loss_fn, "1f1b", M)
    optimizer, results = torch.optim.Adam(pipe.parameters(), lr=0.1), list[Tensor]()
    for change in ({}, chosen, {"schedule": "gpipe", "cuts": order[5:6], "recompute": None}):
        pipe, optimizer = pipe.rebuild(**change, optimizer=optimizer)
        inputs, target = data("mlp", 8)
        results.append(pipe.step(inputs, target=target))
        optimizer.step(), optimizer.zero_grad()
    return result(results, pipe, optimizer)


def test_a_plan_is_as_what_it_says():
    assert_goes_on(*cases_on_ranks(rank_planned, 2, ((True,), (False,))).values())


def rank_often() -> list[tuple[int, int]]:
    """Open files and threads after rebuilding twice, and after twenty times more."""
    model, loss_fn = make("mlp", depth=6)
    pipe, counts, pipes = ps.Pipeline(model, loss_fn, "1f1b", M), [], []
    inputs, target = data("mlp", 8)
    for number in range(1, 23):
        pipes.append(pipe)  # which keeps nothing open
        pipe = pipe.rebuild(("1f1b", "zb-v")[number % 2])
        pipe.step(inputs, target=target)
        if number in (2, 22):
            pipe.gather(lambda: None)
            counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


@pytest.mark.slow
def test_a_pipeline_that_was_rebuilt_leaves_no_file_and_no_thread_open():
    for first, last in on_ranks(rank_often, 2):
        assert first == last


SCRIPT = """
import sys
import torch
from torch import nn
import penstock as ps
from penstock import checkpoint

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(5)]
model = nn.Sequential(nn.Embedding(11, 8), *layers, nn.Linear(8, 11))
model[-1].weight = model[0].weight
rebuilds = sys.argv[1] == "rebuilt"
pipe = ps.Pipeline(model, nn.functional.cross_entropy, "1f1b" if rebuilds else "zb-v", microbatches=4)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
for step in range(6):
    if step == 3 and rebuilds:
        pipe, optimizer = pipe.rebuild("zb-v", optimizer=optimizer)
    tokens = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step))
    loss = pipe.step(tokens, target=tokens)
    optimizer.step(), optimizer.zero_grad(), rate.step()
checkpoint.export(pipe, sys.argv[2])
if pipe.topology.rank == 0:
    print(loss.item())
"""


@pytest.mark.slow
def test_under_torchrun_too_with_tied_weights_and_nothing_is_said(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    files = [tmp_path / f"{name}.safetensors" for name in ("rebuilt", "straight")]
    ours, straight = (torchrun(2, tmp_path / "script.py", file.stem, file) for file in files)
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, straight.stdout, straight.stderr)
    assert_same(*map(load_file, files))


# ---- what is refused


def rank_refused() -> Any:
    """What is said of calls that cannot be, after which the pipeline goes on; then of what a rebuilt one left behind."""
    model, loss_fn = make("mlp", depth=6)
    pipe = ps.Pipeline(model, loss_fn, "1f1b", M)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
    other = torch.optim.Adam(nn.Linear(2, 2).parameters())
    inputs, target = data("mlp", 8)

    def train(pipe: Any) -> Tensor:
        loss = pipe.step(inputs, target=target)
        optimizer.step(), optimizer.zero_grad()
        return loss

    train(pipe)
    hook = next(pipe.parameters()).register_hook(lambda gradient: gradient) if pipe.topology.rank == 0 else None
    hooked = outcome(lambda: pipe.rebuild("dualpipe-v" if hook is None else "zb-v"))
    if hook is not None:
        hook.remove()
    said = [
        outcome(lambda: pipe.rebuild("zbv")),
        outcome(lambda: pipe.rebuild(recompute="all")),
        outcome(lambda: pipe.rebuild(mesh=None)),
        outcome(lambda: pipe.rebuild("zb-v", optimizer=other)),
        outcome(lambda: pipe.rebuild("zb-v", optimizer="adam")),
        outcome(lambda: pipe.rebuild("zb-v", optimizer=torch.optim.LBFGS(list(pipe.parameters())))),
        hooked,
    ]
    losses = [train(pipe)]
    stale = [outcome(lambda: ps.Pipeline(model, loss_fn, "zb-v", M)), outcome(lambda: model(inputs)), outcome(model.state_dict)]
    stale += [outcome(lambda: deepcopy(model)), outcome(lambda: torch.save(model, io.BytesIO()))]
    stale += [outcome(read) for read in reads_of_all_parameters(model, inputs)]
    model.train().zero_grad()
    model.requires_grad_(requires_grad=True)
    assert all(parameter.numel() and parameter.grad is None for parameter in model.parameters())
    same_cut = outcome(lambda: ps.Pipeline(model, loss_fn, "gpipe", M))
    rebuilt, again = pipe.rebuild("zb-v", optimizer=optimizer)
    losses.append(train(rebuilt))
    ended = [outcome(lambda: pipe.step(inputs, target=target)), outcome(lambda: list(pipe.parameters()))]
    return said, stale, same_cut, ended, losses, again is optimizer


def reads_of_all_parameters(model: nn.Module, inputs: Tensor) -> list[Callable[[], Any]]:
    """What scripts do with a model's parameters, which has wrong numbers if some are stale."""
    parameters, averaged = model.parameters, list(make("mlp", depth=6)[0].parameters())

    def average(values: Callable[[Tensor], Tensor]) -> None:
        with torch.no_grad():
            for mean, parameter in zip(averaged, parameters(), strict=True):
                mean.lerp_(values(parameter), 0.1)

    return [
        lambda: average(lambda parameter: parameter),
        lambda: average(lambda parameter: parameter.data),
        lambda: torch.optim.swa_utils.AveragedModel(make("mlp", depth=6)[0]).update_parameters(model),
        lambda: model.forward(inputs),
        lambda: torch.func.functional_call(model, {}, (inputs,)),
        lambda: nn.utils.parameters_to_vector(parameters()),
        lambda: [deepcopy(layer) for layer in model.children()],
        lambda: torch.save(list(parameters()), io.BytesIO()),
    ]


def rank_straight() -> list[Tensor]:
    model, loss_fn = make("mlp", depth=6)
    pipe = ps.Pipeline(model, loss_fn, "zb-v", M)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
    inputs, target = data("mlp", 8)
    losses = []
    for _ in range(3):
        losses.append(pipe.step(inputs, target=target))
        optimizer.step(), optimizer.zero_grad()
    return losses[1:]


def test_a_refused_rebuild_leaves_the_pipeline_as_it_was_and_a_model_that_is_behind_is_refused():
    (said, stale, same_cut, ended, losses, is_same), other = on_ranks(rank_refused, 2)
    assert [text.partition(": ")[2] for text in said] == [text.partition(": ")[2] for text in other[0]]
    for text, part in zip(
        said,
        (
            "did you mean zb-v",
            "recompute='all'",
            "rebuild() takes no mesh=",
            "is not one of the pipeline's",
            "takes an optimizer of pipe.parameters(), or a list of several, not a str",
            "LBFGS decides by all parameters at once",
            "do not build the same pipeline",
        ),
        strict=True,
    ):
        assert part in text
    for text in stale:
        assert "pipe.rebuild(schedule=..) goes on with the trained ones" in text
    assert same_cut == NO_ERROR
    assert ended == ["this pipeline was rebuilt: use the one that rebuild() returned"] * 2
    assert is_same
    straight = on_ranks(rank_straight, 2)[0]
    assert all(torch.equal(one, two) for one, two in zip(losses, straight, strict=True))


def rank_repr(folder):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    pipe = ps.Pipeline(model, nn.functional.mse_loss, "1f1b", M, cuts=["1"])
    pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    rebuilt = pipe.rebuild("gpipe")
    saving = checkpoint.save(folder, rebuilt, wait=False)
    assert repr(saving).startswith(f"SaveHandle({str(saving.path)!r}, ")
    saving.wait()
    chosen = ps.Pipeline(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), None, "1f1b", M)
    return [repr(value) for value in (rebuilt, pipe, chosen, saving)]


def test_a_pipeline_and_a_save_are_printed_in_a_line_that_says_where_the_cuts_are_from(tmp_path):
    for rank, texts in enumerate(on_ranks(rank_repr, 2, tmp_path)):
        assert texts == [
            f"Pipeline(gpipe, 2 ranks, 2 stages that begin at 1 (given), 4 microbatches, step 1; rank {rank} has stage {rank})",
            "Pipeline(this pipeline was rebuilt: use the one that rebuild() returned)",
            f"Pipeline(1f1b, 2 ranks, 2 stages that begin at 2 (chosen), 4 microbatches, step 0; rank {rank} has stage {rank})",
            f"SaveHandle('{tmp_path}/step-00000001', complete)",
        ]
