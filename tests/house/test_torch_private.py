"""The door to torch's private parts: what each function needs of torch is there, and does what it is used for."""

import inspect
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import toy
from torch import nn

import penstock as ps
from penstock import torch_private
from penstock.comms.process_groups import new_nccl_group

# ---- trees of values


def test_trees_are_taken_apart_and_put_together():
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, spec = torch_private.tree_flatten(tree)
    assert leaves == torch_private.tree_leaves(tree)
    assert torch_private.tree_unflatten(leaves, spec) == tree
    assert torch_private.tree_map(str, [1, 2]) == ["1", "2"]
    assert torch_private.tree_map_only(int, lambda leaf: leaf + 1, {"a": [1, "x"]}) == {"a": [2, "x"]}
    assert not spec.is_leaf()


# ---- releases


def test_an_older_torch_is_refused_in_a_sentence_and_a_newer_one_is_not():
    told = r"Penstock needs torch 2.11 or newer, this is 2.10.1\+cpu: pip install 'torch>=2.11'"
    with pytest.raises(ps.PenstockError, match=told):
        torch_private.require_min_torch_release("2.10.1+cpu")
    with pytest.raises(ps.PenstockError, match=r"this is 2\.8\.0: "):
        torch_private.require_min_torch_release("2.8.0")
    for version in ("2.11.0", "2.15.0+cu132", "2.16.0.dev20270101", "3.0.0a0+git1234"):
        torch_private.require_min_torch_release(version)


