"""Answer questions in other processes, which are ended when the page no longer waits.

A process reads one question a line, as JSON. It writes lines of JSON: progress, then the answer, then an empty line.
"""

import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress

from penstock.errors import PenstockError
from penstock.schedule.table import pause_garbage_collection
from penstock.view.data.timeline_data import Data
from penstock.view.studio.answers import answer
from penstock.view.studio.faster_table import ReportProgress

KEEPALIVE_SECONDS = 0.2  # between empty lines that show whether the page still waits
END = b"\n\n"
PROGRAM = "import sys; sys.path[:] = {path!r}; from penstock.view.studio.worker import main; main()"
DIED_MESSAGE = "The process that computed this was ended, perhaps for want of memory: ask for a smaller table"


class Workers:
    """Processes that answer questions, one for each at a time, and one that is ready for the next."""

    def __init__(self) -> None:
        self._free: list[subprocess.Popen[bytes]] = []
        self.processes: list[subprocess.Popen[bytes]] = []  # all that run
        self._closed = False

    def answer(self, question: object) -> Iterator[bytes]:
        """Yield the process's output in parts, with empty lines between. Closing the generator ends the process."""
        worker, is_done = self._take(), False
        try:
            yield from _read_output(worker, question)
            is_done = True
        except OSError:
            yield b"\n" + _line({"error": DIED_MESSAGE})  # after an incomplete line
        finally:
            if is_done:
                self._free.append(worker)
            else:
                self._end(worker)
                self.warm()

    def warm(self) -> None:
        """Start a process in advance for the next question."""
        if not self._free and not self._closed:
            self._free.append(self._start())

    def close(self) -> None:
        """End all processes."""
        self._closed = True
        self._free.clear()
        for worker in list(self.processes):
            self._end(worker)

    def _take(self) -> "subprocess.Popen[bytes]":
        with suppress(IndexError):  # none is free
            return self._free.pop()
        return self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        """Start a process in a new session, so that Ctrl-C does not reach it. It ends when its input is closed."""
        command = [sys.executable, "-P", "-c", PROGRAM.format(path=sys.path)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self.processes.append(worker)
        return worker

    def _end(self, worker: "subprocess.Popen[bytes]") -> None:
        worker.kill()
        with suppress(ValueError):  # another thread has removed it
            self.processes.remove(worker)
            worker.communicate()


def _read_output(worker: "subprocess.Popen[bytes]", question: object) -> Iterator[bytes]:
    """Send `question`, and yield the output of `worker` as it arrives. Raises OSError if the process dies."""
    assert worker.stdin
    assert worker.stdout
    worker.stdin.write(_line(question))
    worker.stdin.flush()
    end = b"\n"
    while end != END:
        if not select.select([worker.stdout], [], [], KEEPALIVE_SECONDS)[0]:
            if end.endswith(b"\n"):  # not inside a line
                yield b"\n"
        elif part := os.read(worker.stdout.fileno(), 2**20):
            end = (end + part)[-len(END) :]
            yield part
        else:
            raise OSError


# ---- in the process


def main() -> None:
    """Answer questions until the input is closed."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    sys.stdout = sys.stderr  # stdout is for answers only

    def report(data: Data) -> None:
        out.write(_line(data))
        out.flush()

    for line in sys.stdin.buffer:
        report(answer_question(json.loads(line), report))
        out.write(b"\n")
        out.flush()


def answer_question(question: object, report: ReportProgress = lambda data: None) -> Data:
    """Return the answer, or {"error"}, a sentence, for a refused question or a bug."""
    try:
        with pause_garbage_collection():
            return answer(question, report)
    except PenstockError as error:
        return {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"Penstock failed at this question, which is a bug: {error!r}"}


def _line(data: object) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"
