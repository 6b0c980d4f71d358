"""What a microbatch in flight keeps alive on a stage, in bytes: weighed in the first step of every kind of batch.

While a forward runs, the memory of everything its operations give is noted, by weak reference. What of that, and of what other
stages gave, is there when the backward begins and gone when it is over, the microbatch has kept: once, however many tensors
share it. So parameters, the batch, and whatever stays for longer count nothing, and what is recomputed counts only while it
is there. Between I and W the same, with the gradients that W still needs.

Not seen: memory that code takes without torch's operations, and what compiled code saves. A stage with a compiled module in
it is not weighed; a compiled function inside a stage looks as if it kept nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import median_low
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.schedule import Size
from penstock.schedule.table import Kind
from penstock.stage.stage import Stage

Act = Callable[..., Any]  # (action, values, work) -> what is made
Key = tuple[int, int]  # stage, microbatch


class Memory:
    """Some tensors' memory, each block once, without keeping it."""

    def __init__(self, tensors: Iterable[Any] = ()) -> None:
        self._blocks: dict[int, tuple[StorageWeakRef, int]] = {}
        self.note(tensors)

    def note(self, tensors: Iterable[Any]) -> None:
        """Those of `tensors` that are such, too; of one that is made of others, theirs."""
        for each in tensors:
            if hasattr(each, "__tensor_flatten__"):
                self.note(getattr(each, name) for name in each.__tensor_flatten__()[0])
            elif isinstance(each, Tensor):
                try:
                    storage = each.untyped_storage()
                    self._blocks.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
                except (NotImplementedError, RuntimeError):
                    pass  # a sparse tensor, for one, has no memory of its own

    def alive(self) -> "Memory":
        """What of it is there now."""
        memory = Memory()
        memory._blocks = {key: block for key, block in self._blocks.items() if not block[0].expired()}
        return memory

    def gone(self) -> int:
        """Bytes of what is not there any more."""
        return sum(size for block, size in self._blocks.values() if block.expired())


class _Noting(TorchDispatchMode):
    """Notes what every operation gives."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Functions that are compiled stay so."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._memory.note(tree_leaves(output))
        return output


class Weighing:
    """One rank's `stages`, weighed while a step of training runs."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = {index: stage for index, stage in stages.items() if not _is_compiled(stage.module)}
        self._noted: dict[Key, Memory] = {}  # in a forward
        self._owed: dict[Key, tuple[Memory, Memory]] = {}  # there before I, and after it
        self._found: dict[int, list[Size]] = defaultdict(list)

    def around(self, acts: Mapping[Kind, Act]) -> dict[Kind, Act]:
        """What the engine does for each kind of action, weighed as it goes."""
        weighed = {Kind.F: self._forward, Kind.B: self._backward, Kind.I: self._backward, Kind.W: self._backward_weight}
        return {kind: partial(weighed[kind], act) for kind, act in acts.items()}

    def sizes(self) -> dict[int, Size]:
        """Stage -> what a microbatch kept on it, without those that are not known.

        The median over all of them: with the last one others may go too, as the parameters that `fully_shard` has gathered.
        """
        return {
            stage: Size(median_low(size.act for size in found), median_low(size.keep for size in found))
            for stage, found in self._found.items()
        }

    def _forward(self, act: Act, action: Any, values: Any, work: Any) -> Any:
        if action.stage not in self._stages:
            return act(action, values, work)
        noted = self._noted[action.stage, action.microbatch] = Memory(tree_leaves(values))
        with _Noting(noted):
            return act(action, values, work)

    def _backward(self, act: Act, action: Any, values: Any, work: Any) -> Any:
        key = action.stage, action.microbatch
        if key not in self._noted:
            return act(action, values, work)
        before = self._noted.pop(key).alive()
        made = act(action, values, work)
        if action.kind is Kind.I:
            after = before.alive()
            after.note(self._stages[action.stage].owed(action.microbatch))
            self._owed[key] = before, after
        else:
            self._found[action.stage].append(Size(gone := before.gone(), gone))
        return made

    def _backward_weight(self, act: Act, action: Any, values: Any, work: Any) -> Any:
        made = act(action, values, work)
        for key in [(action.stage, microbatch) for microbatch in work.part.weights[action]]:
            if key in self._owed:
                before, after = self._owed.pop(key)
                self._found[action.stage].append(Size(before.gone(), after.gone()))
        return made


def _is_compiled(module: nn.Module) -> bool:
    """Whether it, or a module inside, is compiled."""
    return any(each._compiled_call_impl is not None or "_orig_mod" in each._modules for each in module.modules())