@pytest.mark.slow
@pytest.mark.fresh
def test_a_command_over_an_older_torch_says_so_once_though_its_ranks_server_has_it_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import torch; torch.__version__ = '2.8.0'")
    paths = os.pathsep.join([str(tmp_path), str(Path(ps.__file__).parents[1])])
    command = [sys.executable, "-m", "penstock", "train", "--ranks", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert done.stderr == "penstock: Penstock needs torch 2.11 or newer, this is 2.8.0: pip install 'torch>=2.11'\n"
    assert (done.returncode, done.stdout) == (1, "")


def test_the_package_asks_for_the_releases_that_are_known():
    wanted = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    newest = torch_private.NEWEST_RELEASE[0], torch_private.NEWEST_RELEASE[1] + 1
    assert f'"torch>={".".join(map(str, torch_private.OLDEST_RELEASE))},<{".".join(map(str, newest))}"' in wanted


# ---- modules and tensors


def test_a_tensor_slot_is_every_place_of_a_parameter_or_buffer():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    assert [slot.name for slot in torch_private.parameter_slots(model)] == ["0.weight", "2.weight", "2.bias"]
    slots = torch_private.tensor_slots(model)
    assert [slot.name for slot in slots[3:]] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert all(getattr(slot.owner, slot.key) is slot.tensor for slot in slots)
    assert [slot.name for slot in torch_private.tensor_slots(model[2])] == ["weight", "bias"]


def test_any_tensor_can_be_put_in_a_parameters_place_and_the_parameter_back():
    model = nn.Linear(2, 2)
    weight, instead = model.weight, torch.ones(2, 2)
    slot = torch_private.parameter_slots(model)[0]
    slot.replace(instead)
    assert model.weight is instead
    slot.replace(slot.tensor)
    assert model.weight is weight


def test_layers_have_all_their_names():
    layer = nn.Linear(2, 2)
    assert list(torch_private.children_by_name(nn.Sequential(layer, nn.ReLU(), layer))) == ["0", "1", "2"]


def test_which_buffers_are_saved():
    module = nn.Module()
    module.register_buffer("a", torch.ones(1))
    module.register_buffer("b", torch.ones(1), persistent=False)
    assert torch_private.is_persistent_buffer(module, "a")
    assert not torch_private.is_persistent_buffer(module, "b")


@pytest.mark.costly
def test_the_names_of_a_compiled_module_are_the_users():
    module = nn.Linear(2, 2)
    compiled = torch.compile(module)
    assert [torch_private.strip_compiled_prefix(name) for name in compiled.state_dict()] == ["weight", "bias"]


def test_a_convolution_draws_the_same_numbers_in_any_memory_format():
    weights = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        layer = nn.Conv2d(2, 3, 3).to(memory_format=memory_format)
        torch.manual_seed(1)
        torch_private.make_weight_contiguous(layer)
        layer.reset_parameters()
        weights.append(layer.weight)
    assert torch.equal(*weights)


def test_memory_is_swapped_under_tensors_that_others_know():
    parameter, other = nn.Parameter(torch.empty(2, device="meta")), torch.ones(2, requires_grad=True)
    end = torch.autograd.graph.get_gradient_edge(parameter)
    torch_private.swap_tensors(parameter, other)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.tolist() == [1, 1]
    assert other.is_meta
    assert end is not None


def test_views_of_one_memory_have_its_key():
    tensor, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert torch_private.storage_key(tensor) == torch_private.storage_key(tensor[1:])
    assert torch_private.storage_key(tensor) != torch_private.storage_key(other)


@pytest.mark.costly
def test_forward_hooks_are_seen_and_what_is_compiled_too():
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert not torch_private.has_hooks(layer)
    assert torch_private.forward_hooks(layer) == []
    layer.register_forward_hook(lambda *_: None)
    other.register_forward_pre_hook(lambda *_: None)
    assert torch_private.has_hooks(layer)
    assert torch_private.has_hooks_of_user(layer)
    assert torch_private.has_hooks(other)
    assert torch_private.has_hooks_or_patched_forward(other)
    own = nn.Linear(2, 2)
    assert not torch_private.has_hooks_or_patched_forward(own)
    own.forward = layer.forward
    assert torch_private.has_hooks_or_patched_forward(own)
    assert not torch_private.is_compiled(layer)
    wrapped = torch.compile(layer, backend="eager")
    assert torch_private.is_compiled(wrapped)
    assert torch_private.unwrap_compiled(wrapped) is layer
    layer.compile(backend="eager")
    assert torch_private.is_compiled(layer)
    assert torch_private.unwrap_compiled(layer) is layer


def test_the_generator_of_apples_processors_has_its_name():
    if torch.backends.mps.is_available():
        assert isinstance(torch_private.mps_generator(), torch.Generator)
    assert hasattr(torch.mps, "_get_default_mps_generator")


# ---- autograd


def test_a_backward_runs_from_edges():
    leaf = torch.ones(2, requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge(leaf * 3)
    torch_private.run_backward([edge], [torch.ones(2)])
    assert leaf.grad.tolist() == [3, 3]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_nodes_in_python_are_known():
    leaf = torch.ones(2, requires_grad=True)
    assert torch_private.is_python_node(Doubled.apply(leaf).grad_fn)
    assert not torch_private.is_python_node((leaf * 2).grad_fn)


def test_hooks_that_pack_saved_tensors_are_found():
    assert torch_private.saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda value: [value], lambda packed: packed[0]):
        pack, unpack = torch_private.saved_tensor_hooks()
        assert unpack(pack(torch.ones(1))).item() == 1
    assert torch_private.saved_tensor_hooks() is None


def test_changes_in_place_are_counted_over_views():
    tensor = torch.zeros(3)
    view = tensor.detach()[1:]
    before = torch_private.tensor_version(view)
    tensor.add_(1)
    assert torch_private.tensor_version(view) == before + 1


def test_functions_that_differentiate_or_map_others_are_known_from_inside():
    inside = []

    def sum_of(row):
        inside.append(torch_private.in_functional_transform())
        return row.sum()

    torch.vmap(torch.func.grad(sum_of))(torch.ones(2, 3))
    sum_of(torch.ones(3))
    assert inside == [True, False]


def test_memory_of_two_tensors_is_known():
    tensor = torch.ones(2)
    assert not torch_private.shares_memory(tensor)
    view = tensor.view(1, 2)
    assert torch_private.shares_memory(tensor)
    assert torch_private.shares_memory(view)
    del view
    assert not torch_private.shares_memory(tensor)


def test_the_base_of_a_view_is_known():
    leaf = torch.ones(2, 3, requires_grad=True)
    assert torch_private.view_base(leaf.t()) is leaf
    assert torch_private.view_base(leaf * 1) is None


def test_a_leaf_shares_memory_and_passes_for_a_parameter():
    class TensorSubclass(torch.Tensor):
        pass

    memory = torch.zeros(2)
    for kind in (TensorSubclass, nn.Parameter):
        leaf = torch_private.make_leaf(memory, kind)
        assert isinstance(leaf, nn.Parameter)
        assert type(leaf) is kind
        assert leaf.is_leaf
        assert leaf.requires_grad
        assert leaf.data_ptr() == memory.data_ptr()


def test_gradient_hooks_of_both_kinds_are_seen():
    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    assert not torch_private.has_gradient_hooks(one)
    one.register_hook(lambda _: None)
    other.register_post_accumulate_grad_hook(lambda _: None)
    assert torch_private.has_gradient_hooks(one)
    assert torch_private.has_gradient_hooks(other)


def test_norms_and_sums_of_many_have_the_bits_of_one_by_one():
    tensors = [torch.randn(5, 3), torch.randn(7).double(), torch.randn(1).bfloat16()]
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        norms = torch_private.foreach_norm(tensors, norm_type)
        assert all(torch.equal(a, torch.linalg.vector_norm(b, norm_type)) for a, b in zip(norms, tensors, strict=True))
    assert torch_private.foreach_norm([], 2.0) == []
    sums, expected = [tensor.clone() for tensor in tensors], [tensor + tensor for tensor in tensors]
    torch_private.foreach_add(sums, tensors)
    assert all(map(torch.equal, sums, expected))
    factors = [0.1, 1 / 3, 7.0]
    products = torch_private.foreach_multiply(tensors, factors)
    assert all(torch.equal(a, b * factor) for a, b, factor in zip(products, tensors, factors, strict=True))


def test_modules_that_were_captured_as_cuda_graphs_are_known():
    source = inspect.getsource(torch.cuda.make_graphed_callables)
    assert "func.forward = make_graphed_forward(" in source
    assert "def make_graphed_forward(" in source
    layer = nn.Linear(2, 2)
    assert not torch_private.is_cuda_graphed(layer)
    layer.forward = lambda hidden: hidden  # what torch puts there needs a GPU
    layer.forward.__qualname__ = "make_graphed_callables.<locals>.make_graphed_forward.<locals>.new_fwd"
    assert torch_private.is_cuda_graphed(layer)
    with pytest.raises(ps.MismatchError, match="Linear was captured as a CUDA graph, whose one set of buffers"):
        ps.Pipeline(nn.Sequential(layer), nn.functional.mse_loss)


# ---- graphs and exports


class RowCountModel(nn.Module):
    def forward(self, hidden):
        with torch.no_grad():
            factor = hidden.exp() + 1
        return hidden * (factor if hidden.shape[0] > 3 else 2)


def test_the_guards_of_an_export_are_functions_of_what_it_is_called_with():
    program = torch.export.export(
        RowCountModel(), (torch.ones(5, 2),), dynamic_shapes=(({0: torch.export.Dim.AUTO},)), strict=False
    )
    [guard] = [guard for guard in torch_private.export_guards(program) if ">" in guard]
    holds = torch_private.compile_guard(guard, "L")
    assert holds({"hidden": torch.ones(4, 2)})
    assert not holds({"hidden": torch.ones(3, 2)})


def test_a_graph_without_gradients_inside_an_export_is_known():
    program = torch.export.export(RowCountModel(), (torch.ones(5, 2),), strict=False)
    calls = [node for node in program.graph.nodes if torch_private.is_wrap_with_set_grad_enabled(node.target)]
    assert [node.args[0] for node in calls] == [False]


@torch.library.custom_op("penstock::test_halves", mutates_args=())
def halves(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[::2].clone()


@halves.register_fake
def _(tensor):
    with torch_private.suppress_shape_guards([tensor]):
        return tensor.new_empty(3 if tensor.shape[0] == 5 else 4)


def test_what_is_asked_about_sizes_only_for_shapes_becomes_no_guard():
    program = torch.export.export(
        toy(lambda self, hidden: halves(hidden)), (torch.ones(5),), dynamic_shapes=(({0: torch.export.Dim.AUTO},)), strict=False
    )
    [given] = program.graph.find_nodes(op="placeholder")
    assert not isinstance(given.meta["val"].shape[0], int)
    with torch_private.suppress_shape_guards([torch.ones(2)]):
        pass


def test_which_arguments_an_operation_writes_to():
    aten = torch.ops.aten
    assert torch_private.mutated_arguments(aten.add_.Tensor) == [(0, "self")]
    assert torch_private.mutated_arguments(aten.add.out) == [(3, "out")]
    assert torch_private.mutated_arguments(aten.add.Tensor) == []
    assert isinstance(aten.add.Tensor, torch_private.OpOverload)


# ---- DistributedDataParallel and fully_shard


def rank_ddp():
    from torch.nn.parallel import DistributedDataParallel

    ps.comms.init_distributed()
    module = nn.ModuleDict({"own": nn.Linear(2, 2, bias=False), "borrowed": nn.Linear(2, 2, bias=False)})
    torch_private.ignore_in_ddp(module, ["borrowed.weight"])
    assert list(torch_private.ddp_ignored_names(module)) == ["borrowed.weight"]
    assert list(torch_private.ddp_ignored_names(module["own"])) == []
    parallel = DistributedDataParallel(module, gradient_as_bucket_view=True)
    assert not torch_private.has_comm_hook(parallel)
    buckets = []

    def hook(_, bucket):
        buckets.append(bucket.buffer().clone())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    parallel.register_comm_hook(None, hook)
    assert torch_private.has_comm_hook(parallel)
    for expected in (1, 2):  # the buckets are made anew after the first step
        torch_private.prepare_ddp_last_backward(parallel, [])
        module["own"](torch.ones(1, 2)).sum().backward()
        assert buckets.pop().tolist() == [expected] * 4
    tensors = [torch.ones(2), torch.ones(1, dtype=torch.int64)]
    torch_private.broadcast_coalesced(torch.distributed.group.WORLD, tensors, 1 << 20)
    assert [tensor.sum() for tensor in tensors] == [2, 1]


@pytest.mark.ranks
def test_ddp_is_told_which_backward_is_the_last_and_what_to_leave_alone():
    ps.launch(rank_ddp, 1)


def rank_fsdp(shard):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = ps.comms.init_mesh(dp=1)["dp"]
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for value in (*module, module):  # the root has no parameters left
        shard(value, mesh=mesh)
    made = [module, *module]
    assert not any(map(torch_private.fsdp_casts_inputs_or_outputs, made))
    assert torch_private.fsdp_casts_inputs_or_outputs(
        fully_shard(nn.Linear(2, 2), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    )
    for tensor in made:
        torch_private.init_fsdp(tensor)
    for step in range(2):  # layer by layer: the root's forward is never called
        for last in (False, True):
            for tensor in made:
                tensor.set_is_last_backward(last)
                tensor.set_requires_gradient_sync(last)
                tensor.set_reshard_after_backward(last)
            if not last:
                for tensor in made:
                    tensor.unshard()
                first = torch_private.fsdp_parameters(module[0])[0]
                assert not torch_private.has_unreduced_grad(first)
                module[1](torch.ones(1, 2)).sum().backward()
                module[1](torch.ones(1, 2)).sum().backward()
        handles = [fsdp_parameter for part in made for fsdp_parameter in torch_private.fsdp_parameters(part)]
        assert [torch_private.has_unreduced_grad(handle) for handle in handles] == [False, True]
        if step:
            torch_private.set_zero_grad(first)
            assert torch_private.has_unreduced_grad(first)
        torch_private.reduce_fsdp_gradients(made)
        assert not any(map(torch_private.has_unreduced_grad, handles))
        for tensor in made:
            tensor.reshard()
        grads = [parameter.grad for parameter in module.parameters()]
        assert (grads[0] is None) == (step == 0)
        assert torch_private.full_tensor(grads[1]).tolist() == [[2 * (step + 1)] * 2] * 2
    return torch_private.is_replicate_module(module)


@pytest.mark.ranks
def test_fully_shard_averages_when_it_is_told_to_though_no_root_forward_is_called():
    from torch.distributed.fsdp import fully_shard

    assert ps.launch(rank_fsdp, 1, fully_shard) == [False]
    assert ps.launch(rank_fsdp, 1, torch_private.replicate_with_fsdp) == [True]


def test_an_active_profiler_is_noticed():
    assert not torch_private.profiler_is_active()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_private.profiler_is_active()
    assert not torch_private.profiler_is_active()


def test_a_softmax_of_nothing_is_zero():
    scores = torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf]])
    assert torch.equal(torch_private.safe_softmax(scores, -1), scores.softmax(-1).nan_to_num(0))


