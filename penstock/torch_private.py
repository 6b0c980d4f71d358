"""All uses of torch's private names. A function names the public call that comes closest, if there is one.

No other module uses a private name of torch (a test checks that). Differences between the supported releases, 2.11 to 2.15,
are handled here only.
"""

import gc
import logging
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunction as DisableTorchFunction  # see autograd
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass  # see autograd
from torch._C import _FunctionBase
from torch._guards import detect_fake_mode
from torch._ops import OpOverload as OpOverload  # the class of a dispatched operation
from torch._subclasses.fake_tensor import disable_fake_tensor_cache
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.autograd.variable import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import _rendezvous_handlers
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees every operation
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from torch.export import ExportedProgram  # this imports for a second

# ---- trees of values ------------------------------------------------------------------------------------------------
# Flatten and unflatten lists, tuples, dicts and registered classes (transformers' outputs); torch has no public name for it.
from torch.utils._pytree import SUPPORTED_NODES as TREE_NODES  # class -> how to flatten and unflatten it  # noqa: F401
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

from penstock.errors import PenstockError

# ---- releases -------------------------------------------------------------------------------------------------------

OLDEST_RELEASE, NEWEST_RELEASE = (2, 11), (2, 15)  # as in pyproject.toml; `make matrix` tests them


def parse_release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version: `(2, 13)` for `2.13.0+cpu`."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


class _TorchTooOldError(PenstockError, ImportError):
    """This torch is too old. Also an ImportError: the fork server ignores those, so the error is printed only once."""


def require_min_torch_release(version: str) -> None:
    """Raise PenstockError if `version` is older than OLDEST_RELEASE."""
    if parse_release(version) < OLDEST_RELEASE:
        newer = ".".join(map(str, OLDEST_RELEASE))
        raise _TorchTooOldError(f"Penstock needs torch {newer} or newer, this is {version}: pip install 'torch>={newer}'")


require_min_torch_release(torch.__version__)


# ---- modules and tensors --------------------------------------------------------------------------------------------


class TensorSlot(NamedTuple):
    """A place where a module has a parameter or buffer. A tied tensor has several slots."""

    name: str  # dotted, from the module that was searched
    owner: nn.Module  # the submodule that has the tensor
    key: str  # the tensor's name in `owner`
    tensor: Tensor  # the one that was there at the search
    registry: dict[str, Tensor | None]  # the owner's `_parameters` or `_buffers`

    def replace(self, tensor: Tensor) -> None:
        """Put `tensor`, of any class, into this slot. `slot.replace(slot.tensor)` restores it.

        The public `setattr` takes a Parameter only, and makes recurrent layers update their list of weights.
        """
        self.registry[self.key] = tensor


def parameter_slots(module: nn.Module) -> list[TensorSlot]:
    """Return the slots of all parameters in `module`. The public `named_parameters` does not give the owners."""
    return _tensor_slots((prefix, owner, owner._parameters) for prefix, owner in module.named_modules())


