"""Traces of torch.profiler, real ones of torch's schedules and ours, and made ones: what is read from them."""

import contextlib
import gzip
import json
import random
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import made_traces
import prompt
import pytest
import torch_runs

import penstock as ps
from penstock.errors import PenstockError
from penstock.integrations.torch_trace import is_traces, read, read_record
from penstock.schedule import Action, Event, Kind, Measurement, Timeline, build, simulate
from penstock.timing.costs import Costs
from penstock.view.reading import load
from penstock.view.record import Record

penstock = partial(prompt.penstock, columns=100)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of traces for each of torch's schedules, and for ours."""
    folder = tmp_path_factory.mktemp("runs")
    ps.launch(torch_runs.rank_profiled, torch_runs.RANKS, folder)
    return folder


def nothing_starts_before_what_it_needs(timeline: Timeline) -> bool:
    return all(needed.end <= event.start for event in timeline.events for needed in timeline.needed_events(event))


# ---- real traces


@pytest.mark.ranks
@pytest.mark.parametrize("name", torch_runs.NAMES)
def test_every_action_of_torchs_schedules_is_found_in_its_order_of_time(runs: Path, name: str) -> None:
    record, notes = read_record(runs / name)
    assert [step.name for step in record.steps] == [f"{name}, measured"] * torch_runs.STEPS
    assert record.labels == ("step 1", "step 2", "step 3")
    table = build(name, torch_runs.RANKS, torch_runs.MICROBATCHES)
    for step in record.steps:
        assert tuple(tuple(event.action for event in row) for row in step.rows) == table.actions
        assert nothing_starts_before_what_it_needs(step)
    assert any("inferred" in note for note in notes) == (name == "1f1b")
    assert not any("clock" in note for note in notes)
    assert record.steps[0].between_steps == (0, 0)
    assert min(record.steps[1].between_steps) > 0
    assert record.explanation is not None


@pytest.mark.ranks
def test_a_traced_step_of_ours_has_the_actions_that_ran(runs: Path) -> None:
    timeline = read(runs / "ours")
    assert {event.action.stage for event in timeline.rows[1]} == {1}
    assert len(timeline.events) >= 2 * torch_runs.RANKS * torch_runs.MICROBATCHES
    assert nothing_starts_before_what_it_needs(timeline)


@pytest.mark.ranks
def test_a_gzipped_trace_and_a_list_of_files_in_any_order_read_the_same(runs: Path, tmp_path: Path) -> None:
    files = sorted((runs / "gpipe").iterdir())
    zipped = tmp_path / "rank1.json.gz"
    zipped.write_bytes(gzip.compress(files[1].read_bytes()))
    assert read([zipped, files[0]]) == read(runs / "gpipe")


@pytest.mark.ranks
def test_a_rank_that_is_missing_is_noticed_where_stages_have_no_names(runs: Path) -> None:
    with pytest.raises(PenstockError, match="backwards of stage 0 wait for messages from stage 1, which is in no trace"):
        read(runs / "gpipe" / "rank0.json")
    with pytest.raises(PenstockError, match="backwards of stage 0 wait for messages from stage 1, which is in no trace"):
        read(runs / "1f1b" / "rank0.json")


@pytest.mark.ranks
def test_the_commands_take_traces_as_they_take_runs(runs: Path, tmp_path: Path) -> None:
    traces, page, kept, costs = runs / "gpipe", tmp_path / "page.html", tmp_path / "timeline.json", tmp_path / "costs.json"
    shown = penstock("show", traces, "--html", page, "--json", kept).stdout.splitlines()
    assert re.fullmatch(r"3 steps of .* ms, the median one is shown", shown[0])
    assert shown[1].startswith("between actions ")
    start = next(number for number, line in enumerate(shown) if line.startswith("gpipe, measured, step "))
    assert shown[start + 1].startswith("rank 0 |")  # on a busy machine waits take most of the row
    assert shown[-2:] == [f"wrote {kept}", f"wrote {page}"]
    assert penstock("show", kept).stdout.splitlines() == shown[start:-2]

    compared = penstock("compare", traces, "1f1b").stdout
    assert "gpipe, measured  1f1b, predicted" in compared
    assert "gpipe, measured, is itself predicted to take" in compared

    told = penstock("export-costs", traces, costs, "--rows", "2").stdout
    assert told.splitlines()[-1] == (
        f"wrote {costs}: seconds of forward and backward of 2 stages, for microbatches of 2 rows; "
        "not in it: memory, parameters, messages"
    )
    assert ps.plan.ModelProfile.load(costs).layer_names == ["stage0", "stage1"]
    planned = penstock("plan", "--costs", traces, "--ranks", "2", "--batch", "4", "--effort", "quick").stdout
    assert "a row of --batch is one microbatch of the traces" in planned
    assert "cut before stage1" in planned


