"""What a microbatch keeps alive on a stage, in bytes: counted by hand here, weighed by the engine."""

import subprocess
import sys

import pytest
import torch
from models import toy
from reference import assert_same, data, gradients, make
from runners import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.engine.activation_memory import StorageSet
from penstock.schedule import ActivationSize, Costs, Measurement, build, simulate

pytestmark = pytest.mark.ranks

ROWS, WIDTH, LAYERS, RANKS, MICROBATCHES = 6, 32, 16, 4, 8
BLOCK = ROWS * WIDTH * 4  # bytes of what one layer gives for a microbatch
EACH = LAYERS // RANKS  # layers of a rank


def timeline_of(layers, schedule, microbatches=MICROBATCHES, rows=ROWS, steps=2, **settings):
    pipe = ps.Pipeline(nn.Sequential(*layers), nn.functional.mse_loss, schedule, microbatches, **settings)
    batch = torch.ones(rows * microbatches, WIDTH)
    for _ in range(steps):
        pipe.step(batch, target=torch.zeros_like(batch))
    return pipe.timeline()


def mlp():
    return [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]


def rank_mlp(schedule, recompute=None):
    return timeline_of(mlp(), schedule, recompute=recompute)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_16_layer_mlp_keeps_what_a_hand_counts(schedule):
    timeline = on_ranks(rank_mlp, RANKS, schedule)[0]
    # of every layer what the ReLU gave, and on all ranks but the first, whose input is the caller's batch, what was received
    kept = [EACH * BLOCK + BLOCK * (rank > 0) for rank in range(RANKS)]
    assert timeline.memory_unit == "bytes"
    assert timeline.activation_sizes == tuple(ActivationSize(tensor, tensor) for tensor in kept)
    assert sum(size.act for size in timeline.activation_sizes) == (LAYERS + RANKS - 1) * BLOCK
    in_flight = [MICROBATCHES] * RANKS if schedule == "gpipe" else [4, 3, 2, 1]
    assert timeline.peak_memory == tuple(tensor * count for tensor, count in zip(kept, in_flight, strict=True))
    assert timeline.memory(0)[0][1] == kept[0]
    assert timeline.memory(0)[-1][1] == 0


def test_planned_from_what_was_measured_the_same_table_holds_the_same_bytes_and_another_its_own():
    timeline = on_ranks(rank_mlp, RANKS, "1f1b")[0]
    measured = Measurement.from_timelines(timeline)
    planned = measured.predict(measured.schedule)
    assert (planned.peak_memory, planned.memory_unit) == (timeline.peak_memory, "bytes")
    gpipe = measured.predict(build("gpipe", RANKS, MICROBATCHES))
    assert gpipe.peak_memory == tuple(MICROBATCHES * size.act for size in timeline.activation_sizes)
    acts = [size.act for size in timeline.activation_sizes]
    assert gpipe.peak_memory == simulate(build("gpipe", RANKS, MICROBATCHES), Costs(act=acts)).peak_memory
    halves = measured.recut(2 * RANKS)  # what layers keep goes where they go
    assert sum(size.act for size in halves.activation_sizes) == pytest.approx(sum(acts))
    message = str(timeline.explain(measured)).splitlines()
    most, least = max(timeline.peak_memory), min(timeline.peak_memory)
    assert f"memory of activations: up to {most / 1e3:.4g} kB on rank 0, the least {least / 1e3:.4g} kB" in message


def test_after_i_the_weights_still_need_their_inputs_and_the_gradients_of_their_outputs():
    timeline = on_ranks(rank_mlp, RANKS, "zb-h1")[0]
    for rank, (act, keep) in enumerate(timeline.activation_sizes):
        assert act == EACH * BLOCK + BLOCK * (rank > 0)
        # for every layer the input, the output's gradient and, computed, the bias's; the last ReLU's output went with I.
        # Rank 0 runs B: nothing needs its I
        assert keep == (EACH * (2 * BLOCK + 4 * WIDTH) if rank else act)


@pytest.mark.parametrize(("recompute", "blocks"), [("stage", (0, 1, 1, 2)), ("block", (7, 8, 8, 9))])
def test_recomputed_a_stage_or_a_layer_keeps_its_input(recompute, blocks):
    timeline = on_ranks(rank_mlp, RANKS, "1f1b", recompute)[0]
    assert [size.act / BLOCK for size in timeline.activation_sizes] == list(
        blocks
    )  # the last one's loss keeps the output besides


