"""Read the events of a Chrome trace, plain or gzipped, as a stream: memory stays bounded for files of any size."""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError

CHUNK_BYTES = 2**20
MAX_EVENT_CHARACTERS = 2**22  # of one event; a longer one is damaged
MAX_HEADER_CHARACTERS = 2**26  # before the events; it lists process groups, of thousands of ranks
PROFILE = "profile some steps with torch.profiler, call its step() after each, and export_chrome_trace() on every rank"

_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")


def open_trace(path: Path, on_bytes: Callable[[int], object] = lambda count: None) -> tuple[str, Iterator[Any]]:
    """Return the header (the text before the events) of the trace at `path`, and an iterator that decodes its events.

    `on_bytes` is called with the number of bytes read from the file, chunk by chunk.

    Raises PenstockError for a file that is no trace; the iterator raises it if the file is damaged.
    """
    chunks, text = _chunks(path, on_bytes), ""
    while not (begin := _BEGIN.search(text)):
        chunk = next(chunks, "")
        if not chunk or len(text) > MAX_HEADER_CHARACTERS:
            raise PenstockError(f"{path} is no trace of torch.profiler, it has no traceEvents: {PROFILE}")
        text += chunk
    return text[: begin.start()], _events(path, text[begin.end() :], chunks)


def is_trace(path: Path) -> bool:
    """Return whether the file at `path` begins as a Chrome trace does, or is zipped and cut off, as its reader says."""
    try:
        return _BEGIN.search(next(_chunks(path), "")) is not None
    except PenstockError:
        return path.name.endswith(".json.gz")


def _chunks(path: Path, on_bytes: Callable[[int], object] = lambda count: None) -> Iterator[str]:
    """Yield the text of the file, piece by piece."""
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    try:
        with path.open("rb") as file:
            is_gzipped = file.peek(2)[:2] == b"\x1f\x8b"
            content = gzip.GzipFile(fileobj=file) if is_gzipped else file
            position = 0
            while data := content.read(CHUNK_BYTES):
                on_bytes(file.tell() - position)
                position = file.tell()
                yield decode(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise PenstockError(f"{path} is cut off or damaged, it cannot be unzipped: copy or export it again") from error
    except OSError as error:
        raise PenstockError(f"{path} cannot be read: {error.strerror or error}") from error


def _events(path: Path, text: str, chunks: Iterator[str]) -> Iterator[Any]:
    """Decode and yield the events that `text` and then `chunks` hold."""
    decoder, offset, count = json.JSONDecoder(strict=False), 0, 0
    while True:
        if between := _BETWEEN.match(text, offset):
            offset = between.end()
        if text.startswith("]", offset):
            return
        try:
            event, offset = decoder.raw_decode(text, offset)
        except (ValueError, RecursionError) as error:  # the event goes on in the next chunk, or is damaged
            chunk = next(chunks, "")
            if not chunk or len(text) - offset > MAX_EVENT_CHARACTERS or isinstance(error, RecursionError):
                raise PenstockError(
                    f"{path} is cut off or damaged after {count:,} events: copy or export it again, once its job has ended"
                ) from error
            text, offset = text[offset:] + chunk, 0
        else:
            count += 1
            yield event
