"""The one door to torch's private parts: each function says what it needs of torch and which public call would do, if any.

Nothing else in the package touches a private name of torch (a test looks). What differs between the releases that are
supported, 2.11 to 2.15, is decided here and nowhere else.
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
from torch._ops import OpOverload as OpOverload  # what a dispatched operation is
from torch._subclasses.fake_tensor import disable_fake_tensor_cache
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import _rendezvous_handlers
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees every operation

if TYPE_CHECKING:
    from torch.export import ExportedProgram  # this imports for a second

# ---- trees of values ------------------------------------------------------------------------------------------------
# Lists, tuples and dicts (and what transformers' outputs are) taken apart and put together; torch has no public name for it.
from torch.utils._pytree import SUPPORTED_NODES as TREE_NODES  # kind -> how it is taken apart and put together  # noqa: F401
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

OLDEST_RELEASE, NEWEST_RELEASE = (2, 11), (2, 15)  # what pyproject.toml asks for, and `make matrix` tests


def parse_release(version: str) -> tuple[int, int]:
    """The first two numbers of a version: `(2, 13)` of `2.13.0+cpu`."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


class _TorchTooOldError(PenstockError, ImportError):
    """What stands on torch cannot be imported; also an ImportError, which the forkserver ignores: printed once."""


def require_min_torch_release(version: str) -> None:
    """Raises PenstockError if torch lacks what this module stands on."""
    if parse_release(version) < OLDEST_RELEASE:
        newer = ".".join(map(str, OLDEST_RELEASE))
        raise _TorchTooOldError(f"Penstock needs torch {newer} or newer, this is {version}: pip install 'torch>={newer}'")


require_min_torch_release(torch.__version__)


# ---- modules and tensors --------------------------------------------------------------------------------------------


class TensorSlot(NamedTuple):
    """A place where a module has a parameter or buffer; a tied one has several."""

    name: str  # of the tensor, seen from the module that was looked through
    owner: nn.Module
    key: str  # its name there
    tensor: Tensor  # what was there when it was looked through
    registry: dict[str, Tensor | None]  # all the parameters, or all the buffers, of the owner

    def replace(self, tensor: Tensor) -> None:
        """Have `tensor` there, whatever its kind; the slot's own brings back what was.

        `setattr` would do for a parameter in the place of a parameter; it also tells recurrent layers, which keep a list.
        """
        self.registry[self.key] = tensor


def parameter_slots(module: nn.Module) -> list[TensorSlot]:
    """Every place of a parameter in `module`; the public `named_parameters` does not say whose it is."""
    return _tensor_slots((prefix, owner, owner._parameters) for prefix, owner in module.named_modules())


def buffer_slots(module: nn.Module) -> list[TensorSlot]:
    """Every place of a buffer in `module`, whether it is saved in a state dict or not."""
    return _tensor_slots((prefix, owner, owner._buffers) for prefix, owner in module.named_modules())


def tensor_slots(module: nn.Module) -> list[TensorSlot]:
    """Every place of a parameter, then every place of a buffer."""
    return parameter_slots(module) + buffer_slots(module)


def _tensor_slots(owners: Iterable[tuple[str, nn.Module, Any]]) -> list[TensorSlot]:
    return [
        TensorSlot(f"{prefix}.{key}" if prefix else key, owner, key, tensor, tensors_of_owner)
        for prefix, owner, tensors_of_owner in owners
        for key, tensor in tensors_of_owner.items()
        if tensor is not None
    ]


def children_by_name(module: nn.Module) -> dict[str, nn.Module]:
    """The children by name; one that stands in several places has several, unlike in the public `named_children`."""
    return {name: child for name, child in module._modules.items() if child is not None}


def is_persistent_buffer(module: nn.Module, name: str) -> bool:
    """Whether `name` is a buffer of `module` itself, and part of its state_dict."""
    return name in module._buffers and name not in module._non_persistent_buffers_set


def make_weight_contiguous(module: nn.Module) -> None:
    """Before `reset_parameters()`: have the numbers of a convolution's weight drawn in one order, whatever its memory format.

    From torch 2.12 on it sees to that itself; before, another weight has to take the place of one that is not contiguous.
    """
    if parse_release(torch.__version__) < (2, 12) and isinstance(module, _ConvNd) and not module.weight.is_contiguous():
        contiguous = torch.empty_like(module.weight, memory_format=torch.contiguous_format)
        module.weight = nn.Parameter(contiguous, module.weight.requires_grad)


