"""What a microbatch in flight keeps alive on a stage, in bytes: measured in the first step of every kind of batch.

While a forward runs, the memory of everything its operations give is noted, by weak reference. What of that, and of what other
stages gave, is there when the backward begins and gone when it is over, the microbatch has kept: once, however many tensors
share it. So parameters, the batch, and whatever stays for longer count nothing, and what is recomputed counts only while it
is there. Between I and W the same, with the gradients that W still needs.

Not seen: memory that code takes without torch's operations, and what compiled code saves. A stage with a compiled module in
it is not measured; a compiled function inside a stage looks as if it kept nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.schedule import Size
from penstock.schedule.table import Action, Kind
from penstock.stage.stage import Stage
from penstock.torch_private import TorchDispatchMode, import_dynamo, is_compiled, storage_key
from penstock.trees import leaves

Act = Callable[..., Any]  # (action, values) -> what is made


class Memory:
    """Some tensors' memory, each block once, without keeping it."""

    def __init__(self, tensors: Iterable[Any] = ()) -> None:
        self._blocks: dict[int, tuple[StorageWeakRef, int]] = {}
        self.note(tensors)

    def note(self, tensors: Iterable[Any]) -> None:
        """Those of `tensors` that are such, too; of one that is made of others, theirs."""
        for each in tensors:
            if type(each) is not Tensor and hasattr(each, "__tensor_flatten__"):
                self.note(getattr(each, name) for name in each.__tensor_flatten__()[0])
            elif isinstance(each, Tensor):
                with suppress(NotImplementedError, RuntimeError):  # a sparse tensor, for one, has no memory of its own
                    if (key := storage_key(each)) not in self._blocks:
                        storage = each.untyped_storage()
                        self._blocks[key] = StorageWeakRef(storage), storage.nbytes()

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
        self._memory.note(leaves(output))
        return output


class MemoryMeasurement:
    """What one microbatch keeps on each of a rank's `stages`, measured while a step of training runs.

    It is the first to reach the stage that will have a backward. Noting what every operation gives takes time, so no other
    microbatch is slowed.
    """

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        import_dynamo()
        self._stages = {index: stage for index, stage in stages.items() if not any(map(is_compiled, stage.module.modules()))}
        self._chosen: dict[int, int] = {}  # stage -> its microbatch
        self._skipped: frozenset[int] = frozenset()
        self._noted: dict[int, Memory] = {}  # stage -> in the forward
        self._owed: dict[int, tuple[Memory, Memory]] = {}  # stage -> there before I, and after it
        self.sizes: dict[int, Size] = {}  # stage -> what was found

    def around(self, acts: Mapping[Kind, Act]) -> dict[Kind, Act]:
        """What the engine does for each kind of action, measured as it goes."""
        measured = {Kind.F: self._forward, Kind.B: self._backward, Kind.I: self._backward, Kind.W: self._backward_weight}
        return {kind: partial(measured[kind], act) for kind, act in acts.items()}

    def skip(self, microbatches: frozenset[int]) -> None:
        """These have no backward, one that ran ahead perhaps among them."""
        self._skipped = microbatches
        for stage in [stage for stage, microbatch in self._chosen.items() if microbatch in microbatches]:
            del self._chosen[stage], self._noted[stage]

    def _forward(self, act: Act, action: Action, values: Any) -> Any:
        if action.stage not in self._stages or action.stage in self._chosen or action.microbatch in self._skipped:
            return act(action, values)
        self._chosen[action.stage] = action.microbatch
        noted = self._noted[action.stage] = Memory(leaves(values))
        with _Noting(noted):
            return act(action, values)

    def _backward(self, act: Act, action: Action, values: Any) -> Any:
        if self._chosen.get(action.stage) != action.microbatch or action.stage not in self._noted:
            return act(action, values)
        before = self._noted.pop(action.stage).alive()
        made = act(action, values)
        if action.kind is Kind.I:
            after = before.alive()
            after.note(self._stages[action.stage].saved_for_weight_backward(action.microbatch))
            self._owed[action.stage] = before, after
        else:
            self.sizes[action.stage] = Size(gone := before.gone(), gone)
        return made

    def _backward_weight(self, act: Act, action: Action, values: Any) -> Any:
        made = act(action, values)
        if action.stage in self._owed and not self._stages[action.stage].saved_for_weight_backward(self._chosen[action.stage]):
            before, after = self._owed.pop(action.stage)
            self.sizes[action.stage] = Size(before.gone(), after.gone())
        return made
