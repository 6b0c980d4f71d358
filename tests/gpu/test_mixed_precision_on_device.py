"""Mixed precision on a GPU: autocast, loss scaling, recomputation, compiled layers, split backwards: plain PyTorch's bits."""

import pytest
import torch
from device_models import DEVICES, batch, deterministic, made, on, on_host
from reference import assert_same, merged
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import penstock as ps
from penstock.comms.topology import Topology

M = 3
WAYS = {
    "a whole backward": ("1f1b", {}),
    "split": ("zb-h1", {}),
    "recomputed": ("1f1b", {"recompute": "block"}),
    "recomputed and split": ("zb-h1", {"recompute": "stage"}),
}


def expected(device, dtype, compiled):
    model, loss_fn = model_on(device, compiled)
    with torch.autocast(device, dtype):
        losses = [loss_fn(model(inputs), target) for inputs, target in pieces_on(device)]
    backward(losses, pieces_on(device))
    return on_host((name.replace("_orig_mod.", ""), parameter) for name, parameter in model.named_parameters())


def model_on(device, compiled):
    model, loss_fn = made("gpt", device, layers=3)
    if compiled:
        model[1].compile(backend="aot_eager")
    return model.to(device), loss_fn


def pieces_on(device, seed=3):
    inputs, target = (microbatch.to(device).tensor_split(M) for microbatch in batch("gpt", device, M, seed))
    return list(zip(inputs, target, strict=True))


def backward(losses, pieces, scale=1.0):
    """Outside autocast, each microbatch by its share of the rows."""
    rows = [len(target) for _, target in pieces]
    for loss, count in zip(losses, rows, strict=True):
        loss.backward(torch.full_like(loss, count / sum(rows) * scale))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_has_the_bits_of_plain_pytorch(device, dtype):
    inputs, target = batch("gpt", device, M)
    with deterministic():
        for compiled in (False, True) if dtype is torch.bfloat16 else (False,):
            wanted = expected(device, dtype, compiled)
            for way, (schedule, options) in WAYS.items():
                if compiled and options:
                    continue  # what is compiled computes again as it likes
                model, loss_fn = model_on(device, compiled)
                pipe = ps.Pipeline(model, loss_fn, schedule, M, topology=Topology(device=torch.device(device)), **options)
                with torch.autocast(device, dtype):
                    pipe.step(inputs, target=target)
                assert any(tensor.abs().sum() > 0 for tensor in wanted.values()), way
                assert_same(on_host(pipe.named_parameters()), wanted)


def overflowing(parameters, step):
    """The third of five steps overflows: the scale is halved then, and doubled after two good ones."""
    for value in parameters if step == 2 else ():
        value.grad.fill_(torch.inf)


SCALES = [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]


def scaled_ways(device):
    """Ways, each with a precision; what is compiled, which takes long, on a GPU only."""
    ways = [(*way, torch.float16, False) for way in WAYS.values()] + [(*WAYS["split"], torch.bfloat16, False)]
    return ways if device == "cpu" else [*ways, (*WAYS["split"], torch.float16, True)]


def rank_scaled(device):
    topology, found = on(device), []
    for schedule, options, dtype, compiled in scaled_ways(device):
        model, loss_fn = model_on(device, compiled)
        scaler, scales = ShardedGradScaler(device, init_scale=2.0**10, growth_interval=2), []
        pipe = ps.Pipeline(model, loss_fn, schedule, M, topology=topology, scaler=scaler, **options)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(5):
            inputs, target = batch("gpt", device, M, seed=step)
            with torch.autocast(device, dtype):
                pipe.step(inputs, target=target)
            overflowing(pipe.parameters() if topology.rank else (), step)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        found.append((scales, {name: tensor.cpu() for name, tensor in pipe.state_dict().items()}))
    return found


def plainly_scaled(device, dtype, compiled):
    """Scales and weights by plain PyTorch."""
    model, loss_fn = model_on(device, compiled)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
    optimizer, scales = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(5):
        pieces = pieces_on(device, seed=step)
        with torch.autocast(device, dtype):
            losses = [loss_fn(model(inputs), target) for inputs, target in pieces]
        backward(losses, pieces, scaler.scale(torch.ones((), device=device)).item())
        overflowing(model.parameters(), step)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, {name.replace("_orig_mod.", ""): tensor.cpu() for name, tensor in model.state_dict().items()}


@pytest.mark.ranks
@pytest.mark.parametrize("device", DEVICES)
def test_the_sharded_scaler_skips_what_plain_pytorchs_skips(device):
    everyone = ps.launch(rank_scaled, 2, device)
    with deterministic():
        plain = {how: plainly_scaled(device, *how) for how in {way[2:] for way in scaled_ways(device)}}
    for number, (_, _, *how) in enumerate(scaled_ways(device)):
        scales, weights = plain[tuple(how)]
        assert all(result[number][0] == scales == SCALES for result in everyone)
        assert_same(merged([result[number][1] for result in everyone]), weights)