def rank_saved(kind):
    """What the engine weighed of a whole model, and what autograd says it saved."""
    model, loss_fn = make(kind, dropout=0.1, depth=4)
    pipe = ps.Pipeline(model, loss_fn, "1f1b", 3)
    inputs, target = data(kind, 6)
    pipe.step(inputs, target=target)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.setdefault(id(tensor), tensor), lambda tensor: tensor):
        loss = loss_fn(model(inputs[:2]), target[:2])
    known = {parameter.untyped_storage().data_ptr() for parameter in (*model.parameters(), *model.buffers(), inputs, target)}
    blocks = {block.data_ptr(): block.nbytes() for block in (tensor.untyped_storage() for tensor in saved.values())}
    assert loss.requires_grad
    return pipe.timeline().activation_sizes, sum(size for at, size in blocks.items() if at not in known)


@pytest.mark.parametrize("kind", ["gpt", "mlp", "mixed"])
def test_of_a_whole_model_it_is_what_autograd_saves(kind):
    ((size,), saved) = on_ranks(rank_saved, 1, kind)[0]
    assert size == ActivationSize(saved, saved)


def rank_others():
    def leave_some(self, hidden):
        """Saves one block of memory four times, and leaves some for good."""
        self.left = hidden.detach() + 1  # no backward lets go of it
        return (hidden * hidden.view(-1, WIDTH)) * hidden

    keeps_its_input = toy(lambda self, x: checkpoint(self.inner, x, use_reentrant=False), inner=nn.Sequential(*mlp()[:8]))
    frozen = nn.Linear(WIDTH, WIDTH)
    frozen.weight.requires_grad_(False)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), keeps_its_input, nn.Identity()]
    one = timeline_of([*layers, frozen, nn.Tanh(), toy(leave_some), nn.Flatten()], "1f1b", 3, cuts=["4"])
    return one.activation_sizes


def test_frozen_weights_checkpoints_and_shared_memory_are_counted_as_what_they_keep():
    first, second = on_ranks(rank_others, 2)[0]
    assert first.act == BLOCK  # the ReLU's output, which the checkpoint keeps too; not what that has inside
    # no input of the frozen weights; what Tanh gave (shared), the square that is multiplied again, and for the loss the last
    assert second.act == 3 * BLOCK


def rank_kinds():
    pipe = ps.Pipeline(nn.Sequential(*mlp()), nn.functional.mse_loss, "1f1b", MICROBATCHES)
    found = []
    for rows in (ROWS, 2 * ROWS, ROWS):
        batch = torch.ones(rows * MICROBATCHES, WIDTH)
        pipe.step(batch, target=batch)
        found.append(pipe.timeline().activation_sizes[1].act)
    pipe.stages[min(pipe.stages)].compile(backend="eager")
    batch = torch.ones(3 * ROWS * MICROBATCHES, WIDTH)
    pipe.step(batch, target=batch)
    compiled = pipe.timeline()
    pipe.eval(batch)
    return found, (compiled.activation_sizes, compiled.memory_unit, compiled.peak_memory), pipe.timeline().memory_unit


