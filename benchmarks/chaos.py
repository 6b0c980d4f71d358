"""Kill ranks at random until the time is over: every run must end in the bits of one that nobody disturbed.

python benchmarks/chaos.py --seconds 60 --seed 1
python benchmarks/chaos.py --seconds 1800 --torchrun 0.1          # a tenth of the runs under torchrun

A run trains a small model, with a checkpoint after every step, on 4 ranks. Where ranks die it goes on with those that are left,
down to 1, and then on 4 again. A fault is SIGKILL, SIGSEGV, SIGSTOP, an exception or an allocation that cannot be, on any rank,
at any moment: while ranks start, connect, train, save or restart. After each run the weights are compared with the undisturbed
run's, who was named with who was hit, and what is left is looked for: processes and files.

Most of a run's time would go to imports of torch. So most programs are forked from this one's fork server, and fork their own.
"""

import atexit
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from shutil import rmtree
from statistics import median, quantiles
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import tyro
from safetensors.torch import load_file
from torch import nn

import penstock as ps
from penstock import checkpoint
from penstock.launcher.forkserver import HELD_SIGNALS, forkserver_context

RANKS, ROWS, WIDTH = 4, 16, 32
RAISES, ALLOCATES = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
FAULTS = {
    "SIGKILL": signal.SIGKILL,
    "SIGSEGV": signal.SIGSEGV,
    "SIGSTOP": signal.SIGSTOP,
    "exception": RAISES,
    "out of memory": ALLOCATES,
}
PATIENCE = 600.0  # seconds a program may take to get on
MOST_FAULTS = 8  # of a run
PREEMPTED = 75  # the exit code of a program that was asked to leave, and did


@dataclass(frozen=True)
class ChaosOptions:
    """Disturb trainings until the time is over, and say what came of each."""

    seconds: float = 60.0
    seed: int = 0
    faults: int = 10**9  # stop after so many
    steps: int = 80  # of a run
    torchrun: float = 0.0  # the share of runs that torchrun starts, which takes seconds each time
    fresh: float = 0.1  # the share of the other runs whose programs are new interpreters, and not forked
    preemptions: int = 0  # instead: so many SIGTERMs to the program or one of its ranks, after which no step may be done again


@dataclass(frozen=True)
class Job:
    """What one program trains."""

    folder: str
    steps: int
    schedule: str = "1f1b"
    replicas: int = 1
    restarts: int = 3


class ChaosError(Exception):
    """What a rank is made to raise."""


class InjectedFault(NamedTuple):
    """What was done to whom."""

    kind: str
    pid: int
    rank: int | None  # None: it had not said which it is
    when: float  # seconds of time.time()
    world: int  # ranks of that attempt
    steps: int  # done by then


# ---- on every rank


def train(job: Job) -> bool:
    """One rank's part; it goes on from the newest checkpoint. Returns whether it was asked to leave."""
    folder, rank = Path(job.folder), os.environ["RANK"]
    signal.signal(RAISES, _raise)
    signal.signal(ALLOCATES, _allocate)
    with (folder / "ranks").open("a") as told:
        told.write(f"{os.getpid()} {rank} {os.environ['WORLD_SIZE']}\n")
    topology = ps.comms.init_distributed()
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh())]
    mesh = ps.comms.init_mesh(dp=job.replicas) if job.replicas > 1 else None
    pipe = ps.Pipeline(nn.Sequential(*layers), nn.functional.mse_loss, job.schedule, 4, mesh=mesh)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)
    if checkpoint.exists(folder / "run"):
        checkpoint.resume(folder / "run", pipe, optimizer)
    saving = None
    for step in range(pipe.step_count, job.steps):
        inputs = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        mine = inputs.tensor_split(pipe.position.replicas, 1)[pipe.position.replica]
        pipe.step(mine[0], target=mine[1])
        optimizer.step()
        optimizer.zero_grad()
        if topology.rank == 0:
            with (folder / "steps").open("a") as told:
                told.write(f"{time.time()} {step + 1} {topology.world_size}\n")
        saving = checkpoint.save(folder / "run", pipe, optimizer, wait=False)
        if pipe.preempted:
            break
    if saving is not None:
        saving.wait()
    if pipe.step_count == job.steps:
        checkpoint.export(pipe, folder / "weights.safetensors")
    return pipe.preempted


