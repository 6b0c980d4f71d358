"""Ranks that make different calls: one error on all of them, which says who called what, and the next step works.

No case waits for a timeout, which is ten minutes here.
"""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from error_text import NO_ERROR, named_outcome
from slow_cases import slow_except
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.commands.train.setup import token_loss
from penstock.comms.control_group import ControlGroup

pytestmark = pytest.mark.ranks

RANKS, VOCABULARY = 3, 5
WHAT_TO_DO = ": all ranks must make the same calls in the same order, none behind `if rank == 0:`"
TOKENS = torch.arange(24).reshape(6, 4) % VOCABULARY


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 4), *[nn.Linear(4, 4) for _ in range(2)], nn.Linear(4, VOCABULARY))


def build(model=None, **options):
    return ps.Pipeline(model or layers(), token_loss, "1f1b", 2, **options)


class Made:
    """A pipeline, and what calls take besides it."""

    def __init__(self, folder):
        self.folder, self.model = Path(folder), layers()
        self.pipe, self.other = build(self.model), build()
        self.optimizer = torch.optim.SGD(self.pipe.parameters(), 0.1)
        self.loss = self.step()
        checkpoint.save(self.folder / "saved", self.pipe, self.optimizer)
        checkpoint.export(self.pipe, self.folder / "model.safetensors")
        self.trail = checkpoint.DigestLog(self.folder / "trail", self.pipe, self.optimizer, every=1)

    def step(self):
        self.pipe.zero_grad()
        return self.pipe.step(TOKENS, target=TOKENS)


CALLS = {
    "step()": Made.step,
    "eval()": lambda made: made.pipe.eval(TOKENS),
    "generate()": lambda made: made.pipe.generate(TOKENS, max_new_tokens=1),
    "clip_grad_norm_()": lambda made: made.pipe.clip_grad_norm_(1.0),
    "metrics()": lambda made: made.pipe.metrics(),
    "timeline()": lambda made: made.pipe.timeline(),
    "lines()": lambda made: made.pipe.lines(),
    "gather()": lambda made: made.pipe.gather(lambda: 1),
    "Pipeline(..)": lambda made: build(),
    "rebuild()": lambda made: made.pipe.rebuild("gpipe"),
    "init_mesh()": lambda made: ps.comms.init_mesh(),
    "checkpoint.save()": lambda made: checkpoint.save(made.folder / "other", made.pipe, wait=False).wait(),
    "checkpoint.resume()": lambda made: checkpoint.resume(made.folder / "saved", made.pipe, made.optimizer),
    "checkpoint.export()": lambda made: checkpoint.export(made.pipe, made.folder / "other.safetensors"),
    "checkpoint.import_weights()": lambda made: checkpoint.import_weights(made.pipe, made.folder / "model.safetensors"),
    "checkpoint.digests()": lambda made: checkpoint.digests(made.pipe, made.optimizer),
    "checkpoint.DigestLog(..)": lambda made: checkpoint.DigestLog(made.folder / "trail", made.pipe, made.optimizer),
    "DigestLog.record_step()": lambda made: made.trail.record_step(),
}
NAMES = list(CALLS)
CASES = {
    **{f"rank 0 alone calls {name}": (name, "eval()" if name == "step()" else "step()") for name in NAMES},
    **{f"all but rank 0 call {name}": ("eval()" if name == "step()" else "step()", name) for name in NAMES},
    **{f"{name} and {after} at once": (name, after) for name, after in zip(NAMES, NAMES[1:] + NAMES[:1], strict=True)},
}


def rank_differs(folder):
    """To each case the error, and whether the next step has the loss of the first."""
    made = Made(folder)
    results = {}
    for number, (case, (first, others)) in enumerate(CASES.items()):
        name = others if made.pipe.topology.rank else first
        results[case] = named_outcome(CALLS[name], made), number % 2 == 0 or torch.equal(made.step(), made.loss)
    return results


@pytest.fixture(scope="module")
def everyone(tmp_path_factory):
    return ps.launch(rank_differs, RANKS, str(tmp_path_factory.mktemp("calls")))


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_make_different_calls_are_told_who_made_which_and_the_next_step_works(everyone, case):
    first, others = CASES[case]
    words = f"MismatchError: the ranks do different things: rank 0 calls {first}, ranks 1/2 call {others}{WHAT_TO_DO}"
    assert [result[case] for result in everyone] == [(words, True)] * RANKS