@pytest.mark.ranks
def test_steps_that_the_profiler_did_not_mark_are_told_apart(runs: Path, tmp_path: Path) -> None:
    """`torch.profiler.profile()` without `schedule=` marks none."""
    for file in (runs / "1f1b").iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace("ProfilerStep#", "Unmarked#"))
    steps = read_record(tmp_path)[0].steps
    table = build("1f1b", torch_runs.RANKS, torch_runs.MICROBATCHES)
    assert [step.name for step in steps] == ["1f1b, measured"] * torch_runs.STEPS
    assert all(tuple(tuple(event.action for event in row) for row in step.rows) == table.actions for step in steps)


# ---- made traces


def test_times_are_those_of_the_trace(tmp_path: Path) -> None:
    made = made_traces.timeline()
    made_traces.write(tmp_path, made)
    found = read(tmp_path)
    assert [event.action for event in found.events] == [event.action for event in made.events]
    for event, was in zip(found.events, made.events, strict=True):
        assert event.start - found.start == pytest.approx(was.start, abs=1e-6)
        assert event.end - event.start == pytest.approx(was.end - was.start, abs=1e-6)


def test_on_a_gpu_an_action_takes_from_its_first_kernel_to_its_last(tmp_path: Path) -> None:
    made = made_traces.timeline("zb-v")
    made_traces.write(tmp_path, made, on_gpu=True)
    found = read(tmp_path)
    assert found.name == "zb-v, measured"
    assert [event.end - event.start for event in found.events] == pytest.approx([0.010] * len(made.events), abs=1e-6)