def _raise(*_: Any) -> None:
    raise ChaosError("".join(random.choices("abcdefghij", k=8)))  # each its own: the same one twice is a mistake


def _allocate(*_: Any) -> None:
    try:
        torch.empty(2**60)
    except RuntimeError as error:  # which would pass for one of the transport's, in the middle of a wait
        raise MemoryError(str(error)) from error


def program(job: Job) -> None:
    """What the disturbed process does: under torchrun it is a rank."""
    if "RANK" in os.environ:
        train(job)
        return ps.comms.shutdown()
    ps.comms.catch_preemption()
    least = 1 if job.replicas == 1 else RANKS
    try:
        results = ps.launch(train, RANKS, job, restarts=job.restarts, least=least)
        attempts, ended = results.attempts, True
        if results[0]:
            sys.exit(PREEMPTED)
    except Exception as error:
        if not hasattr(error, "attempts"):
            raise
        attempts, ended = error.attempts, False
    told = [{"ranks": attempt.ranks, "failed_ranks": attempt.failed_ranks, "error": str(attempt.error)} for attempt in attempts]
    (Path(job.folder) / "attempts").write_text(json.dumps({"ended": ended, "attempts": told}))


# ---- the processes of a program


class ForkedProgram:
    """A program in a process that is forked from this one's fork server, where torch is imported; to be used as a Popen."""

    def __init__(self, job: Job, environment: dict[str, str], output: Path) -> None:
        self._process: Any = forkserver_context().Process(target=_run_forked_program, args=(job, environment, output))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; negative for a signal, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As `returncode`."""
        return self.returncode

    def wait(self) -> int | None:
        """Wait until it has ended; return the exit code."""
        self._process.join()
        return self.returncode


def _run_forked_program(job: Job, environment: dict[str, str], output: Path) -> None:
    """Make this process what a new interpreter would be: with a session, files, a fork server and a tracker of its own."""
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    vars(multiprocessing.current_process())["_config"].pop("tempdir", None)

    vars(vars(resource_tracker)["_resource_tracker"]).update(_fd=None, _pid=None)
    server = forkserver.ForkServer()
    names = ("ensure_running", "get_inherited_fds", "connect_to_new_process", "set_forkserver_preload")
    vars(forkserver).update({name: getattr(server, name) for name in names}, _forkserver=server)
    vars(forkserver)["util"] = SimpleNamespace(**{**vars(util), "spawnv_passfds": _fork_server})
    program(job)


def _fork_server(_: str, arguments: list[str], passed: list[int]) -> int:
    """Run the code of a fork server, the last of `arguments`, in a fork of this process instead of a new interpreter."""
    if pid := os.fork():
        return pid
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in passed:
            with suppress(OSError):  # that of the listing itself
                os.close(int(name))
    del sys.modules["penstock.launcher.forkserver_child"]  # the server imports it anew
    try:
        exec(arguments[-1])
    finally:
        atexit._run_exitfuncs()
        os._exit(0)


class DisturbedProgram:
    """A program that is disturbed: its ranks, and what is left when it has ended."""

    def __init__(self, job: Job, start: str, temporary: Path) -> None:
        self.torchrun, self.temporary, self.folder = start == "torchrun", temporary, Path(job.folder)
        environment = os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        self.process: ForkedProgram | subprocess.Popen[bytes]
        if start == "forked":
            self.process = ForkedProgram(job, environment, self.folder / "told")
            return
        starter = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone", f"--max-restarts={job.restarts}"]
        command = [sys.executable, *(starter if self.torchrun else []), __file__, "--job", json.dumps(asdict(job))]
        with (self.folder / "told").open("ab") as told:
            self.process = subprocess.Popen(command, env=environment, stdout=told, stderr=told, start_new_session=True)

    def ranks(self) -> dict[int, int | None]:
        """The processes of the ranks that live now -> their ranks, None where they have not said so."""
        parents = [self.process.pid] if self.torchrun else _children([self.process.pid])
        said = {pid: rank for pid, rank, _ in self.starts()}
        return {pid: said.get(pid) for pid in _children(parents)}

    def starts(self) -> list[tuple[int, int, int]]:
        """Of all ranks that have said so: process, rank, ranks of the attempt."""
        path = self.folder / "ranks"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(int(pid), int(rank), int(world)) for pid, rank, world in map(str.split, lines)]

    def left(self) -> list[str]:
        """What there should not be after it has ended."""
        deadline = time.monotonic() + 5 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        while (alive := _in_session(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        told = [f"process {pid}, {_described(pid)}" for pid in alive]
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # torch leaves a cache, and its agent the logs
        files = [path.name for path in self.temporary.iterdir() if not path.name.startswith(("torchinductor", "torchelastic"))]
        return told + files


def _children(parents: list[int]) -> list[int]:
    """The processes that these have started, zombies left out."""
    found = list[int]()
    for parent in parents:
        with suppress(OSError):  # it has ended
            for thread in Path(f"/proc/{parent}/task").glob("*/children"):
                with suppress(OSError):
                    found += map(int, thread.read_text().split())
    return [pid for pid in found if _state(pid)[0] != "Z"]


def _in_session(session: int) -> list[int]:
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if _state(pid)[1] == session and _state(pid)[0] != "Z"]


def _state(pid: int) -> tuple[str, int]:
    """Its state and its session; a process that is gone counts as a zombie."""
    try:
        state, _, _, session, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "Z", 0
    return state, int(session)


def _described(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return f"state {_state(pid)[0]}, waits in {Path(f'/proc/{pid}/wchan').read_text() or 'nothing'}: {words[:120]}"
    except OSError:
        return "gone by now"


# ---- disturbing


def disturb(
    job: Job, start: str, temporary: Path, draw: random.Random, most: int
) -> tuple[list[InjectedFault], DisturbedProgram]:
    """Start one program and hit its ranks until it has ended, at most once an attempt and `most` times."""
    program, faults = DisturbedProgram(job, start, temporary), list[InjectedFault]()
    known: set[int] = set()  # ranks of attempts that were hit
    begin = time.monotonic()
    while program.process.poll() is None:
        if time.monotonic() - begin > PATIENCE * (1 + len(faults)):
            os.killpg(program.process.pid, signal.SIGKILL)
            raise SystemExit(f"a program has not ended; it is kept in {job.folder}")
        alive = program.ranks()
        if not alive or len(faults) == most or alive.keys() & known:
            known |= alive.keys() if alive.keys() & known else set()  # one of an attempt that was hit may have come later
            time.sleep(0.005)
            continue
        _wait(program, known, draw)
        alive = program.ranks()
        if alive and (fault := _hit(program, alive, draw)):
            faults.append(fault)
            known |= alive.keys()
    return faults, program


def _wait(program: DisturbedProgram, known: set[int], draw: random.Random) -> None:
    """Until some moment of an attempt: of its start, or after so many steps."""
    if draw.random() < 0.4:
        return time.sleep(draw.uniform(0, 8.0 if program.torchrun else 1.0))
    steps = max((step for _, step, _ in done(program.folder)), default=0) + draw.randint(1, 20)
    while max((step for _, step, _ in done(program.folder)), default=0) < steps and program.ranks().keys() - known:
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.05))


def _hit(program: DisturbedProgram, alive: dict[int, int | None], draw: random.Random) -> InjectedFault | None:
    pid = draw.choice(sorted(alive))
    kind = draw.choices(list(FAULTS), [4, 2, 1, 2, 1])[0]
    if alive[pid] is None and kind not in ("SIGKILL", "SIGSEGV", "SIGSTOP"):  # it could not take the others as what they are
        kind = "SIGKILL"
    steps, when = max((step for _, step, _ in done(program.folder)), default=0), time.time()
    try:
        os.kill(pid, FAULTS[kind])
    except ProcessLookupError:
        return None
    return InjectedFault(kind, pid, alive[pid], when, len(alive), steps)


def done(folder: Path) -> list[tuple[float, int, int]]:
    """When each step ended, which it was, on how many ranks; in the order of time."""
    path = folder / "steps"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(float(when), int(step), int(world)) for when, step, world in map(str.split, lines)]


# ---- what came of it


class DisturbedTraining:
    """One training, from its first program to its end, and what was wrong with it."""

    def __init__(self, name: str, job: Job, start: str, temporary: Path) -> None:
        self.name, self.job, self.start, self.temporary = name, job, start, temporary
        self.folder = Path(job.folder)
        self.folder.mkdir()
        self.faults: list[InjectedFault] = []
        self.wrong: list[str] = []

    def disturb(self, draw: random.Random, most: int) -> None:
        """Start programs until one comes to its end; hit ranks `most` times."""
        while True:
            faults, program = disturb(self.job, self.start, self.temporary, draw, most - len(self.faults))
            self.faults += faults
            self.wrong += [f"left: {value}" for value in program.left()]
            if self._ended(program, faults):
                return

    def _ended(self, program: DisturbedProgram, faults: list[InjectedFault]) -> bool:
        """Whether the program came to its end; who was named is compared with who was hit."""
        if program.torchrun:
            if program.process.returncode and len(faults) <= self.job.restarts:
                self.wrong.append(f"torchrun ended with exit code {program.process.returncode} after {len(faults)} faults")
            return program.process.returncode == 0
        path = self.folder / "attempts"
        if not path.exists():
            self.wrong.append(f"the program ended with exit code {program.process.returncode} and no report")
            return False
        told = json.loads(path.read_text())
        path.unlink()
        failed = [attempt for attempt in told["attempts"] if attempt["error"] != "None"]
        if told["ended"] and len(failed) == len(faults) - 1:  # the last one came when its rank was done
            self.faults.remove(faults.pop())
        if len(failed) != len(faults):
            self.wrong.append(f"{len(faults)} faults ended {len(failed)} attempts: {[result['error'] for result in failed]}")
        said = {pid: rank for pid, rank, _ in program.starts()}
        for fault, result in zip(faults, failed, strict=False):
            rank = said.get(fault.pid, fault.rank)
            expected = {rank} if rank is not None else None  # it died before it had a number
            if len(result["failed_ranks"]) != 1 or (expected and set(result["failed_ranks"]) != expected):
                self.wrong.append(f"{fault.kind} of rank {rank}, told: {result['failed_ranks']}, {result['error']}")
        return bool(told["ended"])

    def recovery(self) -> list[float]:
        """Seconds from each fault to the first step that had not been done before, as far as there was one."""
        found = []
        for fault in self.faults:
            new = [when for when, step, _ in done(self.folder) if when > fault.when and step > fault.steps]
            found += [min(new) - fault.when] if new else []
        return found

    def compare(self, expected: dict[str, Any]) -> None:
        """The weights with those of the undisturbed run."""
        weights = load_file(self.folder / "weights.safetensors")
        different = [name for name in expected if not torch.equal(weights[name], expected[name])]
        self.wrong += [f"{len(different)} weights differ, {different[0]} first"] if different else []


def undisturbed(job: Job, folder: Path) -> dict[str, Any]:
    """The weights of a run that nobody disturbs."""
    folder.mkdir()
    ps.launch(train, RANKS, replace(job, folder=str(folder)))
    return load_file(folder / "weights.safetensors")


def preempt(options: ChaosOptions) -> None:
    """Ask programs to leave, at random moments, and start them again until the training is done; then the next training."""
    draw, root, count, again, codes = random.Random(options.seed), Path(mkdtemp(prefix="chaos-")), 0, 0, Counter[int | None]()
    job = Job("", options.steps, restarts=0)
    expected, runs, different = undisturbed(job, root / "undisturbed"), 0, 0
    while count < options.preemptions:
        runs += 1
        folder = root / str(runs)
        folder.mkdir()
        while not (folder / "weights.safetensors").exists():
            program = DisturbedProgram(replace(job, folder=str(folder)), "fresh", folder)
            whom = _moment(program, draw)
            if count < options.preemptions and program.process.poll() is None:
                os.kill(whom if whom in program.ranks() else program.process.pid, signal.SIGTERM)
                count += 1
            codes[program.process.wait()] += 1
        steps = [step for _, step, _ in done(folder)]
        again += len(steps) - len(set(steps))
        weights = load_file(folder / "weights.safetensors")
        different += any(not torch.equal(weights[name], expected[name]) for name in expected)
    told = ", ".join(f"{number} with {code}" for code, number in codes.items())
    print(f"{count} SIGTERMs in {runs} trainings: programs ended {told}")
    print(f"{again} steps were done again, {different} trainings ended in other bits")
    rmtree(root)
    sys.exit(int(again + different > 0))


def _moment(program: DisturbedProgram, draw: random.Random) -> int:
    """Wait for some moment of a program; whom to hit then: it, or one of its ranks."""
    if draw.random() < 0.3:
        time.sleep(draw.uniform(0, 3))
    else:
        while not program.ranks() and program.process.poll() is None:
            time.sleep(0.005)
        _wait(program, set(), draw)
    return draw.choice([program.process.pid, *sorted(program.ranks())])


def main(options: ChaosOptions) -> None:
    """Disturb one run after the other, and say what came of them all."""
    if options.preemptions:
        return preempt(options)
    draw, begin, root = random.Random(options.seed), time.monotonic(), Path(mkdtemp(prefix="chaos-"))
    kinds = {
        "1f1b": Job("", options.steps), "zb-v": Job("", options.steps, "zb-v"), "pp2 x dp2": Job("", options.steps, replicas=2)
    }  # fmt: skip
    expected = {name: undisturbed(job, root / name) for name, job in kinds.items()}
    counts, seconds, runs, bad = Counter[str](), {"launch": list[float](), "torchrun": list[float]()}, 0, 0
    while time.monotonic() - begin < options.seconds and counts.total() < options.faults:
        runs += 1
        name, is_forked = draw.choice(list(kinds)), draw.random() >= options.fresh
        start = "torchrun" if draw.random() < options.torchrun else "forked" if is_forked else "fresh"
        temporary = root / f"{runs}-temporary"
        temporary.mkdir()
        run = DisturbedTraining(name, replace(kinds[name], folder=str(root / str(runs))), start, temporary)
        run.disturb(draw, min(draw.randint(1, MOST_FAULTS), options.faults - counts.total()))
        run.compare(expected[name])
        counts.update(fault.kind for fault in run.faults)
        seconds["torchrun" if start == "torchrun" else "launch"] += run.recovery()
        bad += bool(run.wrong)
        ends = "; ".join(run.wrong) or "the same bits, exactly who was hit named, nothing left"
        print(f"run {runs}, {name}, {start}, {len(run.faults)} faults: {ends}", flush=True)
        if run.wrong:
            print(f"  kept in {run.folder}")
        else:
            rmtree(run.folder)
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(f"{counts.total()} faults in {runs} runs, {bad} wrong: {told}")
    for starter, all_of_them in seconds.items():
        if len(all_of_them) > 1:
            most, worst = quantiles(all_of_them, n=20)[-1], max(all_of_them)
            told = f"{median(all_of_them):.2f} s in the median, 95 % within {most:.2f} s, {worst:.2f} s at most"
            print(f"from a fault to the first new step, {starter}: {told}, {len(all_of_them)} measured")
    if not bad:
        rmtree(root)
    sys.exit(int(bad > 0))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        program(Job(**json.loads(sys.argv[2])))
    else:
        main(tyro.cli(ChaosOptions))