def rank_differs_otherwise(folder):
    made = Made(folder)
    rank, results = made.pipe.topology.rank, {}

    order = [made.pipe, made.other] if rank else [made.other, made.pipe]
    results["two pipelines"] = named_outcome(lambda: [index.step(TOKENS, target=TOKENS) for index in order])
    results["the next step of either"] = (
        torch.equal(made.step(), made.loss),
        torch.equal(made.other.step(TOKENS, target=TOKENS), made.loss),
    )

    made.step()
    if rank == 1:
        time.sleep(1)  # it is slow, and not wrong
    results["a rank that comes late"] = named_outcome(checkpoint.save, made.folder / "late", made.pipe)

    saving = checkpoint.save(made.folder / "in a thread", made.pipe, wait=False)
    results["a step while a save goes on"] = torch.equal(made.step(), made.loss)
    results["a call of the ranks while a save goes on"] = named_outcome(
        CALLS["metrics()" if rank else "checkpoint.save()"], made
    )
    results["that save"] = saving.wait().name

    name = "again" if rank else "first"  # rank 0 alone called export for the first
    results["an export of one rank alone, then of all"] = named_outcome(checkpoint.export, made.pipe, made.folder / name)

    results["an argument that one rank has wrong"] = named_outcome(
        checkpoint.save, made.folder, made.pipe, None, None, None, rank
    )
    every = 0 if rank == 1 else 5
    results["a trail that one rank has wrong"] = named_outcome(checkpoint.DigestLog, made.folder, made.pipe, None, every)
    clip = lambda made: nn.utils.clip_grad_norm_(made.pipe.parameters(), 1.0)  # noqa: E731
    results["torch's own clipping on one rank"] = named_outcome(Made.step if rank else clip, made)
    results["another maximum norm on one rank"] = named_outcome(made.pipe.clip_grad_norm_, 0.5 if rank == 2 else 1.0)
    results["one that differs in its ninth digit"] = named_outcome(made.pipe.clip_grad_norm_, 1.00000001 if rank == 2 else 1.0)
    made.model.train(rank != 1)
    results["evaluation mode on one rank"] = named_outcome(made.step)
    made.model.train()
    results["a mesh that one rank has wrong"] = named_outcome(ps.comms.init_mesh, *([2] if rank == 2 else []))

    seen = []
    made.pipe.generate(TOKENS, max_new_tokens=2, on_token=lambda _: seen.append(made.other.eval(TOKENS)))
    results["another pipeline within a call"] = len(seen)
    results["steps"] = made.pipe.step_count - made.other.step_count
    return results


def test_what_else_ranks_may_do_differently(tmp_path):
    everyone = ps.launch(rank_differs_otherwise, RANKS, str(tmp_path))
    assert all(result == everyone[0] for result in everyone)
    numbered = "(pipelines are numbered as they were built)"
    calls = f"rank 0 calls step() of pipeline 2, ranks 1/2 call step() of pipeline 1 {numbered}"
    assert everyone[0] == {
        "two pipelines": f"MismatchError: the ranks do different things: {calls}{WHAT_TO_DO}",
        "the next step of either": (True, True),
        "a rank that comes late": NO_ERROR,
        "a step while a save goes on": True,
        "a call of the ranks while a save goes on": "MismatchError: the ranks do different things: "
        f"rank 0 calls checkpoint.save(), ranks 1/2 call metrics(){WHAT_TO_DO}",
        "that save": everyone[0]["that save"],
        "an export of one rank alone, then of all": "MismatchError: the ranks do different things: "
        f"rank 0 calls checkpoint.export('{tmp_path}/first'), ranks 1/2 call checkpoint.export('{tmp_path}/again'){WHAT_TO_DO}",
        "an argument that one rank has wrong": "PenstockError: keep=0 would keep no checkpoint: "
        "use a whole number of 1 or more",
        "a trail that one rank has wrong": "PenstockError: every=0 is no number of steps: use a whole number, 1 or more",
        "torch's own clipping on one rank": "MismatchError: the ranks do different things: "
        f"rank 0 calls clip_grad_norm_(), ranks 1/2 call step(){WHAT_TO_DO}",
        "another maximum norm on one rank": "MismatchError: the ranks do not clip alike: rank 0 has max_norm=1, "
        "rank 2 has max_norm=0.5",
        "one that differs in its ninth digit": "MismatchError: the ranks do not clip alike: rank 0 has max_norm=1, "
        "rank 2 has max_norm=1.00000001",
        "evaluation mode on one rank": "MismatchError: the ranks have models in different modes (call model.train() or "
        "model.eval() on all ranks): rank 0 is in training mode, rank 1 is in evaluation mode",
        "a mesh that one rank has wrong": "MismatchError: a mesh of pp=2, dp=1, tp=1 has 2 ranks, but 3 are running: "
        "start that many, or give other numbers",
        "another pipeline within a call": 2,
        "steps": everyone[0]["steps"],
    }