def parameter_registries(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dicts in which `module` and those inside keep parameters: a tenth of `named_modules`'s time."""
    found, remaining, seen = list[dict[str, Any]](), [module], set[int]()
    while remaining:
        owner = remaining.pop()
        if id(owner) not in seen:
            seen.add(id(owner))
            if owner._parameters:
                found.append(owner._parameters)
            remaining += [child for child in owner._modules.values() if child is not None]
    return found


def buffer_slots(module: nn.Module) -> list[TensorSlot]:
    """Return the slots of all buffers in `module`, persistent or not."""
    return _tensor_slots((prefix, owner, owner._buffers) for prefix, owner in module.named_modules())


def tensor_slots(module: nn.Module) -> list[TensorSlot]:
    """Return the slots of all parameters, then of all buffers."""
    return parameter_slots(module) + buffer_slots(module)


def _tensor_slots(owners: Iterable[tuple[str, nn.Module, Any]]) -> list[TensorSlot]:
    return [
        TensorSlot(f"{prefix}.{key}" if prefix else key, owner, key, tensor, tensors_of_owner)
        for prefix, owner, tensors_of_owner in owners
        for key, tensor in tensors_of_owner.items()
        if tensor is not None
    ]


def children_by_name(module: nn.Module) -> dict[str, nn.Module]:
    """Return name -> child, a child under all its names. The public `named_children` gives a child once."""
    return {name: child for name, child in module._modules.items() if child is not None}


def is_persistent_buffer(module: nn.Module, name: str) -> bool:
    """Return whether `name` is a buffer of `module` itself, and part of its state_dict."""
    return name in module._buffers and name not in module._non_persistent_buffers_set


def make_weight_contiguous(module: nn.Module) -> None:
    """Make a convolution's weight contiguous, so that `reset_parameters()` draws the same numbers for any memory format.

    Not needed from torch 2.12 on.
    """
    if parse_release(torch.__version__) < (2, 12) and isinstance(module, _ConvNd) and not module.weight.is_contiguous():
        contiguous = torch.empty_like(module.weight, memory_format=torch.contiguous_format)
        module.weight = nn.Parameter(contiguous, module.weight.requires_grad)


def swap_tensors(tensor: Tensor, replacement: Tensor) -> None:
    """Swap two tensor objects. The public `torch.utils.swap_tensors` refuses tensors that have weak references."""
    torch._C._swap_tensor_impl(tensor, replacement)


def mps_generator() -> torch.Generator:
    """Return the default random generator of Apple's GPUs. The public `torch.cuda.default_generators` are CUDA's only."""
    return torch.mps._get_default_mps_generator()


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for tensors with the same storage. On the meta device the public `data_ptr()` is 0."""
    return tensor.untyped_storage()._cdata


def preload_dynamo() -> None:
    """Import `torch._dynamo` now; else torch imports it when a TorchDispatchMode sees its first operation.

    If that is during a forward, `torch.fx.wrap` puts the frames of that forward into a reference cycle. Its tensors stay alive
    until the next garbage collection.
    """
    if "torch._dynamo" not in sys.modules:
        import torch._dynamo  # noqa: F401

        gc.collect()


def forward_hooks(module: nn.Module) -> list[Any]:
    """Return the forward pre-hooks and then the forward hooks of `module`."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def backward_hooks(module: nn.Module) -> list[Any]:
    """Return the backward hooks of `module`, and those on the gradients of its own parameters."""
    hooks = [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
    for parameter in module.parameters(recurse=False):
        hooks += [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]
    return hooks


def has_hooks(module: nn.Module) -> bool:
    """Return whether `module` has forward or backward hooks or pre-hooks."""
    forward_hooks = module._forward_pre_hooks or module._backward_pre_hooks
    return bool(forward_hooks or module._forward_hooks or module._backward_hooks)


def has_hooks_of_user(module: nn.Module) -> bool:
    """Return whether `module` has hooks besides those that torch.distributed puts there, as `fully_shard` does."""
    names = [str(getattr(hook, "__module__", "")) for hook in forward_hooks(module)]
    own_forward_hooks = any(not name.startswith("torch.distributed.") for name in names)
    return own_forward_hooks or bool(module._backward_hooks or module._backward_pre_hooks)


def has_hooks_or_patched_forward(module: nn.Module) -> bool:
    """Return whether `module` has forward hooks, or a forward that was set on the instance."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in module.__dict__


def is_compiled(module: nn.Module) -> bool:
    """Return whether `Module.compile()` or `torch.compile` was applied to `module`: the graph is bound to its tensors."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def is_cuda_graphed(module: nn.Module) -> bool:
    """Return whether `torch.cuda.make_graphed_callables` has replaced the module's forward by replays of CUDA graphs."""
    return getattr(vars(module).get("forward"), "__qualname__", "").startswith("make_graphed_callables.")


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` has wrapped; `module` itself if it is not wrapped."""
    while (inner := getattr(module, "_orig_mod", None)) is not None:
        module = inner
    return module


def strip_compiled_prefix(name: str) -> str:
    """Return the name of a parameter or buffer without the prefixes that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def full_tensor(tensor: Any) -> Tensor:
    """Return `DTensor.full_tensor()`, without its warning that two all-gathers are slower than one."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    was_disabled, logger.disabled = logger.disabled, True  # `setLevel` would clear the caches of all loggers, which is slow
    try:
        return tensor.full_tensor()
    finally:
        logger.disabled = was_disabled


def foreach_norm(tensors: list[Tensor], norm_type: float) -> list[Tensor]:
    """Return the `torch.linalg.vector_norm` of each tensor; on a GPU with few kernel launches, as in `clip_grad_norm_`."""
    return list(torch._foreach_norm(tensors, norm_type)) if tensors else []


def foreach_add(sums: list[Tensor], terms: list[Tensor]) -> None:
    """Add each term to its sum in place, bit for bit as `add_`; on a GPU with few kernel launches."""
    with torch.no_grad():
        torch._foreach_add_(sums, terms)


def foreach_multiply(tensors: list[Tensor], factors: list[float]) -> list[Tensor]:
    """Return each tensor times its factor, bit for bit as `*`; in one call."""
    return list(torch._foreach_mul(tensors, factors))


def safe_softmax(scores: Tensor, dim: int) -> Tensor:
    """Return `torch.softmax`, but 0 where all scores are -inf, as in `scaled_dot_product_attention`."""
    return torch._safe_softmax(scores, dim)


def causal_bias(queries: int, keys: int) -> Tensor:
    """The public `causal_lower_right`, out of the sight of every TorchDispatchMode: under one it raises RuntimeError."""
    from torch.nn.attention.bias import causal_lower_right  # this imports the compiler, which takes a second

    with _disable_current_modes():
        return causal_lower_right(queries, keys)


# ---- autograd -------------------------------------------------------------------------------------------------------
# DisableTorchFunctionSubclass: a context in which no subclass's `__torch_function__` is called; torch documents this name.
# DisableTorchFunction: nor that of a mode.


_AUTOGRAD_LOG = logging.getLogger("torch.autograd.graph")


def run_backward(roots: Sequence[GradientEdge | Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Run `torch.autograd.backward(roots, gradients)` without its checks of shapes, which the caller has made.

    For a small stage these checks take as long as the backward. They also import sympy, which takes half a second.
    """
    # On a CPU the backward runs in this thread, so the compiler's configuration need not be stored for threads of devices.
    on_cpu = True
    for gradient in gradients:  # in a loop: a generator takes twice as long
        on_cpu = on_cpu and gradient is not None and gradient.is_cpu
    logs_graph = _AUTOGRAD_LOG.isEnabledFor(logging.DEBUG)
    run = Variable._execution_engine.run_backward if on_cpu and not logs_graph else _engine_run_backward
    run(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def fast_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without its support for `torch.func`, which takes half of the time of a call."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def is_python_node(node: Node) -> bool:
    """Return whether a node of the autograd graph belongs to a `torch.autograd.Function`."""
    return issubclass(type(node), _FunctionBase)


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return (pack, unpack) of the innermost active `saved_tensors_hooks`, or None. The public name can only set them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def profiler_is_active() -> bool:
    """Return whether torch.profiler or `emit_nvtx` records this thread. The public `record_function` is slow even if not."""
    return torch._C._autograd._profiler_enabled()


def in_functional_transform() -> bool:
    """Return whether this code runs inside `torch.func.grad`, `vmap` or another transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def tensor_version(tensor: Tensor) -> int:
    """Return how often autograd saw the tensor's memory change in place: the version that it checks in a backward."""
    return tensor._version


def shares_memory(tensor: Tensor) -> bool:
    """Return whether another tensor uses the storage of `tensor`; False for sparse tensors and subclasses (DTensor)."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return False
    users = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    return users is None or users(storage._cdata) > 2  # two uses are those of `tensor` and `storage`


def view_base(tensor: Tensor) -> Tensor | None:
    """Return the tensor that `tensor` is a view of; None if autograd knows of none."""
    return tensor._base


def make_leaf(memory: Tensor, kind: type[Tensor]) -> Any:
    """Return a trainable leaf of class `kind` that shares `memory`, without a copy. For `isinstance` it is a Parameter."""
    leaf: Any = torch.Tensor._make_subclass(kind, memory, True)
    leaf._is_param = True
    return leaf


def gradient_hooks(parameter: Tensor) -> list[Callable[[Tensor], Any]]:
    """Return the hooks that `register_hook` has added to `parameter`."""
    return list((parameter._backward_hooks or {}).values())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether `register_hook` or `register_post_accumulate_grad_hook` was called on `parameter`."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


# ---- process groups (comms) -----------------------------------------------------------------------------------------


def gloo_options(devices: list[Any], timeout: timedelta) -> Any:
    """Return options of a Gloo group on these network `devices`, with one thread. The public `dist.new_group` takes neither."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = devices, 1, timeout
    return options


def nccl_options(timeout: timedelta) -> Any:
    """Return options of an NCCL group with this `timeout`, which in public only `dist.new_group` can set."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def group_backends(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of `group`, one for each device type. torch has no public name for them."""
    return [group._get_backend(device) for device in group._device_types]


def group_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend of `group` for `device`. Its operations start faster than those of `torch.distributed`."""
    return group._get_backend(device)


def group_device_types(group: dist.ProcessGroup) -> Sequence[str]:
    """Return the device types of tensors that `group` can send: `cpu`, `cuda`."""
    return [device.type for device in group._device_types]


def default_store() -> dist.Store:
    """Return the store that `init_process_group` has created or was given. torch has no public name for it."""
    return dist.distributed_c10d._get_default_store()


def set_env_rendezvous(store: dist.Store) -> None:
    """Make `init_process_group()` and `rendezvous("env://")` of this process use `store`, RANK and WORLD_SIZE.

    The public `register_rendezvous_handler` refuses the scheme `env`, and programs use no other.
    """

    def existing_store(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
        store.set_timeout(timeout)
        query = dict(parse_qsl(urlsplit(url).query))
        yield store, int(query.get("rank", os.environ["RANK"])), int(query.get("world_size", os.environ["WORLD_SIZE"]))

    _rendezvous_handlers["env"] = existing_store


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def dcp_storage_info(file: str, offset: int, length: int) -> Any:
    """Return what torch.distributed.checkpoint's metadata says of the place of a tensor. Its class has no public name."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # this imports for a second

    return _StorageInfo(file, offset, length)


# ---- graphs and exports (partition) ---------------------------------------------------------------------------------


def export_guards(program: "ExportedProgram") -> list[str]:
    """Return what an export assumes about sizes, as Python expressions of its arguments `L['name']`. Nothing public does."""
    return [guard.strip() for guard in program._guards_code]


@cache
def compile_guard(guard: str, argument: str) -> Callable[[Any], bool]:
    """Return the expression `guard` as a function of `argument`, the name of its variable."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP  # this imports for a second

    return eval(f"lambda {argument}: {guard}", {**SYMPY_INTERP, "math": math, "inf": math.inf})


@contextmanager
def suppress_shape_guards(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Compute shapes with an export's fake `tensors` in the block, without adding guards on sizes.

    Results are not cached: with dynamic sizes a look-up takes longer than to compute them.
    """
    mode = detect_fake_mode(tensors)
    if mode is None:
        yield
        return
    with disable_fake_tensor_cache(mode), mode.shape_env.suppress_guards() if mode.shape_env else nullcontext():
        yield


def pretend_exporting() -> AbstractContextManager[None]:
    """Return a context in which `torch.compiler.is_exporting()` is True, so that code takes the branches of an export."""
    from torch._export.utils import _compiling_state_context  # this imports for a second

    return _compiling_state_context()


def is_wrap_with_set_grad_enabled(target: object) -> bool:
    """Return whether a node of an export calls a graph under `set_grad_enabled`, with (enabled, graph, *arguments)."""
    return target is torch.ops.higher_order.wrap_with_set_grad_enabled


def mutated_arguments(operation: OpOverload) -> list[tuple[int, str]]:
    """Return index and name of each argument that `operation` writes to. Only its private schema says that."""
    arguments = enumerate(operation._schema.arguments)
    return [
        (place, argument.name)
        for place, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


# ---- DistributedDataParallel and fully_shard (mesh) -----------------------------------------------------------------
# `torch.distributed.pipelining` (its `stage.py`) makes the same calls: nothing public marks the last backward of a step.
# `fully_shard` is imported where it is used, as that takes a second.


def ignore_in_ddp(module: nn.Module, names: Sequence[str]) -> None:
    """Exclude the parameters with these names from a later DistributedDataParallel of `module`."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(names))


def ddp_ignored_names(module: nn.Module) -> Collection[str]:
    """Return the names of parameters that a DistributedDataParallel of `module` ignores."""
    return getattr(module, "_ddp_params_and_buffers_to_ignore", ())


def has_comm_hook(parallel: DistributedDataParallel) -> bool:
    """Return whether `register_comm_hook` was called. No public name shows that."""
    return bool(parallel._comm_hooks)


def prepare_ddp_last_backward(parallel: DistributedDataParallel, ends: Sequence[Tensor]) -> None:
    """Make the next backward average the gradients. Parameters that `ends` do not depend on are not waited for.

    DistributedDataParallel's forward would do the same before every microbatch's backward.
    """
    parallel.reducer._rebuild_buckets()  # only once: in the order in which the first step's gradients arrived
    parallel.reducer.prepare_for_backward(list(ends))


def broadcast_coalesced(group: dist.ProcessGroup, tensors: list[Tensor], size: int) -> None:
    """Broadcast tensors from the group's first rank, in messages of about `size` bytes. The public `broadcast` takes one."""
    dist._broadcast_coalesced(group, tensors, size, 0)


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of several axes as one axis. `fully_shard` accepts it for DTensors on other axes of the same root mesh.

    Over all ranks it has a group of its own, as torch's default group cannot be created again after it was aborted.
    """
    return mesh._flatten(backend_override=dist.get_backend_config() if mesh.size() == dist.get_world_size() > 1 else None)


def replicate_with_fsdp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply torch's `replicate`, a `fully_shard` that shards nothing. Unlike DistributedDataParallel it accepts DTensors."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(module, mesh=mesh)  # type: ignore[return-value]


def is_replicate_module(module: nn.Module) -> bool:
    """Return whether `replicate` was applied to `module`."""
    return any(value.__name__ == "ReplicateModule" for value in type(module).__mro__)


def fsdp_casts_inputs_or_outputs(module: nn.Module) -> bool:
    """Return whether `fully_shard` was given a MixedPrecisionPolicy that casts inputs or outputs of `module`."""
    return fsdp_input_dtype(module) is not None or getattr(_fsdp_policy(module), "output_dtype", None) is not None


def fsdp_input_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that the MixedPrecisionPolicy casts floating-point inputs of `module` to; None if it casts none."""
    policy = _fsdp_policy(module)
    return policy.param_dtype if policy is not None and policy.cast_forward_inputs else None


def _fsdp_policy(module: Any) -> Any:
    return module._get_fsdp_state()._mp_policy if hasattr(module, "_get_fsdp_state") else None


def clear_dtensor_caches() -> None:
    """Clear torch's caches of DTensor operations, so that results get the mesh of their inputs.

    A cached result has the mesh of the first inputs. A later mesh of the same ranks and axes is equal to it, but has other
    process groups; those of the first mesh may be closed. Nothing public clears these caches.
    """
    if "torch.distributed.tensor" not in sys.modules:  # nothing is cached yet, and the import takes a second
        return
    from torch.distributed.tensor import debug

    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()


def init_fsdp(module: Any) -> None:
    """Initialise `fully_shard`'s state. The module's first forward would do so, but its layers are called one by one."""
    module._get_fsdp_state()._lazy_init()


def reduce_fsdp_gradients(modules: Sequence[Any]) -> None:
    """Reduce the gradients of these `fully_shard` modules, whose gradient sync is off, and wait.

    The public `finalize_backward` exists only from 2.15 on. Since 2.15 the root's final callback reads a flag that its forward
    would have set. So it is set here.
    """
    for module in modules:
        for group in _fsdp_groups(module):
            group.post_backward()
    for state in (module._get_fsdp_state() for module in modules):
        if state._is_root:
            if getattr(state._state_ctx, "manual_backward_finalization_active", False) is None:
                state._state_ctx.manual_backward_finalization_active = False
            state._root_post_backward_final_callback()


def fsdp_parameters(module: Any) -> list[Any]:
    """Return the `FSDPParam` of each parameter that `module` itself shards: the owner of its shard and gradient."""
    return [fsdp_param for group in _fsdp_groups(module) for fsdp_param in group.fsdp_params]


def has_unreduced_grad(parameter: Any) -> bool:
    """Return whether an `FSDPParam` has a gradient that is not averaged yet."""
    if not hasattr(parameter, "_unsharded_param"):
        return False
    accumulated_grad = getattr(parameter, "unsharded_accumulated_grad", None)  # until 2.14, in the dtype of the reduction
    return accumulated_grad is not None or parameter.unsharded_param.grad is not None


def set_zero_grad(parameter: Any) -> None:
    """Set the gradient of an `FSDPParam` that has none to zero."""
    unsharded = parameter.unsharded_param
    unsharded.grad = torch.zeros_like(unsharded, dtype=unsharded.grad_dtype)


def _fsdp_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # 2.11
