"""Ordinary mistakes: each does what one would expect, or is told in one sentence that says what to do instead."""

import copy
import io
import os
import pickle
import re

import numpy
import pytest
import torch
from models import LayerListNet, toy
from runners import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpointed
from torch.utils.data import DataLoader

import penstock as ps
from penstock import checkpoint
from penstock.comms import topology

pytestmark = pytest.mark.ranks

X = torch.ones(4, 4)
mse = nn.functional.mse_loss


def layers():
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(4)]


def pipe(model=None, loss_fn=mse, schedule="1f1b", microbatches=2, **options):
    return ps.Pipeline(model or nn.Sequential(*layers()), loss_fn, schedule, microbatches, **options)


def rank():
    return ps.comms.init_distributed().rank


def detached_linear():
    return toy(lambda self, x: self.layer(x).detach(), layer=nn.Linear(4, 4))


def reentrant_linear():
    return toy(lambda self, x: checkpointed(self.layer, x, use_reentrant=True), layer=nn.Linear(4, 4))


def inferring():
    with torch.inference_mode():
        pipe().step(X, target=X)


# What is refused: a name -> what is done, what is told.
REFUSED = {
    "Pipeline(loss=..)": (
        lambda: pipe(loss=mse),
        "a Pipeline has no argument loss (did you mean loss_fn?), and the schedule 1f1b takes stages_per_rank",
    ),
    "Pipeline(schedule=table, group_size=2)": (
        lambda: pipe(schedule=ps.schedule.build("interleaved-1f1b", 2, 4), group_size=2),
        "a Pipeline has no argument group_size, and the table of interleaved-1f1b takes no options",
    ),
    "loss.backward()": (
        lambda: pipe().step(X, target=X).backward(),
        "no backward left to do: step() does forward and backward",
    ),
    "pipe(x)": (lambda: pipe()(X), "a pipeline is not called: pipe.step(inputs, target=..) trains"),
    "pipe.forward(x)": (lambda: pipe().forward(X), "a Pipeline has no forward: pipe.step(inputs, target=..) trains"),
    "pipe.eval()": (lambda: pipe().eval(), "given no inputs: call pipe.eval(inputs); it puts the modules into evaluation mode"),
    "pipe.step()": (
        lambda: pipe().step(target=X),
        "rank 0: the first stage's rank was given no inputs: call pipe.step(inputs, tar",
    ),
    "pipe.step(x, y)": (lambda: pipe().step(X, X), "target=.."),
    "pipe.to('cuda')": (lambda: pipe().to("cuda"), "a Pipeline has no to: its stages are on pipe.topology.device, which"),
    "pipe.cuda()": (lambda: pipe().cuda(), "a Pipeline has no cuda: its stages are on pipe.topology.device"),
    "pipe.half()": (
        lambda: pipe().half(),
        "a Pipeline has no half: give it a model of that dtype, or call step() under torch.auto",
    ),
    "pipe.modules()": (
        lambda: pipe().modules(),
        "a Pipeline has no modules: its modules on this rank are pipe.stages.values()",
    ),
    "pipe.stpe()": (lambda: pipe().stpe(X), "a Pipeline has no stpe"),
    "pipe.loss_fn = ..": (
        lambda: setattr(pipe(), "loss_fn", mse),
        "a Pipeline's loss_fn cannot be set once it is built: pipe.rebuild(loss_fn=..)",
    ),
    "pipe.schedule = ..": (
        lambda: setattr(pipe(), "schedule", "gpipe"),
        "a Pipeline's schedule cannot be set once it is built: pipe.rebuild(schedule=..)",
    ),
    "pipe.microbatch = 2": (
        lambda: setattr(pipe(), "microbatch", 2),
        "a Pipeline's microbatch (did you mean microbatches?) cannot be set once it is built: pipe.rebuild(microbatches=..)",
    ),
    "pipe.group_size = 2": (
        lambda: setattr(pipe(), "group_size", 2),
        "a Pipeline's group_size cannot be set once it is built: pipe.rebuild(group_size=..)",
    ),
    "LazyLinear": (
        lambda: pipe(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))),
        "0.weight has no shape yet: run one batch through the model before, `model(inputs)`",
    ),
    "torch.save(pipe)": (
        lambda: torch.save(pipe(), io.BytesIO()),
        "not copied or pickled, it is connected to other ranks: save it with",
    ),
    "pickle": (lambda: pickle.dumps(pipe()), "a pipeline is not copied or pickled"),
    "deepcopy": (lambda: copy.deepcopy(pipe()), "a pipeline is not copied or pickled"),
    "AveragedModel": (
        lambda: torch.optim.swa_utils.AveragedModel(pipe()),
        "average its weights over pipe.parameters(), on each rank (docs/howto/validate.md)",
    ),
    "a detached loss": (
        lambda: pipe(loss_fn=lambda output, target: mse(output, target).detach()).step(X, target=X),
        "rank 1, stage 1, action 1F0, microbatch 0: ValueError: loss_fn returned a loss without a graph",
    ),
    "a detached output": (
        lambda: pipe([nn.Linear(4, 4), detached_linear()]).step(X, target=X),
        "rank 1, stage 1, action 1F0, microbatch 0: ValueError: the model's output has no graph, though layer.weight of",
    ),
    "a detached output of a stage without parameters": (
        lambda: pipe([nn.Linear(4, 4), toy(lambda self, x: x.argmax(-1).float())]).step(X, target=X[:, 0]),
        "1F0, microbatch 0: ValueError: the model's output has no graph, though what the last stage receives has one, so",
    ),
    "checkpoints that nothing reaches": (
        lambda: pipe([reentrant_linear(), reentrant_linear()]).step(X, target=X),
        "or use torch.utils.checkpoint with use_reentrant=False",
    ),
    "an optimizer in a hook of the backward": (
        lambda: optimizes_in_the_backward().step(X, target=X),
        "In a pipeline other microbatches run between a microbatch's forward and its backward, so no forward and no hook",
    ),
    "a loss's class": (lambda: pipe(loss_fn=nn.MSELoss), "loss_fn is a function or a module, not the class MSELoss: make one,"),
    "a loss that learns": (
        lambda: pipe(loss_fn=nn.Sequential(nn.Linear(2, 2))),
        "loss_fn has 2 trained parameters that the model has not (0.weight, 0.bias): have its last layer own them",
    ),
    "a loss's name": (lambda: pipe(loss_fn="mse"), "loss_fn is a function or a module, not a str"),
    "a model's class": (
        lambda: pipe(LayerListNet),
        "for each stage, or {stage: module}, not the class LayerListNet",
    ),
    "a list of functions": (
        lambda: pipe([torch.tanh] * 2),
        "a list with one for each stage, or {stage: module}, not a builtin_function_or_method",
    ),
    "no schedule": (
        lambda: pipe(schedule=None),
        "the schedule is a name, a Schedule, a CSV file's path or a function, not None",
    ),
    "a mesh of numbers": (
        lambda: pipe(mesh=(2, 1)),
        "mesh= takes a DeviceMesh, for instance of ps.comms.init_mesh(pp=2, dp=2)",
    ),
    "numbers as cuts": (lambda: pipe(LayerListNet(*layers()), cuts=[2]), "cannot cut before 2: LayerListNet has"),
    "keywords as a list": (
        lambda: pipe(LayerListNet(*layers()), example_kwargs=[X]),
        "example_kwargs are a dict of the forward's keywords, got list",
    ),
    "inference_mode": (inferring, "step() trains, which torch.inference_mode() rules out"),
    "recompute=True": (lambda: pipe(recompute=True), "recompute=True: use 'stage', 'block' or None"),
    "scaler=True": (lambda: pipe(scaler=True), "scaler is a GradScaler or None, not a bool"),
    "cuts=2": (lambda: pipe(cuts=2), "cuts are names of submodules, where each stage but the first begins, got 2"),
    "an example that does not fit": (
        lambda: pipe(example_args=(torch.ones(4, 5),)),
        "mat1 and mat2 shapes cannot be multiplied (4x5 and 4x4)): give a microbatch that it takes",
    ),
    "a sparse batch": (
        lambda: pipe().step(X.to_sparse(), target=X),
        "has a torch.sparse_coo tensor, which is not split into microbatches: give dense tensors",
    ),
    "a sparse target": (lambda: pipe().step(X, target=X.to_sparse()), "the target has a torch.sparse_coo tensor"),
    "a batch without values": (lambda: pipe().step(X.to("meta"), target=X), "the batch has a meta tensor"),
    "a mesh without a number": (lambda: ps.comms.init_mesh(dp=None), "the mesh's axis dp cannot have None ranks"),
    "an extra as scheduler": (
        lambda: checkpoint.save("runs", pipe(), None, {"epoch": 1}),
        "save() takes something with a state_dict as scheduler, not a dict",
    ),
    "a number as extra": (lambda: checkpoint.save("runs", pipe(), extra=5), "save() takes a dict as extra, not a int"),
    "keep=None": (lambda: checkpoint.save("runs", pipe(), keep=None), "keep=None would keep no checkpoint: use a whole number"),
    "losses=True": (lambda: pipe().step(X, target=X, losses=True), "step(.., losses=[]) fills a list, and cannot fill True"),
    "scale of the model": (lambda: pipe().step(X, scale=torch.ones(2)), "`scale` of the model is given by its position"),
    "scale of text": (lambda: pipe().step(X, target=X, scale="half"), "step() cannot scale gradients by 'half'"),
}