def rank_differs_on_a_mesh(folder, pp, data_parallel, name):
    """What a call on rank 0 comes to, the others being in a step that waits for the mesh; and the next step; and a save."""
    pipe = build(mesh=ps.comms.init_mesh(pp, 2), data_parallel=data_parallel)
    made = SimpleNamespace(pipe=pipe, folder=Path(folder))
    pipe.step(TOKENS, target=TOKENS)
    results = [named_outcome(CALLS["step()" if pipe.position.world.rank else name], made), named_outcome(CALLS["step()"], made)]
    return [*results, named_outcome(CALLS["checkpoint.save()"], made)] if data_parallel == "ddp" else results


@pytest.mark.parametrize(
    ("pp", "data_parallel", "name"),
    [(1, "fsdp", "checkpoint.save()"), (1, "fsdp", "clip_grad_norm_()"), (2, "ddp", "init_mesh()")],
)
def test_on_a_mesh_too_where_it_is_the_last_step_of_the_pipeline(pp, data_parallel, name, tmp_path):
    everyone = ps.launch(rank_differs_on_a_mesh, 2 * pp, str(tmp_path), pp, data_parallel, name)
    others = "rank 1 calls step()" if pp == 1 else "ranks 1/2/3 call step()"
    words = f"the ranks do different things: rank 0 calls {name}, {others}{WHAT_TO_DO}"
    for result, after, *saved in everyone:
        assert result == f"MismatchError: {words}"
        assert after == f"LostRankError: this pipeline ended when {words}: start the ranks again"
        assert saved in ([], [NO_ERROR])


def rank_is_alone(folder, name):
    made = Made(folder)
    if made.pipe.topology.rank == 0:
        CALLS[name](made)


@pytest.mark.parametrize(
    "name",
    slow_except(
        ["step()", "checkpoint.save()"],
        ["step()", "checkpoint.save()", "checkpoint.export()", "metrics()", "Pipeline(..)", "init_mesh()"],
    ),
)
def test_a_call_that_others_do_not_come_to_since_their_program_has_ended_is_an_error(name, tmp_path):
    words = r"rank 0 waited for .*, but rank [12] has finished.*: every rank must make the same calls"
    with pytest.raises(ps.LostRankError) as raised:
        ps.launch(rank_is_alone, RANKS, str(tmp_path), name)
    assert re.fullmatch(words, str(raised.value))
    assert name in str(raised.value)


def rank_counts_rows():
    made, counts, tell = SimpleNamespace(pipe=build()), {}, ControlGroup.begin_all_gather_row
    CALLS["step()"](made), CALLS["eval()"](made)  # in the first of a kind ranks also exchange descriptions
    with pytest.MonkeyPatch.context() as patch:
        for name in ("step()", "eval()", "clip_grad_norm_()", "timeline()"):
            rows = []
            patch.setattr(
                ControlGroup,
                "begin_all_gather_row",
                lambda control, row, what, *value, rows=rows: rows.append(what) or tell(control, row, what, *value),
            )
            CALLS[name](made)
            counts[name] = [what.partition(",")[0] for what in rows]
    return counts


def test_what_tells_calls_apart_costs_a_step_and_a_clip_no_exchange():
    assert (
        ps.launch(rank_counts_rows, 2)
        == [
            {
                "step()": ["to begin step()", "to end the step"],
                "eval()": ["to begin eval()", "to end the step"],
                "clip_grad_norm_()": ["to clip their gradients"],
                "timeline()": ["to call timeline()", "to tell their timelines"],
            }
        ]
        * 2
    )
