"""Run a function until it calls the model, and go on when the pipeline has the outputs.

`compute_loss` is one function around `model(**inputs)`, and a pipeline needs the inputs of all batches of a step before it has
the outputs of the first. So the function waits for them in a thread, and what it does before the call (random masks, counters)
is done once. While one of these threads runs, the main thread waits.
"""

import contextvars
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.integrations.transformers.model_view import ModelView

current_call: contextvars.ContextVar["ModelCall"] = contextvars.ContextVar("current_call")  # of the thread


class _Aborted(BaseException):
    """Raised where the function called the model, to end it."""


class ModelCall:
    """A call of `function(model, *values)` as far as its call of the model: `arguments` are those of that call.

    `logs`: the arguments of each call of `Trainer.log` by the function.
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any], values: Sequence[Any] = ()) -> None:
        self.arguments: dict[str, Any] = {}
        self.logs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._has_called = False
        self._result: Any = None
        self._reference: Any = None  # the outputs of `ref_model`
        self._error: BaseException | None = None
        self._outputs: SimpleQueue[Any] = SimpleQueue()
        self._thread_waits: SimpleQueue[None] = SimpleQueue()  # or has ended

        state = _TorchThreadState()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run, function, model, values, state), daemon=True)
        self._thread.start()
        self._wait()
        if not self._has_called:
            raise ps.MismatchError("compute_loss does not call the model: it calls it once, model(**inputs)")

    def finish(self, outputs: Any, reference: Any = None) -> Any:
        """Return what the function makes of the model's outputs. Raises what it raises. Called once.

        `reference`: the outputs of `ref_model` for the same arguments.
        """
        assert self._thread.is_alive(), "the function has ended"
        self._reference = reference
        self._outputs.put(outputs)
        self._wait()
        result, self._result = self._result, None  # which has a graph
        self._reference = None
        return result

    def reference_outputs(self, arguments: dict[str, Any] | None = None) -> Any:
        """Return the outputs of `ref_model`, which the function calls with `arguments`."""
        if not self._has_called:
            raise ps.MismatchError(
                "compute_loss calls ref_model before the model, and a step of the pipeline runs both at once: call "
                "model(**inputs) first"
            )
        if arguments is not None and not _are_same(arguments, self.arguments):
            raise ps.MismatchError(
                f"compute_loss calls ref_model with {', '.join(arguments)}, and the model with {', '.join(self.arguments)}: "
                "a step of the pipeline gives both the same values, so call model(**inputs) and self.ref_model(**inputs)"
            )
        return self._reference

    def abort(self) -> None:
        """End the function where it called the model, unless it has ended."""
        if self._thread.is_alive():
            self._outputs.put(_Aborted())
            self._thread.join()

    def _wait(self) -> None:
        """Wait until the function calls the model or has ended. Raises what it has raised."""
        self._thread_waits.get()
        error, self._error = self._error, None
        if error is not None:
            raise error

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self, function: Callable[..., Any], model: nn.Module, values: Sequence[Any], state: "_TorchThreadState") -> None:
        state.apply_to_current_thread()
        current_call.set(self)
        try:
            self._result = function(ModelView(model, self._forward), *values)
        except _Aborted:
            pass
        except BaseException as error:  # `_wait` raises it in the main thread
            self._error = error
        finally:
            self._thread_waits.put(None)

    def _forward(self, **arguments: Any) -> Any:
        if self._has_called:
            raise ps.MismatchError(
                "compute_loss calls the model twice, and a step of the pipeline is one forward: call it once"
            )
        self.arguments, self._has_called = arguments, True
        self._thread_waits.put(None)
        outputs = self._outputs.get()
        if isinstance(outputs, _Aborted):
            raise outputs
        return outputs


def _are_same(arguments: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return whether two calls have the same names, and the same objects or equal numbers."""

    def is_same(value: Any, other: Any) -> bool:
        return value is other or (not isinstance(value, Tensor) and not isinstance(other, Tensor) and bool(value == other))

    return arguments.keys() == others.keys() and all(is_same(value, others[name]) for name, value in arguments.items())


class _TorchThreadState:
    """What torch has for each thread: whether it computes gradients, the GPU and its stream."""

    def __init__(self) -> None:
        self._computes_gradients = torch.is_grad_enabled()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def apply_to_current_thread(self) -> None:
        """Set what the thread that made this object had."""
        torch.set_grad_enabled(self._computes_gradients)
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)


class TrainerLoss(nn.Module):
    """The pipeline's loss: what `compute_loss` does after it has called the model. Targets: the numbers of calls in `calls`."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        super().__init__()
        self._convert = convert  # the model's outputs
        self.calls: Sequence[Any] = ()  # of the step
        self.register_buffer("state", torch.empty(0), persistent=False)  # so that no check of the pipeline calls it again

    def begin_step(self, calls: Sequence[Any]) -> tuple[list[dict[str, Any]], list[tuple[Any, int]]]:
        """Return the arguments of each call of the model, and the targets, which have as many rows: arguments and a number."""
        self.calls = calls
        arguments = [call.arguments for call in calls]
        return arguments, [(values, number) for number, values in enumerate(arguments)]

    def forward(self, outputs: Any, target: tuple[Any, int], reference: Any = None) -> Tensor:
        """Return the loss of one batch, on the last stage. `reference`: the outputs of `ref_model`."""
        _, number = target
        loss: Tensor = self.calls[number].finish(self._convert(outputs), reference)
        return loss
