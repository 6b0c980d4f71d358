"""`penstock bench collectives`: what it prints and writes, and what of its options is refused."""

import contextlib
import csv
import io
import math
import sys
from xml.etree import ElementTree

import pytest
import torch.distributed as dist

import penstock as ps
from penstock.commands import cli
from penstock.commands.machine import collectives_benchmark
from penstock.commands.machine.machine_commands import bytes_of

OPERATIONS = ["broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
CALLS = {"all_gather": "all_gather_single", "reduce_scatter": "reduce_scatter_single", "all_to_all": "all_to_all_single"}


def rank_with_counts(names, sizes, seconds):
    """The rows, and how many times this rank has called each operation that is measured, and has waited for the others."""
    counts = dict.fromkeys(["barrier", *names], 0)

    def counted(name, call):
        def count_and_call(*args, **kwargs):
            counts[name] += "group" not in kwargs  # the bench's own go by a group of its own
            return call(*args, **kwargs)

        return count_and_call

    for name in counts:
        setattr(dist, CALLS.get(name, name), counted(name, getattr(dist, CALLS.get(name, name))))
    return collectives_benchmark.run_on_rank(names, sizes, seconds), counts


@pytest.mark.ranks
def test_every_sample_of_an_operation_follows_a_barrier_and_the_first_ones_do_not_count():
    names = ["broadcast", "all_gather", "reduce_scatter", "all_to_all", "all_reduce"]
    for rows, counts in ps.launch(rank_with_counts, 2, names, (1024,), 0.001):
        samples = {row.operation: row.samples for row in rows}
        assert min(samples.values()) >= collectives_benchmark.MIN_SAMPLES
        assert counts.pop("barrier") == sum(counts.values())
        assert counts == {name: count + collectives_benchmark.WARM_UP for name, count in samples.items()}


def rank_with_output(*plan):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return collectives_benchmark.run_on_rank(*plan), printed.getvalue()


def launch_and_print(_, ranks, *plan):
    """As `launch`; what rank 0 prints is printed here, where the test hears it."""
    (rows, printed), *others = ps.launch(rank_with_output, ranks, *plan)
    assert {text for _, text in others} == {""}
    print(printed)
    return [rows]


@pytest.mark.ranks
def test_the_bench_prints_every_operation_and_writes_table_and_plot(tmp_path, monkeypatch, capsys):
    table, plot = tmp_path / "out.csv", tmp_path / "out.svg"
    words = ["--ranks", "2", "--sizes", "1K", "64KB", "--seconds", "0.01", "--csv", str(table), "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", ["penstock", "bench", "collectives", *words])
    monkeypatch.setattr(collectives_benchmark, "launch", launch_and_print)
    cli.main()
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert [line[0] for line in lines if "1,024" in line[1:2]] == OPERATIONS
    assert len([line for line in lines if line[:1] == ["fit:"]]) == len(OPERATIONS)
    assert "2(n-1)/n for all_reduce" in printed
    rows = list(csv.DictReader(table.open()))
    assert [(row["operation"], row["bytes"]) for row in rows] == [
        (name, size) for name in OPERATIONS for size in ("1024", "65536")
    ]
    for row in rows:
        speed = int(row["bytes"]) / float(row["median_s"]) / 1e9
        assert math.isclose(float(row["algorithm_GBps"]), speed, rel_tol=1e-3)
        assert math.isclose(float(row["bus_GBps"]), speed * float(row["bus_factor"]), rel_tol=1e-3)
    texts = [element.text for element in ElementTree.parse(plot).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert {"all_reduce", "send", "1 KB", "64 KB", "bus GB/s"} <= set(texts)


def test_bandwidth_on_the_bus_is_the_algorithms_times_the_factor_of_nccl_tests():
    factors = {name: collectives_benchmark.bus_factor(name, 4) for name in collectives_benchmark.OPERATIONS}
    whole = dict.fromkeys(["broadcast", "reduce", "send"], 1.0)
    shared = dict.fromkeys(["scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"], 0.75)
    assert factors == {**whole, **shared, "all_reduce": 1.5}


def test_latency_and_bandwidth_are_those_that_the_times_were_made_of():
    sizes = [4**power for power in range(5, 13)]
    latency, bandwidth = collectives_benchmark.fit(sizes, [20e-6 + size / 3e9 for size in sizes])
    assert math.isclose(latency, 20e-6, rel_tol=1e-6)
    assert math.isclose(bandwidth, 3e9, rel_tol=1e-6)
    assert collectives_benchmark.fit([1024, 4096], [1e-3, 1e-3])[1] > 1e12  # a size that costs nothing


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "1"], "--ranks 1 is too small: a collective takes 2 or more"),
        (["--operations", "allreduce"], "--operations allreduce is not known: use broadcast, scatter, gather"),
        (["--sizes", "1X"], "'1X' is no size: write it as 512, 64K or 1MB"),
        (["--largest", "512"], "--largest 512 leaves no size to measure: use 1KB or more"),
        (["--seconds", "0"], "--seconds 0 is too short"),
        (["--plot", "out.pdf"], "--plot out.pdf: give it a name that ends in .svg or .png"),
    ],
)
def test_a_wrong_option_of_the_bench_is_one_line(words, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["penstock", "bench", "collectives", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert message in str(ended.value)


def test_sizes_are_read():
    assert [bytes_of(text) for text in ("512", "1K", "64 kb", "1.5MB", "2G")] == [512, 1024, 65536, 1572864, 2**31]
