"""Nothing but `torch_private` touches a private name of torch, and no value that ranks compare comes from `hash()`."""

import ast
from functools import cache

import pytest
import torch
from rooms import MODULES
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

DOOR = "penstock.torch_private"
PUBLIC = {
    *("_exit", "_asdict", "_fields", "_make", "_replace"),  # os and NamedTuple: documented, in spite of their names
    "_attn_implementation",  # how layers of transformers read which attention their config names
    "_can_record_outputs",  # where models of transformers declare what their layers record
    *("_reset_parameters", "_init_weights"),  # what some modules and models call their initialisation, torch's among them
}
MODULE = {name for name in vars(torch.nn.Module()) if name.startswith("_")}
OWNERS = (torch.nn.Module, torch.Tensor, torch.distributed.ProcessGroup, FSDPModule, DistributedDataParallel)
TORCH = MODULE.union(*({name for name in dir(owner) if name.startswith("_")} for owner in OWNERS))


@cache
def nodes_of(module: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))))


def private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name not in {"_", *PUBLIC}


def ours(nodes: list[ast.AST]) -> set[str]:
    """The private names that a module gives to its own functions, classes and attributes."""
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    named = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return (
        defined | named | {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    )


@cache
def everyones() -> set[str]:
    return set().union(*(ours(nodes_of(module)) for module in MODULES if module != DOOR)) - TORCH


def torchs(node: ast.AST, own: set[str]) -> list[str]:
    """The private names of torch in a node; `own` are the module's."""
    match node:
        case ast.Import(names):
            return [alias.name for alias in names if any(map(private, alias.name.split(".")))]
        case ast.ImportFrom(module, names) if module and module.startswith("torch"):
            return [f"{module}.{alias.name}" for alias in names if any(map(private, [*module.split("."), alias.name]))]
        case ast.Attribute(ast.Name("self" | "cls"), attr):
            return [attr] if attr in MODULE - own else []
        case ast.Attribute(_, attr) | ast.Call(ast.Name("getattr" | "setattr" | "hasattr"), [_, ast.Constant(attr), *_]):
            return [attr] if private(attr) and attr not in everyones() else []
    return []


@pytest.mark.costly
def test_no_private_name_of_torch_is_used_outside_its_one_door():
    used = {
        f"{module}, line {node.lineno}: {name}"
        for module in MODULES.keys() - {DOOR}
        for own in [ours(nodes_of(module))]
        for node in nodes_of(module)
        for name in torchs(node, own)
    }
    assert not used, f"these go past penstock/torch_private.py: {', '.join(sorted(used))}"


@pytest.mark.costly
@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch.utils import _pytree",
        "x = tensor._base",
        "y = pipe.net._modules",
        "getattr(module, '_parameters')",
        "self._buffers[name]",
        "group._get_backend(device)",
    ],
)
def test_what_goes_past_the_door_is_seen(source):
    assert [name for node in ast.walk(ast.parse(source)) for name in torchs(node, set())]


@pytest.mark.costly
def test_no_hash_is_taken_since_ranks_compare_values_and_each_process_has_other_hashes():
    calls = [f"{module}, line {node.lineno}" for module in MODULES for node in nodes_of(module) if is_hash(node)]
    assert not calls, "compare a digest, or the value itself"


def is_hash(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash"
