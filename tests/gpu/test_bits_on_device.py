"""Loss and gradients on a GPU: plain PyTorch's bits, for every schedule, on one rank and on several that share the GPU."""

import pytest
from device_models import DEVICES, batch, made, on, on_host, plain
from reference import assert_as_one_process

import penstock as ps

SOME = ["1f1b", "zb-h1", "zb-v", "interleaved-zb"]  # on the CPU, where all of them are tested elsewhere


def rank_steps(device, kinds, names, microbatches):
    """Two steps with each schedule."""
    topology, found = on(device), {}
    for kind in kinds:
        for name in names:
            model, loss_fn = made(kind, device)
            pipe = ps.Pipeline(model, loss_fn, name, microbatches, topology=topology, seed=None)
            batches = [batch(kind, device, microbatches, seed) for seed in (3, 4)]
            losses = [pipe.step(inputs, target=target).item() for inputs, target in batches]
            found[kind, name] = losses, on_host(pipe.named_parameters())
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.gpu)])
def test_every_schedule_has_the_loss_and_the_gradients_of_plain_pytorch(device, ranks):
    if ranks == 4 and device == "cpu":
        pytest.skip("four ranks are tested elsewhere on the CPU")
    names = ps.schedule.names() if device == "cuda" else SOME
    everyone = ps.launch(rank_steps, ranks, device, ["mlp", "gpt"], names, 2 * ranks)
    for kind in ("mlp", "gpt"):
        expected = plain(kind, device, 2 * ranks)
        for name in names:
            assert_as_one_process([result[kind, name] for result in everyone], expected)
