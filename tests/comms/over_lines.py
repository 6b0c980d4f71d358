"""Pipelines over lines of some kind between two ranks: what their steps come to is what they come to in one process."""

import torch
from reference import accumulate, assert_same, data, gradients, make, merged

import penstock as ps

NAMES = ("1f1b", "zb-v")
M = 4
BATCHES = [data("gpt", 9, seed) for seed in (3, 4)]


def steps():
    """Of each schedule two steps, and one more after an evaluation in inference mode: losses, gradients, pipe.lines()."""
    found = {}
    for name in NAMES:
        model, loss_fn = make("gpt")
        pipe = ps.Pipeline(model, loss_fn, name, M, seed=None)
        losses = [pipe.step(inputs, target=target) for inputs, target in BATCHES]
        with torch.inference_mode():
            losses.append(pipe.eval(BATCHES[0][0], target=BATCHES[0][1])[1])
        losses.append(pipe.step(BATCHES[1][0], target=BATCHES[1][1]))
        found[name] = losses, gradients(pipe.named_parameters()), pipe.lines()
    return found


def assert_right(everyone, way):
    """That all ranks' `steps` have the bits of one process, and were carried in this way."""
    model, loss_fn = make("gpt")
    first, second, _ = (accumulate(model, loss_fn, batch, M) for batch in (*BATCHES, BATCHES[1]))
    for name in NAMES:
        assert all(each[name][0] == [first, second, first, second] for each in everyone)
        assert_same(merged([each[name][1] for each in everyone]), gradients(model.named_parameters()))
        assert all(each[name][2] == {"0-1": way, "1-0": way} for each in everyone)