def extra_events(rank: int, event: Event, begin: float) -> list[made_traces.Data]:
    """In 0F0 an all-to-all that waits for the receive of 0B0; before it a data loader and an optimizer."""
    made, start = made_traces.range_event, begin + event.start
    if str(event.action) != "0F0":
        return []
    return [
        made("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start - 0.009, start - 0.003),
        made("Optimizer.step#Adam.step", start - 0.003, start - 0.001),
        *(made("aten::add_", start - 0.002, start - 0.002, "cpu_op") for _ in range(30)),
        made("PP:0RECV_B0", start - 0.00002, start - 0.00001),
        made("gloo:recv", start - 0.00002, start + 0.006, **{"Input Dims": [[1000, 8000]], "Input type": ["float"]}),
        made("gloo:all_to_all", start + 0.001, start + 0.0061),
    ]


def test_causes_beyond_the_timeline_are_named_and_kept_in_a_file(tmp_path: Path) -> None:
    made_traces.write(tmp_path / "traces", made_traces.timeline(), extra=extra_events)
    record, notes = read_record(tmp_path / "traces")
    assert record.explanation is not None
    texts = {finding.kind: finding.text for finding in record.explanation.verdict}
    assert texts["blocked"].startswith(
        "rank 0 is blocked for 5 ms in 0F0: all_to_all waits for the receive of 0B0, posted before"
    )
    assert texts["between steps"].startswith("between steps 10.0 ms, 6.1% of the loop: on rank 0 data loader 6.0 ms, ")
    assert texts["between steps"].endswith("optimizer (not fused, 30 operations) 2.0 ms")
    assert any(note.startswith("collectives in actions: 1 all_to_all, together 5.1 ms") for note in notes)
    assert any(re.fullmatch(r"between actions .* ms on all ranks: .*host \d+%", note) for note in notes)
    assert record.usual.message_bytes == 32e6

    record.save(tmp_path / "timeline.json")
    reread = load(tmp_path / "timeline.json").explanation
    assert reread is not None
    assert reread.verdict_text == record.explanation.verdict_text
    assert reread.verdict[0].timeline.makespan == pytest.approx(record.explanation.verdict[0].timeline.makespan, abs=1e-6)


def test_a_pause_of_the_host_is_named_and_so_is_its_action(tmp_path: Path) -> None:
    for file in made_traces.write(tmp_path, made_traces.timeline()):
        data = json.loads(file.read_text())
        for event in data["traceEvents"]:
            event["dur"] += 30_000 * (event["name"] == "PP:0B3")
        file.write_text(json.dumps(data))
    (pause,) = [finding for finding in read_record(tmp_path)[0].findings if finding.kind == "pause"]
    assert pause.text.startswith(
        "rank 0 pauses in 0B3, 30 ms longer than usual (garbage collection, or what else stops its host; in 3 of 3 steps)"
    )
    assert pause.timeline.makespan == pytest.approx(made_traces.timeline().makespan, abs=1e-6)


def test_on_a_gpu_a_kernel_that_queues_behind_a_receive_is_blocked(tmp_path: Path) -> None:
    def receive_ahead(rank: int, event: Event, begin: float) -> list[made_traces.Data]:
        made, start, key = made_traces.range_event, begin + event.start, round(1e6 * begin)
        if str(event.action) != "0F0":
            return []
        return [
            made("ncclDevKernel_SendRecv", start - 0.001, start + 0.005, "kernel", correlation=key + 1),
            made("cudaLaunchKernel", start + 0.0005, start + 0.0006, "cuda_runtime", correlation=key),
            made(
                "ncclDevKernel_X",
                start + 0.00501,
                start + 0.006,
                "kernel",
                correlation=key,
                **{"Collective name": "all_to_allv"},
            ),
        ]

    made_traces.write(tmp_path, made_traces.timeline(), on_gpu=True, extra=receive_ahead)
    record, notes = read_record(tmp_path)
    (blocked,) = [finding for finding in record.findings if finding.kind == "blocked"]
    assert re.match("rank 0 is blocked for [45] ms in 0F0: all_to_allv waits for a message, posted before", blocked.text)
    assert any(note.startswith("collectives in actions: 1 all_to_allv, together 1.0 ms") for note in notes)


def test_a_kernel_of_an_older_torch_is_a_collective_by_its_name_and_a_rank_that_sends_nothing_is_no_pipeline(
    tmp_path: Path,
) -> None:
    def averaging(rank: int, event: Event, begin: float) -> list[made_traces.Data]:
        made, start = made_traces.range_event, begin + event.start
        if str(event.action) != "0F0":
            return []
        kernel = made(
            "ncclKernel_AllReduce_RING_LL_Sum_float(int)", start, start + 0.002, "kernel", correlation=round(1e6 * begin)
        )
        return [kernel, made("autograd::engine::evaluate_function: Add", start, start + 0.001, "cpu_op")]

    (file, _) = made_traces.write(tmp_path, made_traces.timeline(), on_gpu=True, extra=averaging)
    assert any(note.startswith("collectives in actions: 1 AllReduce, together 2.0 ms") for note in read_record(tmp_path)[1])
    file.write_text(file.read_text().replace("PP:", "other "))
    with pytest.raises(
        PenstockError, match=r"no action of a pipeline, neither ranges .* nor backwards between sends and receives"
    ):
        read(file)


def test_kernels_of_a_cuda_graph_name_the_range_that_they_were_captured_in(tmp_path: Path) -> None:
    made = made_traces.timeline()
    for file in made_traces.write(tmp_path, made):
        data, launches = json.loads(file.read_text()), list[made_traces.Data]()
        for event in data["traceEvents"]:
            if event["name"].startswith("ProfilerStep"):
                number, when = int(event["name"][13:]), event["ts"] / 1e6
                launches.append(made_traces.range_event("cudaGraphLaunch", when, when, "cuda_runtime", correlation=number))
            else:
                event |= {"cat": "kernel", "name": "gemm", "args": {"name": event["name"], "correlation": number}}
        data["traceEvents"] += launches
        file.write_text(json.dumps(data))
    record, _ = read_record(tmp_path)
    assert record.labels == ("step 3", "step 4", "step 5")
    for event, was in zip(record.usual.events, made.events, strict=True):
        assert event.action == was.action
        assert (event.start - record.usual.start, event.end - event.start) == pytest.approx(
            (was.start, 0.010 * (1 + (was.action.kind is Kind.B))), abs=1e-6
        )


def test_what_torchs_runtime_does_for_fsdp_between_actions_is_named(tmp_path: Path) -> None:
    def unshard(rank: int, event: Event, begin: float) -> list[made_traces.Data]:
        made, end = made_traces.range_event, begin + event.end
        if str(event.action) != "1F0":
            return []
        return [made("PP:1UNSHARD", end, end + 0.0005), made("gloo:all_gather", end + 0.0001, end + 0.0005)]

    planned = simulate(build("1f1b", 2, 4), Costs(0.010, 0.011, 0.010, send=0.001))
    rows = tuple(
        tuple(
            event._replace(start=event.start + 0.001 * place, end=event.end + 0.001 * place) for place, event in enumerate(row)
        )
        for row in planned.rows
    )
    made_traces.write(tmp_path, replace(planned, rows=rows), extra=unshard)
    notes = read_record(tmp_path)[1]
    assert "collectives between actions: 1 all_gather, together 0.4 ms" in notes
    assert any(re.fullmatch(r"between actions .* ms on all ranks: UNSHARD \d+%, host \d+%", note) for note in notes)


def test_a_pair_of_torchs_runtime_sends_once_both_have_run(tmp_path: Path) -> None:
    made_traces.write(tmp_path / "torch", made_traces.timeline("interleaved-1f1b"))
    made_traces.write(tmp_path / "ours", made_traces.timeline("interleaved-1f1b"), name=str)
    predicted = {}
    for name in ("torch", "ours"):
        step = read(tmp_path / name)
        predicted[name] = Measurement.from_timelines(step).predict(build("dualpipe-v", 2, 4)).makespan
        Record((step,), unit="s").save(tmp_path / f"{name}.json")
        assert load(tmp_path / f"{name}.json").usual.pairs_send_together == (name == "torch")
    assert predicted["torch"] > predicted["ours"]


def of_megatron(action: Action) -> str:
    return "forward_step" if action.kind is Kind.F else "megatron/core/pipeline_parallel/schedules.py(350): backward_step"


@pytest.mark.parametrize(("name", "stages_per_rank"), [("1f1b", 1), ("interleaved-1f1b", 2)])
def test_ranges_that_name_no_microbatch_are_counted(tmp_path: Path, name: str, stages_per_rank: int) -> None:
    def inner(rank: int, event: Event, begin: float) -> list[made_traces.Data]:  # with_stack: the function that Megatron calls
        when = begin + event.start + 0.001, begin + event.end - 0.001
        return [made_traces.range_event("pretrain_gpt.py(90): forward_step", *when, "python_function")] * (
            event.action.kind is Kind.F
        )

    made_traces.write(tmp_path, made_traces.timeline(name), name=of_megatron, extra=inner)
    record, notes = read_record(tmp_path, stages_per_rank=stages_per_rank)
    assert [step.name for step in record.steps] == [f"{name}, measured"] * 3
    assert "microbatches counted in the order of their ranges, which do not name them" in notes
    with pytest.raises(PenstockError, match="does not cycle over 2 ranks"):
        read(tmp_path, placement=[0, 1, 1, 0])
    for file in tmp_path.iterdir():
        file.write_text(file.read_text().replace("ProfilerStep#", "Unmarked#"))
    unmarked = read_record(tmp_path, stages_per_rank=stages_per_rank)[0]
    assert [step.name for step in unmarked.steps] == [f"{name}, measured"] * 3


def test_clocks_of_other_machines_are_lined_up_by_the_messages(tmp_path: Path) -> None:
    made = made_traces.timeline(ranks=3)
    made_traces.write(tmp_path, made, ahead=[0, 0.5, -2], hosts=["a", "b", "c"])
    record, notes = read_record(tmp_path)
    assert record.usual.makespan == pytest.approx(made.makespan, abs=1e-6)  # messages take as long there and back
    assert "clocks aligned by messages, to within 1000 us" in notes


def test_a_clock_of_the_same_machine_is_moved_only_where_a_message_would_be_there_before_it_was_sent(tmp_path: Path) -> None:
    made_traces.write(tmp_path / "a", made_traces.timeline(), ahead=[0, 0.0005])
    assert not any("clock" in note for note in read_record(tmp_path / "a")[1])
    made_traces.write(tmp_path / "b", made_traces.timeline(), ahead=[0, 0.0015])
    record, notes = read_record(tmp_path / "b")
    assert any("clocks of one machine" in note for note in notes)
    assert nothing_starts_before_what_it_needs(record.usual)


def test_the_middle_step_is_read(tmp_path: Path) -> None:
    files = made_traces.write(tmp_path, made_traces.timeline())
    for file in files:  # the first step's last backward takes 5 ms longer, the last step's 2 ms
        data = json.loads(file.read_text())
        lasts = [event for event in data["traceEvents"] if event["name"] == "PP:0B3"]
        for event, longer in zip(lasts, (5000, 0, 2000), strict=False):
            event["dur"] += longer
        file.write_text(json.dumps(data))
    record, _ = read_record(tmp_path)
    assert record.label == "step 5"


def test_a_step_that_is_not_whole_is_left_out_and_that_is_told(tmp_path: Path) -> None:
    files = made_traces.write(tmp_path, made_traces.timeline())
    data = json.loads(files[0].read_text())
    place = next(place for place, event in enumerate(data["traceEvents"]) if event["name"] == "PP:0B1")
    del data["traceEvents"][place]
    files[0].write_text(json.dumps(data))
    record, notes = read_record(tmp_path)
    assert record.labels == ("step 4", "step 5")
    assert "left out: 1 with other actions, or incomplete" in notes


def test_pipeline_steps_of_one_profiler_step_are_told_apart_by_their_actions(tmp_path: Path) -> None:
    files = made_traces.write(tmp_path, made_traces.timeline())
    for file in files:
        data = json.loads(file.read_text())
        data["traceEvents"] = [event for event in data["traceEvents"] if not event["name"].startswith("ProfilerStep")]
        file.write_text(json.dumps(data))
    assert read_record(tmp_path)[0].labels == ("step 0", "step 0, part 2", "step 0, part 3")


def test_ranks_choose_one_pipeline_of_several(tmp_path: Path) -> None:
    made_traces.write(tmp_path / "a", made_traces.timeline())
    made_traces.write(tmp_path / "b", made_traces.timeline())
    for rank, file in enumerate(made_traces.write(tmp_path / "b", made_traces.timeline())):
        file.write_text(file.read_text().replace(f'"rank": {rank}', f'"rank": {rank + 2}'))
        shutil.move(file, tmp_path / "a" / f"worker{rank + 2}.json")
    with pytest.raises(PenstockError, match="stage 0 ran on two of these ranks, 0 and 2: they are replicas"):
        read(tmp_path / "a")
    assert read(tmp_path / "a", ranks=[2, 3]).ranks == 2
    for rank in range(4):  # as torch describes the groups of a mesh
        file = tmp_path / "a" / f"worker{rank}.json"
        group = [{"pg_desc": "mesh_pp", "ranks": [0, 1] if rank < 2 else [2, 3]}]
        file.write_text(file.read_text().replace('"world_size"', f'"pg_config": {json.dumps(group)}, "world_size"'))
    assert read(tmp_path / "a").ranks == 2


def test_placement_is_checked_against_the_traces(tmp_path: Path) -> None:
    made_traces.write(tmp_path, made_traces.timeline())
    assert read(tmp_path, placement=[0, 1]).ranks == 2
    with pytest.raises(PenstockError, match=re.escape("placement is [1, 0], but in the traces the stages ran on [0, 1]")):
        read(tmp_path, placement=[1, 0])


# ---- what is no trace


def test_a_folder_is_one_of_traces_only_if_it_has_some_and_is_no_run(tmp_path: Path) -> None:
    assert not is_traces(tmp_path)
    files = made_traces.write(tmp_path, made_traces.timeline())
    assert is_traces(tmp_path)
    assert is_traces(files[0])
    (tmp_path / "timeline.json").write_text("{}")
    assert not is_traces(tmp_path)
    assert not is_traces(tmp_path / "timeline.json")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return made_traces.write(tmp_path, made_traces.timeline())


def says(files: list[Path]) -> str:
    with pytest.raises(PenstockError) as raised:
        read(files)
    text = str(raised.value)
    assert "\n" not in text
    assert ": " in text  # and what to do
    return text


def test_a_truncated_trace_says_so(files: list[Path]) -> None:
    files[1].write_text(files[1].read_text()[:-300])
    assert re.search(r"worker1.json is cut off or damaged after \d+ events: copy or export it again", says(files))
    files[1].write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 10**5)[:-20])
    assert "cannot be unzipped" in says(files)


