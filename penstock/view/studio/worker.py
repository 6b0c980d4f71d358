"""Answer questions in other processes, which are ended when the page no longer waits.

A process reads a question a line, as JSON. It answers with lines of JSON, progress first, then the answer, and an empty line.
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
from penstock.view.data.timeline import Data
from penstock.view.studio.answers import answer
from penstock.view.studio.better import ReportProgress

KEEPALIVE_SECONDS = 0.2  # between empty lines to a waiting page
END = b"\n\n"
PROGRAM = "import sys; sys.path[:] = {path!r}; from penstock.view.studio.worker import main; main()"
DIED = "The process that computed this was ended, perhaps for want of memory: ask for a smaller table"


class Workers:
    """A process for each question at a time, and one that waits for the next."""

    def __init__(self) -> None:
        self._free: list[subprocess.Popen[bytes]] = []
        self.processes: list[subprocess.Popen[bytes]] = []  # that have not ended
        self._closed = False

    def answer(self, question: object) -> Iterator[bytes]:
        """Yield the lines for a question, in parts, with an empty line now and then. Closing the generator ends the process."""
        worker, is_done = self._take(), False
        try:
            yield from _parts(worker, question)
            is_done = True
        except OSError:
            yield b"\n" + _line({"error": DIED})  # after an unfinished line
        finally:
            if is_done:
                self._free.append(worker)
            else:
                self._end(worker)
                self.warm()

    def warm(self) -> None:
        """Start a process in advance, so that the next question need not wait."""
        if not self._free and not self._closed:
            self._free.append(self._start())

    def close(self) -> None:
        """End all processes."""
        self._closed = True
        self._free.clear()
        for worker in list(self.processes):
            self._end(worker)

    def _take(self) -> "subprocess.Popen[bytes]":
        with suppress(IndexError):  # another thread has taken it
            return self._free.pop()
        return self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        """Start a process in a new session, which Ctrl-C does not reach. It ends when its input ends."""
        command = [sys.executable, "-P", "-c", PROGRAM.format(path=sys.path)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self.processes.append(worker)
        return worker

    def _end(self, worker: "subprocess.Popen[bytes]") -> None:
        worker.kill()
        with suppress(ValueError):  # another thread has ended it too
            self.processes.remove(worker)
            worker.communicate()


def _parts(worker: "subprocess.Popen[bytes]", question: object) -> Iterator[bytes]:
    """Yield the output of `worker` as it comes. Raises OSError if the process dies."""
    assert worker.stdin
    assert worker.stdout
    worker.stdin.write(_line(question))
    worker.stdin.flush()
    end = b"\n"
    while end != END:
        if not select.select([worker.stdout], [], [], KEEPALIVE_SECONDS)[0]:
            if end.endswith(b"\n"):  # not within a line
                yield b"\n"
        elif part := os.read(worker.stdout.fileno(), 2**20):
            end = (end + part)[-len(END) :]
            yield part
        else:
            raise OSError


# ---- in the process


def main() -> None:
    """Answer questions until the input ends."""
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
    """Return the answer; an error or a bug becomes a sentence."""
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
