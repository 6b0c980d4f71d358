"""Layers of several stages that talk through a Python object: told on every rank if a forward changes it, and else not."""

import contextvars
import enum
import functools
import os
import queue
import random
import threading
import types
import warnings
import weakref
from array import array

import pytest
import torch
from error_text import NO_ERROR, named_outcome
from reference import accumulate
from runners import cases_under_torchrun, on_ranks
from torch import nn

import penstock as ps
from penstock.guards.reachable_objects import find_shared_objects
from penstock.guards.shared_state import SharedStateCheck

mse = nn.functional.mse_loss
X, Y = torch.randn(2, 8, 4, generator=torch.manual_seed(1))
SCALE = {"scale": 1.0}
CALLS = 0
TABLES = {}


class Layer(nn.Module):
    """Applies `function` to itself and its output. It has `attributes`, which are not registered."""

    def __init__(self, function=lambda layer, hidden: hidden, **attributes):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        vars(self).update(attributes)

    def forward(self, hidden):
        return self.function(self, torch.tanh(self.linear(hidden)))


def magnitude(hidden):
    return 1.0 + hidden.detach().abs().mean().item()


def writer_and_reader(write, read, **attributes):
    """Four layers, of which the first writes, the last reads."""

    def write_and_pass(layer, hidden):
        write(layer, hidden)
        return hidden

    return [Layer(write_and_pass, **attributes), Layer(), Layer(), Layer(read, **attributes)]


# -- what is told


def through_a_dict():
    def write(layer, hidden):
        layer.shared["scale"] = magnitude(hidden)

    return writer_and_reader(write, lambda layer, hidden: hidden * layer.shared["scale"], shared={"scale": 1.0})


def through_a_list_in_a_tuple():
    def write(layer, hidden):
        layer.shared[0][0] = magnitude(hidden)

    return writer_and_reader(write, lambda layer, hidden: hidden * layer.shared[0][0], shared=([1.0],))


class Slots:
    __slots__ = ("scale",)


def through_an_object(shared=None):
    shared = shared or types.SimpleNamespace()
    shared.scale = 1.0

    def write(layer, hidden):
        layer.shared.scale = magnitude(hidden)

    return writer_and_reader(write, lambda layer, hidden: hidden * layer.shared.scale, shared=shared)


def through_a_class():
    return through_an_object(type("State", (), {"scale": 1.0}))


class Stash(nn.Linear):
    values = {}  # noqa: RUF012


class Writes(Stash):
    def forward(self, hidden):
        self.values["scale"] = magnitude(hidden)
        return super().forward(hidden)


class Reads(Stash):
    def forward(self, hidden):
        return super().forward(hidden) * self.values.get("scale", 1.0)


def through_the_class_of_both():
    Stash.values.clear()
    return [Writes(4, 4), Layer(), Layer(), Reads(4, 4)]


def through_a_global():
    SCALE["scale"] = 1.0
    return writer_and_reader(lambda layer, hidden: write_scale(hidden), lambda layer, hidden: hidden * SCALE["scale"])


def write_scale(hidden):
    SCALE["scale"] = magnitude(hidden)


def count_call(layer, hidden):
    global CALLS
    CALLS += 1


def through_a_counter():
    global CALLS
    CALLS = 0
    return writer_and_reader(count_call, lambda layer, hidden: hidden * CALLS)


def leave_output(layer, hidden):
    layer.saved = hidden.detach()


def through_an_activation():
    layers = writer_and_reader(leave_output, lambda layer, hidden: hidden + layer.others[0].saved, saved=torch.zeros(4))
    layers[3].others = [layers[0]]
    return layers


def through_a_weak_reference():
    layers = writer_and_reader(leave_output, lambda layer, hidden: hidden + layer.other().saved, saved=torch.zeros(4))
    layers[3].other = weakref.ref(layers[0])
    return layers


