"""`penstock bench collectives`: what it prints and writes, and what of its options is refused."""

import contextlib
import csv
import io
import math
import sys
import types
from xml.etree import ElementTree

import pytest
import torch

import penstock as ps
from penstock.commands import cli
from penstock.commands.bench import collectives, timing
from penstock.comms.collectives.call import COLLECTIVES


def rank_bench(plan: collectives.Plan) -> tuple[list[timing.Row], str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        return collectives.run_plan(plan), said.getvalue()


def launch_and_say(_, ranks: int, plan: collectives.Plan) -> list[list[timing.Row]]:
    """As `launch`; what rank 0 says is said here, where the test hears it."""
    (rows, said), *others = ps.launch(rank_bench, ranks, plan)
    assert {text for _, text in others} == {""}
    print(said)
    return [rows]


@pytest.mark.ranks
def test_the_bench_prints_every_operation_and_writes_table_and_plot(tmp_path, monkeypatch, capsys):
    table, plot = tmp_path / "out.csv", tmp_path / "out.svg"
    words = ["--ranks", "2", "--sizes", "1K", "64KB", "--seconds", "0.01", "--csv", str(table), "--plot", str(plot)]
    monkeypatch.setattr(collectives, "launch", launch_and_say)
    monkeypatch.setattr(sys, "argv", ["penstock", "bench", "collectives", "--against-raw", *words])
    cli.main()
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    measured = [line[0] for line in lines if "1,024" in line[1:2]]
    assert " ".join(measured) == "broadcast scatter gather reduce all-gather reduce-scatter all-reduce all-to-all send"
    assert [line[1:3] for line in lines if line[:1] == ["1,024"]] == [["equal", "equal"]]
    assert "2(n-1)/n for all-reduce" in printed
    assert "\x1b" not in printed
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 2 * (3 * len(COLLECTIVES) + 2)
    for row in rows:
        speed = int(row["bytes"]) / float(row["median_s"]) / 1e9
        assert math.isclose(float(row["algorithm_GBps"]), speed, rel_tol=1e-3)
        assert math.isclose(float(row["bus_GBps"]), speed * float(row["bus_factor"]), rel_tol=1e-3)
        assert float(row["p10_s"]) <= float(row["median_s"]) <= float(row["p90_s"])
    texts = [each.text for each in ElementTree.parse(plot).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert {"all-reduce", "send", "1 KB", "64 KB", "bus GB/s"} <= set(texts)


def test_bandwidth_on_the_bus_is_the_algorithms_times_a_factor():
    factors = {each: timing.bus_factor(each, 4) for each in collectives.OPERATIONS}
    assert factors == {**dict.fromkeys(COLLECTIVES, 0.75), "all_reduce": 1.5, "send": 1.0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "1"], "--ranks 1 is too small: a collective takes 2 or more"),
        (["--operations", "allreduce"], "--operations allreduce is not known: use broadcast, scatter, gather"),
        (["--sizes", "1X"], "'1X' is no size: write it as 512, 64K or 1MB"),
        (["--seconds", "0"], "--seconds 0 is too short"),
        (["--plot", "out.pdf"], "--plot out.pdf: give it a name that ends in .svg or .png"),
    ],
)
def test_a_wrong_option_of_the_bench_is_one_line(words, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["penstock", "bench", "collectives", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert message in str(ended.value)


def test_how_gpus_are_connected_is_told_where_there_are_any(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert collectives.connections() == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A GPU")
    assert collectives.connections()[0] == "cuda:0 A GPU"
    assert "nvidia-smi" in collectives.connections()[1]
    (tmp_path / "nvidia-smi").write_text(f"#!{sys.executable}\nprint('\\033[4mGPU0\\033[0m X')\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert collectives.connections()[1] == "GPU0 X"


def test_sizes_are_read_and_written():
    assert [collectives.bytes_of(text) for text in ("512", "1K", "64 kb", "1.5MB", "2G")] == [
        512,
        1024,
        65536,
        1572864,
        2**31,
    ]
    assert [collectives.text_of(size) for size in (512, 1024, 2**26)] == ["512 B", "1 KB", "64 MB"]


class FakeNvml(types.ModuleType):
    """A binding that knows one GPU with three links, one of them down."""

    NVML_NVLINK_MAX_LINKS = 18

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-one":
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetCurrPcieLinkGeneration(self, gpu: str) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu: str) -> int:
        return 16

    def nvmlDeviceGetNvLinkState(self, gpu: str, link: int) -> int:
        if link > 2:
            raise self.NVMLError("Invalid Argument")
        return int(link != 1)


@pytest.mark.parametrize(
    ("uuid", "told"), [("one", ", PCIe 5 x16, 2 NVLinks"), ("other", ", of its links NVML says: Not Found")]
)
def test_links_of_a_gpu_are_told_as_nvml_says(uuid: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=uuid))
    assert collectives._links(0) == told
    assert nvml.open == 0