def test_a_foreign_file_says_how_a_trace_is_made(files: list[Path]) -> None:
    files[1].write_text('{"losses": [1, 2]}')
    assert "it has no traceEvents: profile some steps with torch.profiler" in says(files)
    files[1].write_text('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1}]}')
    assert "worker1.json has no action of a pipeline, neither ranges" in says(files)


def test_missing_and_doubled_ranks_are_named(files: list[Path]) -> None:
    assert "no trace has stage 0: give the traces of all ranks" in says(files[1:])
    assert "are both of rank 0: give one trace for each rank" in says([files[0], files[0]])
    with pytest.raises(PenstockError, match="there is no trace of rank 5, but of 0, 1"):
        read(files, ranks=[0, 5])


def test_ranks_with_other_steps_are_told_with_theirs(files: list[Path], tmp_path: Path) -> None:
    later = made_traces.write(tmp_path / "later", made_traces.timeline(), steps=[8, 9])
    told = says([files[0], later[1]])
    assert "no step in common (worker0.json: 3, 4, 5; worker1.json: 8, 9): profile the same steps on every rank" in told


def mix(folder: Path, first: tuple[str, int, int], second: tuple[str, int, int], seconds_later: float = 0.0) -> list[Path]:
    """Return rank 0's file of one run, and rank 1's of another one that ran some seconds later."""
    folder.mkdir()
    file = made_traces.write(folder / "first", made_traces.timeline(*first))[0]
    return [file, made_traces.write(folder / "second", made_traces.timeline(*second), ahead=[seconds_later] * second[1])[1]]