def through_the_model():
    def write(layer, hidden):
        layer.model[0].scale = magnitude(hidden)

    layers = writer_and_reader(write, lambda layer, hidden: hidden * layer.model[0].scale)
    model = nn.Sequential(*layers)
    model.scale, layers[0].model, layers[3].model = 1.0, [model], [model]
    return model


class Store:
    def __init__(self):
        self.output = 0.0

    def keep(self, layer, inputs, output):
        self.output = output.detach()

    def add(self, layer, inputs, output):
        return output + self.output


def through_hooks(keep, add):
    layers = [Layer() for _ in range(4)]
    layers[0].register_forward_hook(keep)
    layers[3].register_forward_hook(add)
    return layers


def through_methods_as_hooks():
    store = Store()
    return through_hooks(store.keep, store.add)


def through_partial_hooks():
    store = Store()
    return through_hooks(functools.partial(Store.keep, store), functools.partial(Store.add, store))


def through_a_closure():
    kept = 0.0

    def keep(layer, inputs, output):
        nonlocal kept
        kept = output.detach()

    return through_hooks(keep, lambda layer, inputs, output: output + kept)


def through_a_module_of_buffers():
    counter = nn.Module()
    counter.register_buffer("count", torch.zeros(()))
    layers = writer_and_reader(
        lambda layer, hidden: layer.counter.count.add_(1), lambda layer, hidden: hidden * layer.counter.count
    )
    layers[0].counter = layers[3].counter = counter
    return layers


def through_a_buffer_of_both():
    layers = writer_and_reader(lambda layer, hidden: layer.count.add_(1), lambda layer, hidden: hidden * layer.count)
    count = torch.zeros(())
    layers[0].register_buffer("count", count)
    layers[3].register_buffer("count", count)
    return layers


def through_a_generator():
    generator = torch.Generator().manual_seed(0)
    return [Layer(lambda layer, hidden: hidden * torch.rand(4, generator=layer.shared), shared=generator) for _ in range(4)]


def through_pythons_generator():
    generator = random.Random(0)
    return [Layer(lambda layer, hidden: hidden * layer.shared.random(), shared=generator) for _ in range(4)]


def through_the_first_of_two_closures():
    scales, others = {"scale": 1.0}, {}

    def write(layer, hidden):
        others.get("scale")
        scales["scale"] = magnitude(hidden)

    return writer_and_reader(write, lambda layer, hidden: hidden * (others or scales)["scale"])


def through_a_context_variable():
    scale = contextvars.ContextVar("scale", default=1.0)

    def write(layer, hidden):
        scale.set(magnitude(hidden))

    return writer_and_reader(write, lambda layer, hidden: hidden * scale.get())


def through_an_array():
    scale = array("d", [1.0])
    return writer_and_reader(
        lambda layer, hidden: scale.__setitem__(0, magnitude(hidden)), lambda layer, hidden: hidden * scale[0]
    )


def through_bytes():
    scale = bytearray(b"1")
    return writer_and_reader(
        lambda layer, hidden: scale.__setitem__(0, int(magnitude(hidden) * 100) % 256), lambda layer, hidden: hidden * scale[0]
    )


def through_a_queue():
    scales = queue.Queue()
    return writer_and_reader(
        lambda layer, hidden: scales.put(magnitude(hidden)),
        lambda layer, hidden: hidden * (1.0 if scales.empty() else scales.get()),
    )


def through_a_function_that_yields():
    def repeat_last():
        scale = 1.0
        while True:
            scale = (yield scale) or scale

    scales = repeat_last()
    next(scales)
    return writer_and_reader(lambda layer, hidden: scales.send(magnitude(hidden)), lambda layer, hidden: hidden * next(scales))


def through_a_cached_function():
    scales = {"scale": 1.0}

    @functools.cache
    def find_scales():
        return scales

    def write(layer, hidden):
        find_scales()["scale"] = magnitude(hidden)

    return writer_and_reader(write, lambda layer, hidden: hidden * find_scales()["scale"])


def through_what_is_local_to_a_thread():
    local = threading.local()
    local.scale = 1.0

    def write(layer, hidden):
        local.scale = magnitude(hidden)

    return writer_and_reader(write, lambda layer, hidden: hidden * local.scale)