def swap_tensors(tensor: Tensor, replacement: Tensor) -> None:
    """Exchange what two tensor objects are, as the public `torch.utils.swap_tensors`, which refuses weak references to them."""
    torch._C._swap_tensor_impl(tensor, replacement)


def mps_generator() -> torch.Generator:
    """The generator that operations on Apple's GPUs draw from, as `torch.cuda.default_generators` are for CUDA."""
    return torch.mps._get_default_mps_generator()


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors of the same memory, also on the meta device, where `data_ptr()` is 0."""
    return tensor.untyped_storage()._cdata


def preload_dynamo() -> None:
    """What torch imports when a mode sees its first operation, imported before: a forward that waits for this import is kept,
    with all its values, by a circle of frames (`torch.fx.wrap` holds its own) until garbage is collected next."""
    if "torch._dynamo" not in sys.modules:
        import torch._dynamo  # noqa: F401

        gc.collect()


def forward_hooks(module: nn.Module) -> list[Any]:
    """The hooks of its forward, those before it first."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called before or after the module's own forward or backward."""
    forward_hooks = module._forward_pre_hooks or module._backward_pre_hooks
    return bool(forward_hooks or module._forward_hooks or module._backward_hooks)


def has_hooks_or_patched_forward(module: nn.Module) -> bool:
    """Whether this module, unlike others of its class, has hooks or a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in module.__dict__


def is_compiled(module: nn.Module) -> bool:
    """Whether `Module.compile()` or `torch.compile` was applied to `module`: its graph is bound to what it had then."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def is_cuda_graphed(module: nn.Module) -> bool:
    """Whether the public `torch.cuda.make_graphed_callables` has put replays of CUDA graphs in the place of its forward."""
    return getattr(vars(module).get("forward"), "__qualname__", "").startswith("make_graphed_callables.")


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """The user's module inside what `torch.compile` made of it."""
    while (inner := getattr(module, "_orig_mod", None)) is not None:
        module = inner
    return module


def strip_compiled_prefix(name: str) -> str:
    """A name of a module's state without what torch.compile adds to it."""
    return name.replace("_orig_mod.", "")


def full_tensor(tensor: Any) -> Tensor:
    """The public `DTensor.full_tensor()`, without its warning that two all-gathers are slower than one, which is known."""
    about = logging.getLogger("torch.distributed.tensor._redistribute")
    was_disabled, about.disabled = about.disabled, True  # a level would take as long: it clears what all loggers remember
    try:
        return tensor.full_tensor()
    finally:
        about.disabled = was_disabled


def foreach_norm(tensors: list[Tensor], norm_type: float) -> list[Tensor]:
    """The public `torch.linalg.vector_norm` of each; on a GPU in few launches, as `clip_grad_norm_` of torch takes them."""
    return list(torch._foreach_norm(tensors, norm_type)) if tensors else []


def foreach_add(sums: list[Tensor], terms: list[Tensor]) -> None:
    """The public `sum.add_(term)` of each pair; on a GPU in few launches. The bits are the same."""
    with torch.no_grad():
        torch._foreach_add_(sums, terms)


def safe_softmax(scores: Tensor, dim: int) -> Tensor:
    """The public `torch.softmax`, but 0 where all scores are -inf: as in `scaled_dot_product_attention`."""
    return torch._safe_softmax(scores, dim)


# ---- autograd -------------------------------------------------------------------------------------------------------
# DisableTorchFunctionSubclass: inside, `__torch_function__` is not asked; the documents name it, if in a private module.
# DisableTorchFunction: nor that of a mode.