def test_each_kind_of_batch_is_weighed_once_and_where_a_stage_is_compiled_activations_are_counted():
    found, compiled, evaluated = on_ranks(rank_kinds, 2)[0]
    one = (LAYERS // 2 + 1) * BLOCK
    assert found == [one, 2 * one, one]
    assert compiled == ((), "", (2, 1))
    assert evaluated == ""


def rank_bits(kind, schedule, recompute):
    model, loss_fn = make(kind, dropout=0.2, depth=6)
    pipe = ps.Pipeline(model, loss_fn, schedule, 4, recompute=recompute)
    inputs, target = data(kind, 8)
    found = []
    for _ in range(2):  # weighed, and not
        pipe.step_count = 0
        loss = pipe.step(inputs, target=target)
        found.append(gradients(pipe.named_parameters()) | {"the loss": loss})
        for parameter in pipe.parameters():
            parameter.grad = None
    return found


@pytest.mark.parametrize(
    ("kind", "schedule", "recompute"), [("gpt", "zb-h1", None), ("gpt", "1f1b", "block"), ("mixed", "zb-v", None)]
)
def test_weighing_changes_no_bit(kind, schedule, recompute):
    for weighed, plain in on_ranks(rank_bits, 2, kind, schedule, recompute):
        assert_same(weighed, plain)


def rank_compiled():
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.function = torch.compile(lambda hidden: torch.tanh(hidden) * 2, backend=backend)

        def forward(self, hidden):
            inner = torch.func.vmap(torch.func.grad(lambda row: (row.sin() * row).sum()))(hidden)
            return self.function(hidden) + inner

    pipe = ps.Pipeline(nn.Sequential(nn.Linear(4, 4), Calls()), nn.functional.mse_loss, "1f1b", 2)
    for _ in range(2):  # weighed, and not
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    return len(compiled), pipe.timeline().memory_unit


def test_functions_that_are_compiled_or_differentiate_within_run_as_ever_while_weighed():
    assert on_ranks(rank_compiled, 1) == [(1, "bytes")]


def test_memory_counts_a_block_once_and_only_once_it_is_gone():
    block = torch.zeros(10)
    memory = StorageSet([block, block[:3], block.view(2, 5), "no tensor", torch.eye(2).to_sparse(), None])
    kept = memory.alive_subset()
    assert memory.freed_bytes() == 0
    del block
    assert memory.freed_bytes() == kept.freed_bytes() == 40
    assert memory.alive_subset().freed_bytes() == 0


def rank_new_to_others():
    """On three ranks, batches of another kind that the middle rank cannot tell by itself."""
    pipe = ps.Pipeline(nn.Sequential(*mlp()[:6]), nn.functional.mse_loss, "1f1b", 4)
    found = []
    for rows in (8, 12):
        batch = torch.ones(rows, WIDTH)
        pipe.step(batch, target=batch)
        found.append([size.act for size in pipe.timeline().activation_sizes])
    return found


def test_a_kind_of_batch_that_is_new_to_another_rank_only_is_measured_too():
    first, second = on_ranks(rank_new_to_others, 3)[0]
    assert len(first) == 3
    assert [2 * result for result in second] == [3 * result for result in first]


def test_a_microbatch_that_counts_nothing_is_not_the_one_that_is_measured():
    pipe = ps.Pipeline(nn.Sequential(*mlp()[:4]), nn.functional.mse_loss, "1f1b", 3, loss_weight=lambda target: target[0, 0])
    batch, sizes = torch.ones(6, WIDTH), []
    for counted in ([1, 1, 1], [0, 1, 1], [1, 1, 0]):
        target = torch.ones(6, WIDTH) * torch.tensor(counted).repeat_interleave(2)[:, None]
        pipe.step(batch, target=target)
        sizes.append(pipe.timeline().activation_sizes)
    assert sizes[0] == sizes[1] == sizes[2] != ()


FIRST_STEP = """
import gc
gc.disable()
import torch
from torch import nn
import penstock as ps
pipe = ps.Pipeline(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()), nn.functional.mse_loss, "1f1b", 3)
for _ in range(2):
    pipe.step(torch.ones(6, 32), target=torch.ones(6, 32))
    print(pipe.timeline().activation_sizes[0].act)
    pipe.step(torch.ones(9, 32), target=torch.ones(9, 32))
    print(pipe.timeline().activation_sizes[0].act)
"""


@pytest.mark.slow
@pytest.mark.fresh
def test_the_first_step_of_a_process_measures_what_later_ones_do_without_any_garbage_collection():
    done = subprocess.run([sys.executable, "-c", FIRST_STEP], capture_output=True, text=True)
    assert done.stdout.split() == [str(2 * rows * WIDTH * 4) for rows in (2, 3, 2, 3)], done.stderr


def rank_new_elsewhere(microbatches):
    pipe = ps.Pipeline(nn.Sequential(*mlp()), nn.functional.mse_loss, "1f1b", microbatches)
    batch = torch.ones(ROWS * microbatches, WIDTH)
    sizes = []
    for losses in (None, [] if pipe.topology.rank else None):  # a new kind of step on rank 1 only
        pipe.step(batch, target=batch, losses=losses)
        sizes.append(pipe.timeline().activation_sizes)
    return sizes


def test_the_first_stage_is_measured_where_a_step_is_new_on_another_rank_only():
    for first, second in on_ranks(rank_new_elsewhere, 2, 2):
        assert len(first) == 2
        assert second == first
