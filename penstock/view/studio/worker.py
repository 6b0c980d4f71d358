"""Answers from processes of their own: one that nobody waits for any more is ended, whatever it computes.

A process reads questions, a line of JSON each. To each it writes lines of JSON: what it tells on the way, then the answer,
and after it an empty line.
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
from penstock.schedule.table import garbage_collection_paused
from penstock.view.data.timeline import Data
from penstock.view.studio.answers import answer
from penstock.view.studio.better import Tell

BEAT = 0.2  # seconds between two signs of life to whoever waits
END = b"\n\n"
PROGRAM = "import sys; sys.path[:] = {path!r}; from penstock.view.studio.worker import main; main()"
DIED = "The process that computed this was ended, perhaps for want of memory: ask for a smaller table"


class Workers:
    """As many processes as there are questions at a time, and one that waits for the next."""

    def __init__(self) -> None:
        self._free: list[subprocess.Popen[bytes]] = []
        self.started: list[subprocess.Popen[bytes]] = []  # that have not ended
        self._closed = False

    def answer(self, question: object) -> Iterator[bytes]:
        """The lines for a question, in parts, and an empty line every BEAT seconds. To close this ends the process."""
        worker, done = self._taken(), False
        try:
            yield from _parts(worker, question)
            done = True
        except OSError:
            yield b"\n" + _line({"error": DIED})  # after whatever it has left of a line
        finally:
            if done:
                self._free.append(worker)
            else:
                self._end(worker)
                self.warm()

    def warm(self) -> None:
        """Have a process ready, so that a question does not wait for one to start."""
        if not self._free and not self._closed:
            self._free.append(self._started())

    def close(self) -> None:
        """End them all."""
        self._closed = True
        self._free.clear()
        for worker in list(self.started):
            self._end(worker)

    def _taken(self) -> "subprocess.Popen[bytes]":
        with suppress(IndexError):  # another thread has taken it
            return self._free.pop()
        return self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        """A process in a session of its own: Ctrl-C does not reach it. It ends when its questions do."""
        command = [sys.executable, "-P", "-c", PROGRAM.format(path=sys.path)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self.started.append(worker)
        return worker

    def _end(self, worker: "subprocess.Popen[bytes]") -> None:
        worker.kill()
        with suppress(ValueError):  # it was ended from two sides
            self.started.remove(worker)
            worker.communicate()


def _parts(worker: "subprocess.Popen[bytes]", question: object) -> Iterator[bytes]:
    """What `worker` writes, as it comes. Raises OSError if it dies."""
    assert worker.stdin
    assert worker.stdout
    worker.stdin.write(_line(question))
    worker.stdin.flush()
    end = b"\n"
    while end != END:
        if not select.select([worker.stdout], [], [], BEAT)[0]:
            if end.endswith(b"\n"):  # not within a line
                yield b"\n"
        elif part := os.read(worker.stdout.fileno(), 2**20):
            end = (end + part)[-len(END) :]
            yield part
        else:
            raise OSError


# ---- in the process


def main() -> None:
    """Answer what comes in until nothing more does."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    sys.stdout = sys.stderr  # nothing else is written there

    def tell(data: Data) -> None:
        out.write(_line(data))
        out.flush()

    for line in sys.stdin.buffer:
        tell(answered(json.loads(line), tell))
        out.write(b"\n")
        out.flush()


def answered(question: object, tell: Tell = lambda data: None) -> Data:
    """The answer; what Penstock refuses, and what it fails at, is told in a sentence."""
    try:
        with garbage_collection_paused():
            return answer(question, tell)
    except PenstockError as error:
        return {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"Penstock failed at this question, which is a mistake of its own: {error!r}"}


def _line(data: object) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"