# ---- process groups


def test_a_group_of_ones_own_has_the_options_that_were_given():
    options = torch_private.gloo_options([dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")], timedelta(seconds=5))
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    assert group.options._timeout == timedelta(seconds=5)


@pytest.mark.skipif(not dist.is_nccl_available() or torch.cuda.is_available(), reason="is for a torch of CUDA without a GPU")
def test_what_is_asked_of_nccl_and_cuda_is_in_torchs_builds_for_it():
    options = torch_private.nccl_options(timedelta(seconds=5))
    assert options._timeout == timedelta(seconds=5)
    with pytest.raises(ValueError, match="no GPUs found"):  # after its arguments were read
        new_nccl_group(dist.HashStore(), 0, 2, timedelta(seconds=5))
    assert {"name", "send", "recv", "abort", "shutdown"} <= set(dir(dist.ProcessGroupNCCL))
    assert "enable_timing" in inspect.signature(torch.cuda.Event.__new__).parameters


def test_the_backends_and_the_store_of_torchs_own_group_are_found():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        backend = torch_private.group_backend(world, torch.device("cpu"))
        assert backend.name() == "gloo"
        assert any(group_backend is backend for group_backend in torch_private.group_backends(world))
        assert "cpu" in torch_private.group_device_types(world)
        torch_private.default_store().set("key", "value")
        assert torch_private.default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_registries_of_parameters_are_those_of_all_modules_each_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.ReLU(), nn.LayerNorm(2)))
    registries = torch_private.parameter_registries(model)
    expected = [module._parameters for module in model.modules() if module._parameters]
    assert sorted(map(id, registries)) == sorted(map(id, expected))
