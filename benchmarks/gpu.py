"""What a step costs on a GPU: beside plain PyTorch, in two backwards, in host time, and with two ranks that share it.

    python benchmarks/gpu.py                     # all parts on the first GPU, width 2048, bfloat16
    python benchmarks/gpu.py --width 4096 --part step
    python benchmarks/gpu.py --device cpu --width 64 --rows 1 --time 16 --turns 2   # that it runs, nothing more

step     one rank: a loop of plain PyTorch over the microbatches, 1F1B (F, B), and zb-h1 (F, I, W)
host     the same at a width of 64: the device is never behind, so that a step's time is what the host takes to tell it
split    one stage: our backward in two beside torch's stage_backward_input and stage_backward_weight
pair     two ranks on the one device, through host memory, beside one process with the same work
line     a message from one rank to another, both ways
stalls   a step under torch's profiler: where the device stands still, and what the host waits in (benchmarks/stalls.py)

What is compared is timed in turns (not `pair` and `line`, whose processes differ); printed are medians, and ratios turn by turn
with their quartiles. Goals are printed with what was reached; nothing is asserted.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import stalls
import torch
from split import Ours, Theirs
from torch import Tensor, nn

import penstock as ps
from penstock.commands.machine.doctor import ping_pong
from penstock.comms.topology import Topology
from penstock.model import GPT, GPTConfig

MICROBATCHES, LAYERS, VOCABULARY = 8, 4, 1024
WARM_UP = 3
NARROW = 64  # a width at which the device has nothing to do
PLAIN, WHOLE, SPLIT = "plain PyTorch", "1f1b (F, B)", "zb-h1 (F, I, W)"
ACTIONS = {PLAIN: 2, WHOLE: 2, SPLIT: 3}  # of a microbatch

Act = Callable[[], object]


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """In float32, as plain PyTorch's users have it."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def subject(options: argparse.Namespace, width: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A GPT in bfloat16 on the device, and a batch there."""
    torch.manual_seed(0)
    config = GPTConfig(VOCABULARY, options.time, width, LAYERS, max(1, width // 64))
    tokens = torch.randint(VOCABULARY, (options.rows * MICROBATCHES, options.time + 1)).to(options.device)
    return GPT(config).to(options.device, torch.bfloat16), tokens[:, :-1], tokens[:, 1:]


def settle(device: torch.device) -> None:
    """Wait for everything that the device was told."""
    torch.get_device_module(device).synchronize()


def timed(act: Act, device: torch.device) -> float:
    """Seconds until the device is done."""
    settle(device)
    begin = time.perf_counter()
    act()
    settle(device)
    return time.perf_counter() - begin


def in_turns(acts: dict[str, Act], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each, turn by turn; neither always goes first."""
    times: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(WARM_UP + options.turns):
        for name in acts if turn % 2 else reversed(acts):
            times[name].append(timed(acts[name], options.device))
    return {name: duration[WARM_UP:] for name, duration in times.items()}


def told(times: dict[str, list[float]], base: str, per: dict[str, int] | None = None) -> None:
    """A line for each: its median, and its ratio to `base` turn by turn; `per`: microseconds for each of so many actions."""
    for name, duration in times.items():
        ratios = [one / other for one, other in zip(duration, times[base], strict=True)]
        low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        action = f", {1e6 * median(duration) / (per[name] * MICROBATCHES):8.1f} us an action" if per else ""
        print(
            f"  {name:22} {1e3 * median(duration):9.3f} ms, {middle:.3f} of {base} ({low:.3f} to {high:.3f}){action}",
            flush=True,
        )


def goal(what: str, reached: float, most: float) -> None:
    """A line for a goal."""
    print(f"  goal: {what} at most {most:g}: {reached:.3f}, {'reached' if reached <= most else 'NOT reached'}", flush=True)


def ways(options: argparse.Namespace, width: int) -> dict[str, Act]:
    """A step by each way; they share the weights, and add to their gradients."""
    model, inputs, target = subject(options, width)
    topology = Topology(device=options.device)

    def plain() -> None:
        for part, wanted in zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            loss = token_loss(model(part), wanted)
            loss.backward(torch.full_like(loss, 1 / MICROBATCHES))

    def penstock(schedule: str) -> Act:
        pipe = ps.Pipeline(model, token_loss, schedule, MICROBATCHES, topology=topology, seed=None)
        return lambda: pipe.step(inputs, target=target)

    return {PLAIN: plain, WHOLE: penstock("1f1b"), SPLIT: penstock("zb-h1")}


def part_step(options: argparse.Namespace) -> None:
    """A step by each way."""
    times = in_turns(ways(options, options.width), options)
    told(times, PLAIN, ACTIONS)
    print("  I + W beside B:")
    told({name: times[name] for name in (WHOLE, SPLIT)}, WHOLE)
    goal("I + W beside B", median(times[SPLIT]) / median(times[WHOLE]), most=1.05)


def part_host(options: argparse.Namespace) -> None:
    """The same where the device is never behind."""
    narrow = in_turns(ways(argparse.Namespace(**{**vars(options), "time": 16, "rows": 1}), NARROW), options)
    told(narrow, PLAIN, ACTIONS)
    wide = in_turns({WHOLE: ways(options, options.width)[WHOLE]}, options)
    goal(
        f"the host's time beside the device's at width {options.width}", median(narrow[WHOLE]) / median(wide[WHOLE]), most=0.15
    )


def part_split(options: argparse.Namespace) -> None:
    """The backward in two by both libraries, of a stage of two blocks."""
    model, inputs, _ = subject(options, options.width)
    module = nn.Sequential(model[1], model[2])
    with torch.no_grad():
        value = model[0](inputs[: options.rows])
    gradient, acts = torch.randn_like(value), dict[str, Act]()
    for name, make in (("our B", Ours), ("our I + W", Ours), ("torch's B", Theirs), ("torch's I + W", Theirs)):
        engine: Any = make(module, "W" in name, options.device)

        def lap(engine: Any = engine) -> None:
            for _ in range(MICROBATCHES):
                engine.forward(value.detach().requires_grad_())
                engine.backward(gradient)

        acts[name] = lap
    told(in_turns(acts, options), "our B")


def rank_of_pair(options: argparse.Namespace) -> list[float]:
    """Seconds of a step, on every rank alike."""
    topology = ps.comms.init_distributed("gloo", device=options.device)
    model, inputs, target = subject(options, options.width)
    pipe = ps.Pipeline(model, token_loss, "1f1b", MICROBATCHES, topology=topology, seed=None)
    return [timed(lambda: pipe.step(inputs, target=target), options.device) for _ in range(WARM_UP + options.turns)][WARM_UP:]


def part_pair(options: argparse.Namespace) -> None:
    """Two ranks on the device beside one."""
    times = {}
    for ranks, name in {1: "one process", 2: "two ranks"}.items():
        times[name] = [max(step) for step in zip(*ps.launch(rank_of_pair, ranks, options), strict=True)]
    told(times, "one process")


def part_line(options: argparse.Namespace) -> None:
    """A message of several sizes."""
    for way, times in ps.launch(ping_pong, 2, str(options.device))[0].items():
        for floats, seconds in times.items():
            print(f"  {4 * floats:>11,} bytes {1e6 * seconds:8.0f} us, {4e-9 * floats / seconds:7.2f} GB/s: {way}", flush=True)


def part_stalls(options: argparse.Namespace) -> None:
    """A step under the profiler."""
    acts = ways(options, options.width)
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate((WHOLE, SPLIT)):
            for _ in range(WARM_UP):
                acts[name]()
            settle(options.device)
            with torch.profiler.profile() as profile:
                acts[name]()
                settle(options.device)
            trace = Path(options.traces or folder) / f"trace-{number}.json.gz"
            profile.export_chrome_trace(str(trace))
            print(f"  {name}: {stalls.read(trace)}", flush=True)


PARTS = {
    "step": part_step, "host": part_host, "pair": part_pair, "line": part_line, "split": part_split, "stalls": part_stalls,
}  # fmt: skip


def main() -> None:
    """Measure and print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="one of them; by default all")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4, help="of a microbatch")
    parser.add_argument("--time", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--turns", type=int, default=15, help="steps of each kind")
    parser.add_argument("--traces", type=Path, help="a folder in which the profiler's traces are kept")
    options = parser.parse_args()
    where = torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else options.device
    size = (
        f"GPT of {LAYERS} blocks, width {options.width}, {MICROBATCHES} microbatches of {options.rows} x {options.time} tokens"
    )
    print(f"{where}, torch {torch.__version__}; {size}, bfloat16")
    for name in [options.part] if options.part else PARTS:
        print(name, flush=True)
        PARTS[name](options)


if __name__ == "__main__":
    main()
