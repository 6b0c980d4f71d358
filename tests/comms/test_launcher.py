"""Ranks started by `launch` have what the caller has at that moment, and meet where only this machine comes."""

import os
import sys
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.comms import launcher

OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def rank_surroundings():
    libc = [line.partition("=")[2] for line in os.popen("env") if line.startswith("PENSTOCK_TEST=")]
    return dict(os.environ), os.getcwd(), torch.get_num_threads(), "".join(libc).strip(), sys.path


@pytest.mark.ranks
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_ranks_get_the_callers_environment_and_directory_of_each_launch(start, monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "_sees_gpu", lambda: start == "spawn")
    ranks = 1 if start == "spawn" else 2
    monkeypatch.setenv("PENSTOCK_GONE", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for _, _, threads, *_ in ps.launch(rank_surroundings, ranks):
        assert threads == 1
    monkeypatch.setenv("PENSTOCK_TEST", "set after the first launch")
    monkeypatch.delenv("PENSTOCK_GONE")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for environment, folder, threads, libc, path in ps.launch(rank_surroundings, ranks):
        assert {name: value for name, value in environment.items() if name not in OURS} == dict(os.environ)
        assert folder == str(tmp_path)
        assert threads == 3
        assert libc == "set after the first launch"
        assert str(tmp_path / "modules") in path


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells who listens")
def test_the_store_of_launch_listens_on_the_loopback_only():
    with launcher._store() as port:
        lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
        listening = [line[1] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"]
    assert listening == [f"0100007F:{port:04X}"]