def through_an_attribute_of_a_function():
    def write(layer, hidden):
        write.scale = magnitude(hidden)

    return writer_and_reader(write, lambda layer, hidden: hidden * getattr(write, "scale", 1.0))


OTHER_MODULE = types.ModuleType("other_module")


def through_a_variable_of_another_module():
    OTHER_MODULE.scale = 1.0

    def write(layer, hidden):
        OTHER_MODULE.scale = magnitude(hidden)

    return writer_and_reader(write, lambda layer, hidden: hidden * OTHER_MODULE.scale)


def through_functions_of_another_module():
    SCALE["scale"] = 1.0
    OTHER_MODULE.write, OTHER_MODULE.read = write_scale, lambda: SCALE["scale"]
    return writer_and_reader(
        lambda layer, hidden: OTHER_MODULE.write(hidden), lambda layer, hidden: hidden * OTHER_MODULE.read()
    )


def through_the_environment():
    os.environ["PENSTOCK_TEST_SCALE"] = "1.0"
    return writer_and_reader(
        lambda layer, hidden: os.environ.__setitem__("PENSTOCK_TEST_SCALE", str(magnitude(hidden))),
        lambda layer, hidden: hidden * float(os.getenv("PENSTOCK_TEST_SCALE")),
    )


def through_a_variable_of_torch():
    torch.penstock_test_scale = 1.0

    def write(layer, hidden):
        torch.penstock_test_scale = magnitude(hidden)

    return writer_and_reader(write, lambda layer, hidden: hidden * torch.penstock_test_scale)


class Residual:
    last = None


def through_a_tensor_in_a_class():
    """Each layer leaves a tensor there, and adds that of the layer before it."""
    Residual.last = torch.zeros(1)

    def add(layer, hidden):
        hidden = hidden + Residual.last
        Residual.last = hidden.detach()
        return hidden

    return [Layer(add) for _ in range(4)]


def through_a_count_of_all():
    shared = types.SimpleNamespace(count=0)

    def count(layer, hidden):
        layer.shared.count += 1
        return hidden * layer.shared.count

    return [Layer(count, shared=shared) for _ in range(4)]