# What is done: a name -> what does it, what comes of it on each rank.
def clips_by_the_largest():
    piped = pipe()
    piped.step(X, target=X)
    return piped.clip_grad_norm_(1e9, "inf").item() == piped.clip_grad_norm_(1e9, float("inf")).item() > 0


def counts_with_numpys_numbers():
    piped = pipe()
    piped.step_count = numpy.int64(3)
    return piped.step(X, target=X).item() > 0 and list(piped.sampler(X, seed=numpy.int64(2))) == list(piped.sampler(X, seed=2))


def trains_and_evaluates():
    modes, piped = [], pipe()
    for mode in (False, True):
        piped.train(mode).eval(X)
        modes += [module.training for module in piped.stages.values()]
    return modes


def lets_go_of_gradients():
    piped = pipe()
    piped.step(X, target=X)
    piped.zero_grad()
    return [parameter.grad for parameter in piped.parameters()]


def saves_the_loss():
    file, loss = io.BytesIO(), pipe().step(X, target=X)
    torch.save({"loss": loss}, file)
    file.seek(0)
    return [
        torch.equal(value, loss) for value in (torch.load(file)["loss"], copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)))
    ]


def traces_a_tensor():
    return pipe(LayerListNet(*layers()), example_args=X).step(X, target=X).item() > 0


