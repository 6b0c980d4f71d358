"""The one door to torch's private parts: each function says what it needs of torch and which public call would do, if any.

Nothing else in the package touches a private name of torch (a test looks). What differs between the releases that are
supported, 2.11 to 2.15, is decided here and nowhere else.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

# ---- trees of values ------------------------------------------------------------------------------------------------
# Lists, tuples and dicts (and what transformers' outputs are) taken apart and put together; torch has no public name for it.
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

# ---- modules and tensors --------------------------------------------------------------------------------------------


class TensorSlot(NamedTuple):
    """A place where a module has a parameter or buffer; a tied one has several."""

    name: str  # of the tensor, seen from the module that was looked through
    owner: nn.Module
    key: str  # its name there
    tensor: Tensor  # what was there when it was looked through
    held: dict[str, Tensor | None]  # all the parameters, or all the buffers, of the owner

    def put(self, tensor: Tensor) -> None:
        """Have `tensor` there, whatever its kind; the slot's own brings back what was.

        `setattr` would do for a parameter in the place of a parameter; it also tells recurrent layers, which keep a list.
        """
        self.held[self.key] = tensor


def parameter_slots(module: nn.Module) -> list[TensorSlot]:
    """Every place of a parameter in `module`; the public `named_parameters` does not say whose it is."""
    return [slot for prefix, owner in module.named_modules() for slot in _slots(prefix, owner, owner._parameters)]


def buffer_slots(module: nn.Module) -> list[TensorSlot]:
    """Every place of a buffer in `module`, of those that are not saved too."""
    return [slot for prefix, owner in module.named_modules() for slot in _slots(prefix, owner, owner._buffers)]


def tensor_slots(module: nn.Module) -> list[TensorSlot]:
    """Every place of a parameter, then every place of a buffer."""
    return parameter_slots(module) + buffer_slots(module)


def _slots(prefix: str, owner: nn.Module, held: dict[str, Tensor | None]) -> list[TensorSlot]:
    names = {key: f"{prefix}.{key}" if prefix else key for key in held}
    return [TensorSlot(names[key], owner, key, tensor, held) for key, tensor in held.items() if tensor is not None]


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """The children by name; one that stands in several places has several, unlike in the public `named_children`."""
    return {name: child for name, child in module._modules.items() if child is not None}


def is_saved(module: nn.Module, buffer: str) -> bool:
    """Whether the `buffer` of `module` itself is part of its state_dict."""
    return buffer not in module._non_persistent_buffers_set


def swap_memory(tensor: Tensor, other: Tensor) -> None:
    """Exchange what two tensor objects are, as the public `torch.utils.swap_tensors`, which refuses weak references to them."""
    torch._C._swap_tensor_impl(tensor, other)


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors of the same memory, also on the meta device, where `data_ptr()` is 0."""
    return tensor.untyped_storage()._cdata


# ---- autograd -------------------------------------------------------------------------------------------------------


# ---- process groups (comms) -----------------------------------------------------------------------------------------

# ---- graphs and exports (partition) ---------------------------------------------------------------------------------

# ---- DistributedDataParallel and fully_shard (mesh) -----------------------------------------------------------------