def run_backward(edges: Sequence[GradientEdge], gradients: Sequence[Tensor | None]) -> None:
    """The public `torch.autograd.backward(edges, gradients)` without its checks of shapes, which whoever calls has made.

    They cost as much as the engine itself does for a small stage, and import half a second of symbolic algebra.
    """
    _engine_run_backward(tuple(edges), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def fast_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The public `function.apply`, without its care for `torch.func`, which takes half of the time: for use outside of that."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def is_python_node(node: Node) -> bool:
    """Whether a graph's node is that of a `torch.autograd.Function`."""
    return issubclass(type(node), _FunctionBase)


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """(pack, unpack) of the `saved_tensors_hooks` that are on, a checkpoint's for instance: the public name only sets them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def profiler_is_active() -> bool:
    """Return whether torch.profiler or `emit_nvtx` records here; the public `record_function` costs without one too."""
    return torch._C._autograd._profiler_enabled()


def in_functional_transform() -> bool:
    """Whether `torch.func.grad`, `vmap` and the like are at work around this operation."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def tensor_version(tensor: Tensor) -> int:
    """How often its memory was changed in place, as far as autograd knows; what it checks itself before a backward."""
    return tensor._version


def shares_memory(tensor: Tensor) -> bool:
    """Whether another tensor lies in its memory, which no public call shows. Of sparse ones and DTensors it is not seen."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return False
    users = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    return users is None or users(storage._cdata) > 2  # this tensor, and what was asked for its memory


def view_base(tensor: Tensor) -> Tensor | None:
    """The tensor that `tensor` is a view of, if it is one for autograd."""
    return tensor._base


def make_leaf(memory: Tensor, kind: type[Tensor]) -> Any:
    """A trainable leaf of class `kind` with this `memory`, for `isinstance` a Parameter; a Parameter made so copies nothing."""
    leaf: Any = torch.Tensor._make_subclass(kind, memory, True)
    leaf._is_param = True
    return leaf


def gradient_hooks(parameter: Tensor) -> list[Callable[[Tensor], Any]]:
    """What `register_hook` has given to this parameter."""
    return list((parameter._backward_hooks or {}).values())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether somebody has called its `register_hook` or `register_post_accumulate_grad_hook`."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


# ---- process groups (comms) -----------------------------------------------------------------------------------------


def gloo_options(devices: list[Any], timeout: timedelta) -> Any:
    """Options of a Gloo group on `devices`, with one thread; the public `dist.new_group` has no way to choose either."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = devices, 1, timeout
    return options


def nccl_options(timeout: timedelta) -> Any:
    """Options of an NCCL group; the timeout's public name is `dist.new_group`'s alone."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def group_backends(group: dist.ProcessGroup) -> list[Any]:
    """What carries the messages of `group`, for each kind of device; torch has no public name for it."""
    return [group._get_backend(device) for device in group._device_types]


def group_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The one of them for `device`, which an operation that starts at once asks without going through `dist`."""
    return group._get_backend(device)


def group_device_types(group: dist.ProcessGroup) -> Sequence[str]:
    """Where tensors may be that `group` carries: `cpu`, `cuda`."""
    return [device.type for device in group._device_types]


def default_store() -> dist.Store:
    """The store at which the world's ranks have met; torch shows it to none that did not make it."""
    return dist.distributed_c10d._get_default_store()


def set_env_rendezvous(store: dist.Store) -> None:
    """From now on this process' `init_process_group()` and rendezvous("env://") find `store`, and RANK and WORLD_SIZE.

    The public `register_rendezvous_handler` takes other schemes only, which every program would have to ask for.
    """

    def existing_store(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
        store.set_timeout(timeout)
        query = dict(parse_qsl(urlsplit(url).query))
        yield store, int(query.get("rank", os.environ["RANK"])), int(query.get("world_size", os.environ["WORLD_SIZE"]))

    _rendezvous_handlers["env"] = existing_store


# ---- graphs and exports (partition) ---------------------------------------------------------------------------------


def export_guards(program: "ExportedProgram") -> list[str]:
    """What an export took for granted of sizes, each as Python of its arguments `L['name']`. No public call shows it."""
    return [guard.strip() for guard in program._guards_code]


@cache
def compile_guard(guard: str, argument: str) -> Callable[[Any], bool]:
    """A guard as a function of `argument`, the name it is written with. Needs the words that guards are made of."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP  # this imports for a second

    return eval(f"lambda {argument}: {guard}", {**SYMPY_INTERP, "math": math, "inf": math.inf})


@contextmanager
def suppress_shape_guards(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Compute with an export's fake `tensors` for their shapes only: questions about sizes become no guards, and results are
    not cached, which with open sizes takes longer than to compute them.
    """
    mode = detect_fake_mode(tensors)
    if mode is None:
        yield
        return
    with disable_fake_tensor_cache(mode), mode.shape_env.suppress_guards() if mode.shape_env else nullcontext():
        yield


def pretend_exporting() -> AbstractContextManager[None]:
    """Inside, the public `torch.compiler.is_exporting()` says yes, so that code goes the ways it goes in an export."""
    from torch._export.utils import _compiling_state_context  # this imports for a second

    return _compiling_state_context()


def is_wrap_with_set_grad_enabled(target: object) -> bool:
    """Whether a node of an export calls a graph with gradients switched on or off: (enabled, graph, *arguments)."""
    return target is torch.ops.higher_order.wrap_with_set_grad_enabled


def mutated_arguments(operation: OpOverload) -> list[tuple[int, str]]:
    """Place and name of each argument that an operation writes to, which only its schema says."""
    arguments = enumerate(operation._schema.arguments)
    return [
        (place, argument.name)
        for place, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


# ---- DistributedDataParallel and fully_shard (mesh) -----------------------------------------------------------------
# With these calls `torch.distributed.pipelining` (its `stage.py`) steers both: nothing public says which backward is the last
# of a step. `fully_shard` is imported where it is used, for a second.


def ignore_in_ddp(module: nn.Module, names: Sequence[str]) -> None:
    """Whatever DistributedDataParallel makes of `module` later leaves the parameters of these names alone."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(names))


def ddp_ignored_names(module: nn.Module) -> Collection[str]:
    """The names that were given to `ignore_in_ddp`, by us or the user."""
    return getattr(module, "_ddp_params_and_buffers_to_ignore", ())


def has_comm_hook(parallel: DistributedDataParallel) -> bool:
    """Whether somebody has called the public `register_comm_hook`, which no public name shows."""
    return bool(parallel._comm_hooks)


def prepare_ddp_last_backward(parallel: DistributedDataParallel, ends: Sequence[Tensor]) -> None:
    """The next backward is the last of a step, which its forward would say of each; what `ends` do not need is left out."""
    parallel.reducer._rebuild_buckets()  # once: in the order in which the first step's gradients came
    parallel.reducer.prepare_for_backward(list(ends))


def broadcast_coalesced(group: dist.ProcessGroup, tensors: list[Tensor], size: int) -> None:
    """The public `broadcast` of each tensor from the group's first rank, but many in one message of about `size` bytes."""
    dist._broadcast_coalesced(group, tensors, size, 0)


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of several axes as one axis, which `fully_shard` takes beside other axes of the same mesh."""
    return mesh._flatten()


def replicate_with_fsdp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """`fully_shard` that shards nothing: unlike DistributedDataParallel it takes parameters that are DTensors."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(module, mesh=mesh)  # type: ignore[return-value]


def is_replicate_module(module: nn.Module) -> bool:
    """Whether `replicate` has made it."""
    return any(value.__name__ == "ReplicateModule" for value in type(module).__mro__)


def fsdp_casts_inputs_or_outputs(module: nn.Module) -> bool:
    """Whether `fully_shard` was given a MixedPrecisionPolicy that casts what goes into `module`, or what it gives."""
    return fsdp_input_dtype(module) is not None or getattr(_fsdp_policy(module), "output_dtype", None) is not None


def fsdp_input_dtype(module: nn.Module) -> torch.dtype | None:
    """What that casts floating-point tensors to which go into `module`."""
    policy = _fsdp_policy(module)
    return policy.param_dtype if policy is not None and policy.cast_forward_inputs else None


def _fsdp_policy(module: Any) -> Any:
    return module._get_fsdp_state()._mp_policy if hasattr(module, "_get_fsdp_state") else None


def clear_dtensor_caches() -> None:
    """Have DTensors' operations take the mesh of what they are given.

    torch remembers what an operation gives, the mesh with it, and a later mesh of the same ranks and names is equal to that
    one: but its groups are others, and the first one's may be closed. Nothing public forgets it.
    """
    if "torch.distributed.tensor" not in sys.modules:  # nothing is remembered yet, and it imports for a second
        return
    from torch.distributed.tensor import debug

    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()


def init_fsdp(module: Any) -> None:
    """What the first forward of a whole module would do, where its layers are called one by one."""
    module._get_fsdp_state()._lazy_init()


def reduce_fsdp_gradients(modules: Sequence[Any]) -> None:
    """Reduce the gradients of modules that do not sync them by themselves, and wait; the public `finalize_backward` is 2.15's.

    Since 2.15 a root's last callback reads which call ends the backward. Its forward would have set that.
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
    """For each parameter that `module` itself shards: what keeps it and its gradient."""
    return [fsdp_param for group in _fsdp_groups(module) for fsdp_param in group.fsdp_params]


def has_unreduced_grad(parameter: Any) -> bool:
    """Whether a parameter of `fsdp_parameters` has a gradient that is not averaged yet."""
    if not hasattr(parameter, "_unsharded_param"):
        return False
    accumulated_grad = getattr(parameter, "unsharded_accumulated_grad", None)  # until 2.14, in the type it is reduced in
    return accumulated_grad is not None or parameter.unsharded_param.grad is not None


def set_zero_grad(parameter: Any) -> None:
    """Set the gradient of a parameter of `fsdp_parameters`, which has none, to zero."""
    unsharded = parameter.unsharded_param
    unsharded.grad = torch.zeros_like(unsharded, dtype=unsharded.grad_dtype)


def _fsdp_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # 2.11