def cuts_at_one_name():
    return pipe(LayerListNet(*layers()), cuts="layers.2").step(X, target=X).item() > 0


def takes_a_list_of_modules():
    return pipe(nn.ModuleList(layers()[:2])).step(X, target=X).item() > 0


def frozen(*modules):
    for module in modules:
        module.requires_grad_(False)
    return list(modules)


def evaluates_a_frozen_model():
    return pipe(frozen(*[nn.Linear(4, 4) for _ in range(2)])).step(X, target=X).item() > 0


def optimizes_nothing(folder):
    """A rank without parameters, one whose parameters are frozen, and a checkpoint of each, taken up by other cuts."""
    losses = []
    for number, make in enumerate((lambda: [nn.Tanh(), nn.Linear(4, 4)], lambda: [*frozen(nn.Linear(4, 4)), nn.Linear(4, 4)])):
        torch.manual_seed(0)
        piped = pipe(make())
        optimizer = torch.optim.Adam([parameter for parameter in piped.parameters() if parameter.requires_grad], lr=0.1)
        losses += [_train(piped, optimizer) for _ in range(2)]
        checkpoint.save(f"{folder}/{number}", piped, optimizer)
        again = pipe(make())
        other = torch.optim.Adam([parameter for parameter in again.parameters() if parameter.requires_grad], lr=0.1)
        checkpoint.resume(f"{folder}/{number}", again, other)
        losses.append(_train(again, other) == _train(piped, optimizer))
    return losses[0] > losses[1], losses[2], losses[3] > losses[4], losses[5]


def takes_attributes_that_are_no_options():
    piped = pipe()
    piped.step_count, piped.run_name, piped.losses = 7, "a", [1.0]
    piped._note = 1
    return piped.step_count, piped.run_name, piped.losses, piped._note