REFUSED = {  # -> what is told of it
    through_a_dict: "0.shared of stage 0 and 3.shared of stage {last} use one dict, and a forward of stage 0",
    through_a_list_in_a_tuple: "0.shared[0] of stage 0 and 3.shared[0] of stage {last} use one list, and a forward",
    through_an_object: "0.shared of stage 0 and 3.shared of stage {last} use one SimpleNamespace, and a forward",
    lambda: through_an_object(Slots()): "0.shared of stage 0 and 3.shared of stage {last} use one Slots, and a forward",
    through_a_class: "0.shared of stage 0 and 3.shared of stage {last} use one class State, and a forward",
    through_the_class_of_both: "0.values of stage 0 and 3.values of stage {last} use one dict, and a forward",
    through_a_global: "of stage 0 and the global SCALE of 3.function of stage {last} use one dict, and a forward",
    through_a_counter: "use one global variable CALLS, and a forward of stage 0 changes it (CALLS)",
    through_an_activation: "0 of stage 0 and 3.others[0] of stage {last} use one Layer, and a forward of stage 0",
    through_a_weak_reference: "0 of stage 0 and 3.other of stage {last} use one Layer, and a forward of stage 0",
    through_the_model: "0.model[0] of stage 0 and 3.model[0] of stage {last} use one Sequential, and a forward",
    through_methods_as_hooks: "a hook of 0 of stage 0 and a hook of 3 of stage {last} use one Store, and a forward",
    through_partial_hooks: "a hook of 0[0] of stage 0 and a hook of 3[0] of stage {last} use one Store, and a forward",
    through_a_closure: "a closure of a hook of 0 of stage 0 and a closure of a hook of 3 of stage {last} use one variable of",
    through_a_module_of_buffers: "0.counter.count of stage 0 and 3.counter.count of stage {last} use one Tensor, and a",
    through_a_buffer_of_both: "0.count of stage 0 and 3.count of stage {last} use one Tensor, and a forward",
    through_a_generator: "use one Generator, and a forward of stage 0 changes it",
    through_pythons_generator: "use one Random, and a forward of stage 0 changes it",
    through_the_first_of_two_closures: "and a closure of 3.function of stage {last} use one dict, and a forward of stage 0",
    through_an_array: "use one array, and a forward of stage 0 changes it",
    through_bytes: "use one bytearray, and a forward of stage 0 changes it",
    through_a_queue: "use one deque, and a forward of stage 0 changes it ([0]",
    through_a_function_that_yields: "use one generator, and a forward of stage 0 changes it (scale)",
    through_a_cached_function: "use one dict, and a forward of stage 0 changes it ('scale')",
    through_a_context_variable: "use one ContextVar, and a forward of stage 0 changes it (scale)",
    through_what_is_local_to_a_thread: "use one _local, and a forward of stage 0 changes it (scale)",
    through_an_attribute_of_a_function: "use one function write, and a forward of stage 0 changes it (scale)",
    through_a_variable_of_another_module: "use one global variable scale, and a forward of stage 0 changes it (scale)",
    through_functions_of_another_module: "of stage 0 and the global SCALE of 3.function of stage {last} use one dict",
    through_the_environment: "use one environment, and a forward of stage 0 changes it (PENSTOCK_TEST_SCALE)",
    through_a_variable_of_torch: "use one global variable penstock_test_scale, and a forward of stage 0 changes it",
    through_a_tensor_in_a_class: "use one class Residual, and a forward of stage 0 changes it (last)",
    through_a_count_of_all: "use one SimpleNamespace, and a forward of stage 0 changes it (count)",
}


def stages_of(schedule):
    return ps.schedule.build(schedule, ranks=2, microbatches=4).stages


def run(pipe, how):
    if how == "eval":
        return pipe.eval(X, target=Y)[1]
    if how == "list":
        return pipe.step_microbatches(list(X.split(2)), list(Y.split(2)))
    return pipe.step(X, target=Y)


def model_of(make):
    torch.manual_seed(0)
    made = make()
    return made if isinstance(made, nn.Module) else nn.Sequential(*made)


def rank_refusals(forms, schedule, how):
    texts = []
    for form in forms:
        pipe = ps.Pipeline(model_of(list(REFUSED)[form]), mse, schedule, 4)
        for _ in range(2):  # a step that was refused is refused again
            texts.append(named_outcome(run, pipe, how))
        assert all(parameter.grad is None for parameter in pipe.parameters()) or texts[-1] == NO_ERROR
    return texts


SOME = (0, 7, 8, 13, 14)  # a dict, a counter, an activation, a closure, buffers
CASES = [
    ("1f1b", "step", range(len(REFUSED))),
    *[pytest.param("1f1b", how, SOME, marks=pytest.mark.slow) for how in ("eval", "list")],
    *[
        pytest.param(schedule, how, SOME, marks=pytest.mark.slow)
        for schedule in ("gpipe", "zb-h1", "interleaved-1f1b")
        for how in ("step", "eval", "list")
    ],
]


@pytest.mark.ranks
@pytest.mark.parametrize(("schedule", "how", "forms"), CASES)
def test_an_object_that_a_forward_changes_and_another_stage_uses_is_told_on_every_rank(schedule, how, forms):
    first, second = on_ranks(rank_refusals, 2, list(forms), schedule, how)
    assert first == second
    for position, form in enumerate(forms):
        told = [*REFUSED.values()][form].format(last=stages_of(schedule) - 1)
        for text in first[2 * position : 2 * position + 2]:
            assert text.startswith("MismatchError: "), (form, text)
            assert told in text, (told, text)
            assert "return the value with the layer's output, as far as the layer that needs it; if no layer reads it" in text