def test_traces_of_two_runs_are_told_with_both(tmp_path: Path) -> None:
    told = says(mix(tmp_path / "sizes", ("1f1b", 2, 4), ("1f1b", 3, 4)))
    assert re.search("of two runs, .*first/worker0.json of a run of 2 ranks, .*second/worker1.json of one of 3: give", told)
    told = says(mix(tmp_path / "times", ("1f1b", 2, 4), ("1f1b", 2, 4), 60))
    assert re.search("of two runs, .*second/worker1.json begins 59.5 s after the last action of .*first/worker0.json: ", told)
    told = says(mix(tmp_path / "orders", ("1f1b", 2, 4), ("gpipe", 2, 4)))
    assert re.search("step 3 contradicts itself, as .*first/worker0.json and .*second/worker1.json are of two runs, its ", told)
    assert "would have to run 0B0 before 0F2 before 0B1 before 0F3 before 1F3 before 1B0 before 0B0: give the traces of" in told


def test_a_folder_without_traces_says_what_it_should_have(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="has no traces of torch"):
        read(tmp_path)
    with pytest.raises(PenstockError, match="there are no traces to read"):
        read([])


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_trace_is_read_or_refused_in_a_sentence(files: list[Path], seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(files[1].read_bytes())
    for _ in range(rng.randint(1, 30)):
        place = rng.randrange(len(data))
        match seed % 5:
            case 0:  # bits flipped
                data[place] ^= 1 << rng.randrange(8)
            case 1:  # cut short
                del data[max(place, 100) :]
            case 2:  # pieces missing
                del data[place : place + rng.randint(1, 200)]
            case 3:  # keys and values that are others
                word = rng.choice([b"ts", b"dur", b"name", b"args", b"ph", b"rank", b"PP:", b"1000", b"user"])
                other = rng.choice([b"null", b"[]", b"{}", b"-1e999", b"NaN", b'"', b"9" * 40, b""])
                data = data.replace(word, other, rng.randint(1, 3))
            case 4:  # values of another type
                word = rng.choice([b'"cat"', b'"ts"', b'"dur"', b'"args"', b'"name"', b'"ph"'])
                other = rng.choice([b"[]", b"{}", b"true", b"null"])
                data = data.replace(word + b": ", word + b": " + other + b', "before": ', rng.randint(1, 3))
    files[1].write_bytes(data)
    with contextlib.suppress(PenstockError):
        read(files)


@pytest.mark.ranks
def test_a_zipped_trace_that_is_cut_off_is_named_in_a_folder_too(runs: Path, tmp_path: Path) -> None:
    for file in (runs / "gpipe").iterdir():
        (tmp_path / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    cut = sorted(tmp_path.iterdir())[-1]
    cut.write_bytes(cut.read_bytes()[:200])
    with pytest.raises(PenstockError, match=f"{cut.name} is cut off or damaged, it cannot be unzipped"):
        read(tmp_path)
