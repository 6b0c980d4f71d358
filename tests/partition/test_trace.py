"""A model that is cut by names is traced without data, where each value is taken for a tensor: what else may values be?"""

import gc
import pickle
import re
from copy import deepcopy
from weakref import ref

import pytest
import torch
from reference import accumulate, assert_as_one_process, gradients
from torch import nn

import penstock as ps
from penstock.partition import run, split, trace

X = torch.linspace(-1, 1, 16).reshape(4, 4)


class TakesMask(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.first, self.last = function, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs, mask):
        return self.last(self.function(self.first(inputs), mask))


ASKS_FOR_NONE = {
    "is None": lambda hidden, mask: hidden * 2 if mask is None else hidden,
    "is not None": lambda hidden, mask: hidden if mask is None else hidden * mask,
    "a default": lambda hidden, mask: hidden * (1 if mask is None else mask),
}


class TakesNone(nn.Module):
    def forward(self, hidden, values, factor=None):
        values = values["mask"] if isinstance(values, dict) else values
        hidden = hidden if factor is None else hidden * factor
        return hidden * 3 if values is None else hidden * values


class TakesBatch(nn.Module):
    """Its arguments are a dict, a tuple and others, one of which may be None."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.first, self.layer, self.last = function, nn.Linear(4, 4), TakesNone(), nn.Linear(4, 4)

    def forward(self, batch, pair, mask, bias):
        _, scale = pair
        hidden = self.first(batch["x"])
        return self.last(self.function(self.layer, hidden, batch, scale, mask, bias))


def arguments(x, *nones):
    batch, pair = {"x": x, "mask": None if "batch" in nones else x + 1}, (x, None if "pair" in nones else x + 2)
    return batch, pair, None if "mask" in nones else x + 3, None if "bias" in nones else x + 4


ASKS_FOR_NONE_INSIDE = {
    "an item of a dict": (
        lambda layer, h, batch, *_: h * 2 if batch["mask"] is None else h,
        ["batch"],
        "batch['mask'] is None",
    ),
    "get of a dict": (
        lambda layer, h, batch, *_: h if batch.get("mask") is not None else -h,
        ["batch"],
        "batch['mask'] is None",
    ),
    "an item of a tuple": (lambda layer, h, batch, scale, *_: h * 2 if scale is None else h, ["pair"], "pair[1] is None"),
    "two together": (
        lambda layer, h, batch, scale, mask, bias: h * 2 if mask is None and bias is None else h,
        ["mask", "bias"],
        "mask is None, bias is None",
    ),
    "two in different arguments": (
        lambda layer, h, batch, scale, mask, bias: h * 2 if batch["mask"] is None and mask is None else h,
        ["batch", "mask"],
        "batch['mask'] is None, mask is None",
    ),
}


HARMLESS_NONES = {
    "an item of a dict that a layer gets": (lambda layer, h, batch, *_: layer(h, batch["mask"]), ["batch"]),
    "a dict and a tuple that a layer gets": (lambda layer, h, batch, scale, *_: layer(h, batch, scale), ["batch", "pair"]),
    "two that matter only apart": (
        lambda layer, h, batch, scale, mask, bias: h * 2 if mask is not None and bias is None else h,
        ["mask", "bias"],
    ),
    "a dict that is changed": (lambda layer, h, batch, *_: h * batch.pop("x"), ["batch"]),
}


def test_stages_do_not_keep_the_model_and_say_so_where_a_none_inside_of_an_argument_needs_it():
    model = TakesBatch(HARMLESS_NONES["an item of a dict that a layer gets"][0])
    stages, model_reference = split(model, 2, cuts=["last"]), ref(model)
    del model
    gc.collect()
    assert model_reference() is None
    with pytest.raises(
        ps.MismatchError, match=r"^batch\['mask'\] is None, and whether the forward does something else then is"
    ):
        run(stages, *arguments(X, "batch"))


def takes_mask(hidden, mask):
    return hidden


def test_stages_that_were_pickled_take_none_for_an_argument_that_the_forward_only_hands_on():
    stages = pickle.loads(pickle.dumps(split(TakesMask(takes_mask), 2, cuts=["last"])))
    assert torch.equal(run(stages, X, None), run(stages, X, X))


class RefusesTrain(TakesBatch):
    calls = 0

    def train(self, mode=True):
        RefusesTrain.calls += 1
        return super().train(mode)


def test_a_forward_traced_in_a_step_leaves_modes_alone_and_calls_no_train():
    model = RefusesTrain(HARMLESS_NONES["an item of a dict that a layer gets"][0])
    stages = split(model, 2, cuts=["last"])
    model.layer.training, calls = False, RefusesTrain.calls
    run(stages, *arguments(X, "batch"))
    assert (RefusesTrain.calls, model.training, model.layer.training) == (calls, True, False)


LAUNCHED = [
    ASKS_FOR_NONE_INSIDE["two in different arguments"],
    HARMLESS_NONES["a dict and a tuple that a layer gets"],
]


def steps_on_two_ranks():
    results = []
    for function, nones, *_ in LAUNCHED:
        pipe = ps.Pipeline(TakesBatch(function), nn.functional.mse_loss, "1f1b", 2, cuts=["last"])
        try:
            loss = pipe.step(*arguments(X, *nones), target=X)
        except ps.PenstockError as error:
            loss = str(error)
        results.append((loss, gradients(pipe.named_parameters()), pipe.step(*arguments(X), target=X)))
    return results


def in_one_process(function, *nones):
    model = TakesBatch(function)
    loss = accumulate(lambda x: model(*arguments(x, *nones)), nn.functional.mse_loss, (X, X), 2)
    return loss, gradients(model.named_parameters())


def test_a_step_with_a_none_has_the_bits_of_one_process_or_is_refused_on_all_ranks_and_the_next_one_works():
    by_rank = ps.launch(steps_on_two_ranks, 2)
    for (function, nones, *text), *results in zip(LAUNCHED, *by_rank, strict=True):
        losses, parts, next_losses = zip(*results, strict=True)
        assert all(torch.equal(loss, in_one_process(function)[0]) for loss in next_losses)
        if text:
            start = f"rank 0, stage 0, action 0F0, microbatch 0: {text[0]}, and the model was cut for another value"
            assert [loss[: len(start)] for loss in losses] == [start] * 2
        else:
            assert_as_one_process([*zip(losses, parts, strict=True)], in_one_process(function, *nones))


class GivesTwo(nn.Linear):
    """Returns a second value, too, if its first row begins with a negative number."""

    def forward(self, x):
        return super().forward(x), (x * 2 if x[0, 0] < 0 else None)


class AsksBetweenLayers(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.first, self.layer, self.last = function, GivesTwo(4, 4), TakesNone(), nn.Linear(4, 4)

    def forward(self, x, option):
        hidden, aux = self.first(x)
        return self.last(self.function(self.layer, hidden, aux, option))


ASKS_WHAT_VALUES_ARE = {
    "a layer's None": (lambda layer, h, aux, _: h * 2 if aux is None else h + aux, -X, 1.0, "first(..)[1] is None"),
    "a layer's None that is not used": (lambda layer, h, aux, _: h if aux is not None else -h, -X, 1.0, "first(..)[1] is None"),
    "a layer's None that is added": (lambda layer, h, aux, _: h if aux is None else h + aux, -X, 1.0, "first(..)[1] is None"),
    "True": (lambda layer, h, aux, option: h * 2 if option is True else h, X, True, "option is True"),
    "False": (lambda layer, h, aux, option: h * 2 if option is False else h, X, False, "option is False"),
    "a flag's class": (lambda layer, h, aux, option: h * 2 if type(option) is bool else h, X, True, "option is True"),
    "a text": (lambda layer, h, aux, option: {"double": h * 2}.get(option, h), X, "double", "option is 'double'"),
    "a number's class": (lambda layer, h, aux, n: h * n if isinstance(n, float) else h, X, 2.0, "option is of class float"),
    "a tuple": (lambda layer, h, aux, option: h if isinstance(option, tuple) else -h, X, (X, X), "option is of class tuple"),
    "a dtype": (
        lambda layer, h, aux, _: h * 2 if h.dtype is torch.float32 else h,
        X,
        1.0,
        "first(..)[0].dtype is torch.float32",
    ),
    "a missing attribute": (
        lambda layer, h, aux, _: h * getattr(h, "scale", 3),
        X,
        1.0,
        "first(..)[0].scale is missing",
    ),
}


HARMLESS_QUESTIONS = {
    "a layer gets the None": (lambda layer, h, aux, _: layer(h, aux), -X, 1.0),
    "is it a tensor": (lambda layer, h, aux, option: h * option if isinstance(option, torch.Tensor) else h, X, X),
    "torch.is_tensor": (lambda layer, h, aux, option: h * option if torch.is_tensor(option) else h, X, X),
    "another class": (lambda layer, h, aux, option: h[0] if isinstance(h, tuple) else h, X, 1.0),
    "an attribute that is there": (lambda layer, h, aux, option: h * 2 if hasattr(h, "dtype") else h, X, 1.0),
    "a method": (lambda layer, h, aux, option: h.view(h.shape) if hasattr(h, "view") else h, X, 1.0),
    "a graph": (lambda layer, h, aux, option: h * 2 if h.grad_fn is not None else h * 3, X, 1.0),
    "a dtype for another": (lambda layer, h, aux, option: h + option.to(h.dtype), X, X.double()),
    "sizes": (lambda layer, h, aux, option: h.reshape(h.shape[0], -1) * (h.size(1) + option), X, 1.5),
    "a flag that multiplies": (lambda layer, h, aux, option: h * option + (option + 1), X, True),
    "a number that a layer gets": (lambda layer, h, aux, option: layer(h, aux, option), X, 3.0),
}


REFUSED = {  # a model and its question, a call that it takes, one that it refuses, what is told
    **{f"a mask, {what}": (TakesMask, ask, (X, X + 1), (X, None), "mask is None") for what, ask in ASKS_FOR_NONE.items()},
    **{
        what: (TakesBatch, ask, arguments(X), arguments(X, *nones), text)
        for what, (ask, nones, text) in ASKS_FOR_NONE_INSIDE.items()
    },
    **{
        what: (AsksBetweenLayers, ask, None, (x, option), text) for what, (ask, x, option, text) in ASKS_WHAT_VALUES_ARE.items()
    },
}
TAKEN = {
    "a mask that is only handed on": (TakesMask, lambda hidden, mask: hidden, (X, None)),
    **{what: (TakesBatch, ask, arguments(X, *nones)) for what, (ask, nones) in HARMLESS_NONES.items()},
    **{what: (AsksBetweenLayers, ask, (x, option)) for what, (ask, x, option) in HARMLESS_QUESTIONS.items()},
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_cut_by_names_refuses_values_of_which_its_forward_asks_what_they_are(what):
    kind, ask, taken, refused, text = REFUSED[what]
    model = kind(ask)
    stages = split(model, 2, cuts=["last"])
    if taken:
        assert torch.equal(run(stages, *taken), model(*taken))
    for _ in range(2):
        with pytest.raises(ps.MismatchError, match=rf"^{re.escape(text)}, and the model was cut for another value, for which"):
            run(stages, *refused)


@pytest.mark.parametrize("what", TAKEN)
def test_a_model_cut_by_names_takes_values_for_which_its_forward_does_the_same(what):
    kind, ask, given = TAKEN[what]
    model = kind(ask)
    stages = split(model, 2, cuts=["last"])
    for _ in range(2):
        assert torch.equal(run(stages, *deepcopy(given)), model(*deepcopy(given)))  # one forward changes what it is given


def test_kinds_of_values_that_were_seen_are_not_traced_again(monkeypatch):
    traces, model = [], AsksBetweenLayers(lambda layer, h, aux, option: layer(h, aux) * option)
    original = trace._trace
    monkeypatch.setattr(trace, "_trace", lambda *args: traces.append(0) or original(*args))
    stages = split(model, 2, cuts=["last"])
    counts = []
    for x, option in [(X, 1.0), (-X, 2.0), (X, 3.0), (-X, 4.0)]:
        run(stages, x, option)
        counts.append(len(traces))
    assert counts[0] < counts[1] == counts[2] == counts[3]


def test_an_attribute_that_is_set_on_a_value_between_layers_is_refused():
    def tags(layer, hidden, aux, option):
        hidden.scale = 3
        return hidden

    with pytest.raises(ps.MismatchError, match=r"^the forward of AsksBetweenLayers sets \.scale of a value between its layers"):
        split(AsksBetweenLayers(tags), 2, cuts=["last"])