def _train(value, optimizer):
    loss = value.step(X, target=X).item()
    value.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


DONE = {
    trains_and_evaluates: [False, True],
    lets_go_of_gradients: [None] * 4,
    saves_the_loss: [True] * 3,
    traces_a_tensor: True,
    cuts_at_one_name: True,
    takes_a_list_of_modules: True,
    evaluates_a_frozen_model: True,
    clips_by_the_largest: True,
    counts_with_numpys_numbers: True,
    takes_attributes_that_are_no_options: (7, "a", [1.0], 1),
}


def optimizes_in_the_backward():
    piped = pipe()
    for parameter in piped.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    return piped


def rank_mistaken(folder):
    results = {}
    for name, (act, _) in REFUSED.items():
        try:
            results[name] = f"nothing, but {act()}"
        except Exception as error:
            results[name] = str(error)
    done = {act.__name__: act() for act in DONE}
    return results, {**done, "optimizes_nothing": optimizes_nothing(folder)}


@pytest.fixture(scope="module")
def everyone(tmp_path_factory):
    return on_ranks(rank_mistaken, 2, str(tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_told_in_a_sentence_on_every_rank(everyone, name):
    for result, _ in everyone:
        assert REFUSED[name][1] in result[name]
        assert "\n" not in result[name]


@pytest.mark.parametrize("act", DONE)
def test_what_one_would_expect_is_done(everyone, act):
    assert [done[act.__name__] for _, done in everyone] == [DONE[act]] * 2


class Branch(LayerListNet):
    def forward(self, hidden):
        return super().forward(hidden) if hidden.sum() > 0 else hidden


def test_an_export_that_fails_prints_nothing_beside_its_error(capfd):
    with pytest.raises(ps.MismatchError, match="cannot export the forward of Branch"):
        ps.partition.split(Branch(*layers()), 2, example_args=X)
    with pytest.raises(ps.MismatchError, match="cannot export the forward of LayerListNet"):
        ps.partition.split(LayerListNet(*layers()), 2, example_args=torch.ones(4, 5))
    assert capfd.readouterr() == ("", "")


def test_a_rank_with_nothing_to_train_has_an_optimizer_and_a_checkpoint_too(everyone):
    assert [done["optimizes_nothing"] for _, done in everyone] == [(True,) * 4] * 2


def rank_nests_another_pipeline():
    """The errors of steps whose forward and whose loss call another pipeline, and the loss of a step afterwards."""
    inner, texts = pipe(), []

    def loss(output, target):
        return mse(output, target) + inner.step(X, target=X)

    for made in (
        pipe(model=nn.Sequential(*layers()[:3], toy(lambda self, hidden: inner.eval(hidden)), nn.Linear(4, 4))),
        pipe(loss_fn=loss),
    ):
        with pytest.raises(ps.PenstockError) as caught:
            made.step(X, target=X)
        texts.append(str(caught.value))
    return texts, pipe().step(X, target=X).item()


def test_a_call_of_another_pipeline_within_a_step_is_refused_on_all_ranks():
    first, second = on_ranks(rank_nests_another_pipeline, 2)
    assert first == second
    for text, name in zip(first[0], ("eval()", "step()"), strict=True):
        assert f"{name} was called while step() of another pipeline runs: one call at a time, and none from a forward" in text


def rank_calls_it_twice_at_once():
    inside = []

    def loss(output, target):
        for call in (made.step, made.eval) if rank() else ():  # as another thread would, or a forward
            with pytest.raises(
                ps.PenstockError, match="of this pipeline runs: one call at a time, and none from a forward"
            ) as expected_message:
                call(X, target=X)
            inside.append(str(expected_message.value))
        return mse(output, target)

    made = pipe(loss_fn=loss, model=nn.Sequential(*layers(), nn.Dropout()))
    once = pipe(model=nn.Sequential(*layers(), nn.Dropout()))
    same = torch.equal(made.step(X, target=X), once.step(X, target=X))
    gradients = zip(made.parameters(), once.parameters(), strict=True)
    return len(inside), same, [torch.equal(gradient.grad, other.grad) for gradient, other in gradients]


def test_a_call_within_a_call_is_refused_and_changes_nothing():
    calls = 2 + 4  # of the loss: M microbatches, and some rows of one in the first step
    assert on_ranks(rank_calls_it_twice_at_once, 2) == [(0, True, [True] * 4), (2 * calls, True, [True] * 4)]


def rank_forks():
    made = pipe()
    reads, writes = os.pipe()
    if not (child := os.fork()):
        try:
            made.step(X, target=X)
        except BaseException as error:
            os.write(writes, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.getpid(), os.read(reads, 1000).decode(), made.step(X, target=X).item() > 0


def test_a_forked_process_does_not_have_its_parents_pipeline():
    for process, result, trained in on_ranks(rank_forks, 2):
        assert result == f"the pipeline belongs to process {process}, which has forked this one: call it there"
        assert trained


def rank_has_conjugated_targets():
    target = torch.ones(4, 4, dtype=torch.complex64).conj()
    return pipe(loss_fn=lambda output, target: (output - target.real).square().mean()).step(X, target=target).item()


def test_targets_whose_values_are_compared_may_be_conjugated_complex_numbers():
    loss, other = on_ranks(rank_has_conjugated_targets, 2)
    assert loss == other


def rank_ties_what_nobody_initialises():
    with torch.device("meta"):
        first, second = (toy(lambda self, x: x @ self.weight, weight=nn.Parameter(torch.empty(4, 4))) for _ in range(2))
        second.weight = first.weight
    with pytest.raises(ps.MismatchError, match="what has no value yet"):
        pipe(nn.Sequential(first, second)).step(X, target=X)


def test_a_tied_weight_that_nobody_initialises_is_not_taken_for_loaded():
    on_ranks(rank_ties_what_nobody_initialises, 2)


def test_a_first_layer_may_change_what_it_is_given_in_place():
    in_place = lambda self, hidden: hidden.relu_()  # noqa: E731
    first, *others = layers()
    model = nn.Sequential(toy(in_place), first, toy(in_place), *others)
    made = pipe(model)
    loss = made.step(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), target=X)
    found = {name: parameter.grad for name, parameter in made.named_parameters()}
    model.zero_grad()
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(())
    for part in inputs.chunk(2):
        value = mse(model(part.clone()), X[:2])
        (0.5 * value).backward()
        total += 0.5 * value.detach()
    assert torch.equal(loss, total)
    assert all(torch.equal(parameter.grad, found[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda made: made.clip_grad_norm_(-1.0), "clip_grad_norm_() takes a number of 0 or more as max_norm, got -1.0"),
        (
            lambda made: made.sampler(DataLoader([1, 2, 3])),
            "sampler() takes the dataset: DataLoader(dataset, ",
        ),
        (
            lambda made: made.step([[1.0]], target=X),
            "no tensor with rows to split into microbatches, it is a float",
        ),
        (lambda made: checkpoint.save(made, "folder"), "a checkpoint is of a Pipeline, not a str: save(folder, pipe)"),
        (lambda made: made.load_state_dict("weights.pt"), "load_state_dict() takes names and tensors, not a str"),
        (
            lambda made: ps.partition.split(nn.Sequential(*layers()), "2"),
            "a model is cut into a whole number of stages, not '2'",
        ),
        (lambda made: ps.schedule.verify("1f1b"), "'1f1b' is no table: penstock.schedule.build("),
        (lambda made: ps.schedule.simulate("1f1b"), "'1f1b' is no table: penstock.schedule.build("),
        (lambda made: pipe(topology=2), "topology= takes what ps.comms.init_distributed() returns, got 2"),
        (
            lambda made: topology._connect_to_ranks(None, "60", None),
            "a rank cannot wait '60' for others: give seconds, more than 0, or a timedelta",
        ),
        (lambda made: pipe(on_nonfinite="ignore"), "on_nonfinite='ignore': use 'raise', 'skip' or None"),
        (lambda made: pipe(seed="a"), "seed is a whole number or None, not a str"),
        (
            lambda made: pipe(loss_weight=lambda target: target.sum(1)).step(X, target=X),
            "must be one number for a microbatch, got a",
        ),
    ],
)
def test_what_is_of_another_kind_is_told(mistake, message):
    with pytest.raises(ps.PenstockError, match=re.escape(message)):
        mistake(pipe())