class CountsCalls(nn.Linear):
    calls = 0  # of the class, until a layer has its own

    def forward(self, hidden):
        self.calls += 1
        return super().forward(hidden)


def rank_counts():
    pipe = ps.Pipeline(nn.Sequential(*[CountsCalls(4, 4) for _ in range(4)]), mse, "1f1b", 4)
    pipe.step(X, target=Y)
    return pipe.gather(lambda: [layer.calls for stage in pipe.stages.values() for layer in stage])


@pytest.mark.ranks
def test_a_counter_works_as_the_error_says():
    assert on_ranks(rank_counts, 2) == [[[4, 4], [4, 4]]] * 2


@pytest.mark.fresh
@pytest.mark.slow
def test_under_torchrun_too(tmp_path):
    cases = [(SOME, schedule, "step") for schedule in ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b")]
    for first, second in cases_under_torchrun(rank_refusals, 2, cases, tmp_path).values():
        assert first == second
        assert all(text.startswith("MismatchError: ") and "of stage 0" in text for text in first)


def rank_reads_on_one_rank():
    def write(layer, hidden):
        layer.shared["scale"] = magnitude(hidden)
        return hidden

    shared = {"scale": 1.0}
    layers = [Layer(write, shared=shared), Layer(), Layer(lambda layer, hidden: hidden * layer.shared["scale"], shared=shared)]
    with pytest.raises(ps.MismatchError, match="but other microbatches run before stage 2 would read it: return the value"):
        ps.Pipeline(nn.Sequential(*layers, Layer()), mse, "interleaved-1f1b", 4).step(X, target=Y)
    return True


@pytest.mark.ranks
def test_two_stages_of_one_rank_do_not_share_values_of_microbatches_either():
    assert on_ranks(rank_reads_on_one_rank, 2) == [True, True]


# -- what is allowed


class Kind(enum.Enum):
    PLAIN = 1


def only_read():
    config = types.SimpleNamespace(width=4, kind=Kind.PLAIN, sizes=[1, 2], device=torch.device("cpu"))
    return [Layer(lambda layer, hidden: hidden * layer.config.width * layer.config.kind.value, config=config) for _ in range(4)]


class LazyTable(dict):
    """Loads what is asked for, as transformers' tables of its models do; some of it cannot be loaded here."""

    def __getitem__(self, name):
        return super().__getitem__(name)[0]

    def keys(self):
        raise ValueError("not all can be loaded")

    items = values = __iter__ = keys


class LazyFunction:
    """Has only what it can load."""

    def __call__(self, hidden, factor):
        return hidden * factor

    def __getattr__(self, name):
        raise ValueError("not all can be loaded")


def tables_that_load_what_is_asked_for():
    tables, function = LazyTable(scale=[2.0], bias=["not here"]), LazyFunction()
    return [
        Layer(lambda layer, hidden: layer.scale(hidden, layer.tables["scale"]), tables=tables, scale=function) for _ in range(4)
    ]


def tables_filled_when_needed():
    TABLES.clear()

    def fill(layer, hidden):
        for tables in (layer.tables, TABLES):
            if (length := hidden.shape[-1]) not in tables:
                tables[length] = torch.arange(length).float().cos()
        return hidden + TABLES[4] + layer.tables[4]

    tables = {}
    return [Layer(fill, tables=tables) for _ in range(4)]


class Rotary(nn.Module):
    """Makes its table anew for a longer input."""

    def __init__(self):
        super().__init__()
        self.length = 0
        self.register_buffer("table", torch.ones(1), persistent=False)

    def forward(self, hidden):
        if hidden.shape[-1] > self.length:
            self.length = hidden.shape[-1]
            self.register_buffer("table", torch.arange(self.length).float().cos(), persistent=False)
        return hidden * self.table


def one_rotary_module():
    rotary = Rotary()
    layers = [Layer(lambda layer, hidden: layer.rotary(hidden)) for _ in range(4)]
    for layer in layers:
        layer.rotary = rotary
    return layers


def state_of_each_layer():
    def count(layer, hidden):
        layer.count += 1
        layer.seen.append(hidden.detach())
        return hidden * layer.count

    return [Layer(count, count=0, seen=[]) for _ in range(4)]


def references_to_the_model():
    layers = [Layer() for _ in range(3)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(4))
    for layer in layers:
        layer.model = [model]
    return model


def tied_weights():
    layers = [Layer() for _ in range(4)]
    layers[3].linear = layers[0].linear
    return layers


ALLOWED = [
    only_read,
    tables_that_load_what_is_asked_for,
    tables_filled_when_needed,
    one_rotary_module,
    state_of_each_layer,
    references_to_the_model,
    tied_weights,
]


def rank_losses(schedule):
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for make in ALLOWED:
            pipe = ps.Pipeline(model_of(make), mse, schedule, 4)
            losses.append(pipe.step(X, target=Y))
            pipe.eval(X, target=Y)
            pipe.step_microbatches(list(X.split(2)), list(Y.split(2)))
    return losses


@pytest.mark.ranks
@pytest.mark.parametrize(
    "schedule", ["1f1b", *[pytest.param(name, marks=pytest.mark.slow) for name in ("gpipe", "zb-h1", "interleaved-1f1b")]]
)
def test_what_is_only_read_and_what_each_rank_makes_alike_is_allowed(schedule):
    losses, _ = on_ranks(rank_losses, 2, schedule)
    for make, loss in zip(ALLOWED, losses, strict=True):
        assert torch.equal(loss, accumulate(model_of(make), mse, (X, Y), 4)), make.__name__


def rank_collects():
    outputs = {}
    layers = [Layer() for _ in range(4)]
    for name, layer in enumerate(layers):
        layer.register_forward_hook(functools.partial(lambda name, *args: outputs.__setitem__(name, args[-1]), name))
    pipe = ps.Pipeline(nn.Sequential(*layers), mse, "1f1b", 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            pipe.step(X, target=Y)
            pipe.eval(X)
    return [str(warning.message) for warning in caught if warning.category is RuntimeWarning], sorted(outputs)


@pytest.mark.ranks
def test_outputs_that_hooks_collect_in_one_dict_are_those_of_a_ranks_own_stages_which_is_a_warning():
    (texts, first), (no_texts, last) = on_ranks(rank_collects, 2)
    assert (first, last, no_texts) == ([0, 1], [2, 3], [])
    (text,) = texts
    assert "use one dict, in which the forwards of each stage leave values of their own (0, 1)" in text
    assert text.endswith("pipe.gather(..) gets them")


def rank_loss_refers():
    layers = [Layer(), Layer(), Layer(), Layer()]
    layers[0].function = lambda layer, hidden: (leave_output(layer, hidden), hidden)[1]
    first = layers[0]
    pipe = ps.Pipeline(nn.Sequential(*layers), lambda output, target: mse(output, target) * first.linear.in_features, "1f1b", 4)
    pipe.step(X, target=Y)
    reads = ps.Pipeline(nn.Sequential(*layers), lambda output, target: mse(output, target) + first.saved.mean() * 0, "1f1b", 4)
    first.saved = torch.zeros(4)
    with pytest.raises(
        ps.MismatchError, match=r"^loss_fn reads saved, which the forward of Layer 0 sets, but that runs on ano"
    ):
        reads.step(X, target=Y)
    return pipe.step_count


@pytest.mark.ranks
def test_a_loss_may_refer_to_a_layer_of_another_stage_but_not_read_what_its_forward_sets():
    assert on_ranks(rank_loss_refers, 2) == [1, 1]


# -- how much it looks


def rank_comparisons():
    counted = []
    shared = types.SimpleNamespace(width=4)
    pipe = ps.Pipeline(nn.Sequential(*[Layer(shared=shared) for _ in range(4)]), mse, "1f1b", 4)
    check = next(observer for observer in pipe._observers.all if isinstance(observer, SharedStateCheck))
    entries = check._entries
    check._entries = lambda *args: counted.append(args) or entries(*args)
    for act in (lambda: pipe.step(X, target=Y), lambda: pipe.eval(X, target=Y)) * 2:
        counted.clear()
        act()
        yield len(counted)


def rank_counts_comparisons():
    return list(rank_comparisons())


@pytest.mark.ranks
def test_contents_are_compared_in_the_first_step_and_the_first_evaluation_only():
    for first_step, first_evaluation, *later in on_ranks(rank_counts_comparisons, 2):
        assert first_step > 0
        assert first_evaluation > 0
        assert later == [0, 0]


def test_a_class_of_one_stage_is_looked_at_if_a_rank_has_not_all_stages():
    stages = {0: Writes(4, 4)}
    assert not find_shared_objects(stages, None, 1)
    assert any(found.label.endswith(".Stash") for found in find_shared_objects(stages, None, 2))


def rank_own_stage():
    stage = [Writes(4, 4), Reads(4, 4)][ps.comms.init_distributed().rank]
    pipe = ps.Pipeline({ps.comms.init_distributed().rank: stage}, mse, "1f1b", 4)
    with pytest.raises(ps.MismatchError, match=r"use one class Stash, and a forward|use one dict, and a forward"):
        pipe.step(X, target=Y)
    return True


@pytest.mark.ranks
def test_a_class_that_a_forward_changes_is_told_where_each_rank_gives_its_own_stages():
    assert on_ranks(rank_own_stage, 2) == [True, True]


# -- gradients


def hooks_that_count():
    norms = types.SimpleNamespace(count=0)
    layers = [Layer() for _ in range(4)]
    for layer in layers:
        layer.linear.weight.register_hook(lambda gradient: setattr(norms, "count", norms.count + 1))
    return layers


def hooks_of_modules_that_sum():
    norms = {"sum": 0.0}
    layers = [Layer() for _ in range(4)]
    for layer in layers:
        layer.register_full_backward_hook(
            lambda layer, *_: norms.__setitem__("sum", norms["sum"] + layer.linear.weight[0, 0].item())
        )
    return layers


def hooks_that_leave_the_last_gradient():
    last = {}
    layers = [Layer() for _ in range(4)]
    for layer in layers:
        layer.linear.weight.register_post_accumulate_grad_hook(lambda weight: last.__setitem__("gradient", weight.grad))
    return layers


GRADIENT_HOOKS = {
    hooks_that_count: "use one SimpleNamespace, and a backward of stage 0 changes it (count)",
    hooks_of_modules_that_sum: "use one dict, and a backward of stage 0 changes it ('sum')",
    hooks_that_leave_the_last_gradient: "use one dict, and a backward of stage 0 changes it ('gradient')",
}


def hooks_that_collect():
    norms = {}
    layers = [Layer() for _ in range(4)]
    for name, layer in enumerate(layers):
        layer.linear.weight.register_hook(functools.partial(lambda name, grad: norms.__setitem__(name, grad.norm()), name))
    return layers


def rank_gradient_hooks(schedule):
    texts = []
    for make in (*GRADIENT_HOOKS, hooks_that_collect):
        pipe = ps.Pipeline(model_of(make), mse, schedule, 4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                pipe.step(X, target=Y)
                texts.append([str(warning.message) for warning in caught if warning.category is RuntimeWarning])
            except ps.MismatchError as error:
                texts.append(str(error))
    return texts


@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.slow)])
def test_gradient_hooks_of_several_stages_that_change_one_object_are_told(schedule):
    first, second = on_ranks(rank_gradient_hooks, 2, schedule)
    assert first[:-1] == second[:-1]
    for text, expected in zip(first, GRADIENT_HOOKS.values(), strict=False):
        assert expected in text
        assert text.endswith("self.norms.append(..), and get them with pipe.gather(lambda: [..])")
    (text,) = first[-1]  # of hooks that collect, each under a name of its own
    assert "use one dict, in which the backwards of each stage leave values of their own (1, 0)" in text
