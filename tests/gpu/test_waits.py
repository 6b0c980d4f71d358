"""Where the host waits for the device in a step: at its end, and for messages without NCCL. As torch tells it, or a stub."""

import pytest
import torch
from device_waits import waits
from torch import nn

import penstock as ps
from penstock.comms.topology import Topology
from penstock.model import GPT, GPTConfig

DEVICES = [torch.device("meta"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


def token_loss(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)


def pipeline(device, schedule="1f1b", topology=None, **options):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=17, context=6, width=8, layers=4, heads=2, dropout=0.1)).to(device)
    pipe = ps.Pipeline(model, token_loss, schedule, 4, topology=topology or Topology(device=device), **options)
    for tensor in pipe.state_dict(strict=False).values():
        tensor.mul_(1)  # the stub knows no values: this is one
    return pipe


@pytest.mark.costly
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "zb-v"])
def test_a_step_waits_for_its_losses_at_its_end_and_nowhere_else(device, schedule):
    pipe = pipeline(device, schedule, loss_weight=lambda target: (target != 0).sum())
    tokens = torch.randint(17, (8, 7))
    for _ in range(2):
        with waits(device) as places:
            pipe.step(tokens[:, :-1], target=tokens[:, 1:], losses=[])
        print(schedule, *places, sep="\n  ")
        assert [place.partition(":")[0] for place in places] == [
            "batch/pieces.py scalars_to_floats",
            "batch/pieces.py scalars_to_floats",
        ]


@pytest.mark.costly
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_clipping_waits_once_for_all_norms(device):
    pipe = pipeline(device)
    tokens = torch.randint(17, (8, 7))
    with waits(device):
        pipe.step(tokens[:, :-1], target=tokens[:, 1:])
    with waits(device) as places:
        pipe.clip_grad_norm_(1.0)
    assert [place.partition(":")[0] for place in places] == ["stage/rank_parameters.py _copy_scalars"]


def rank_waits(schedule, device):
    """Where this rank's host waits in its second step."""
    topology = ps.comms.init_distributed("gloo", timeout=120, device=device)
    pipe, tokens = pipeline(topology.device, schedule, topology), torch.randint(17, (8, 7))
    for _ in range(2):
        with waits(topology.device) as places:
            pipe.step(tokens[:, :-1], target=tokens[:, 1:], losses=[])
    return places, pipe.lines()


@pytest.mark.ranks
@pytest.mark.parametrize("device", ["meta", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "zb-v"])
def test_without_nccl_a_rank_waits_for_its_messages_and_at_the_end_of_its_step(schedule, device):
    for places, lines in ps.launch(rank_waits, 2, schedule, device):
        print(schedule, *lines.items(), *places, sep="\n  ")
        functions = [place.partition(":")[0] for place in places]
        messages = [function for function in functions if function.startswith("comms/transport/channels.py")]
        assert messages.count("comms/transport/channels.py _on_transport_device") == 4 * (1 if schedule == "1f1b" else 2)
        assert set(messages) <= {"comms/transport/channels.py _on_transport_device", "comms/transport/channels.py receive"}
        assert set(lines.values()) == {"memory that both processes see"}
        assert functions[len(messages) :] in (
            [],
            ["batch/pieces.py scalars_to_floats"] * 2,
        )
