"""Two runs compared by their digests, or the ranks of one: the first step, and what in it, that is not the same."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.checkpoint.audit.digests import told
from penstock.checkpoint.audit.trail import FILE
from penstock.checkpoint.files import json_lines
from penstock.engine.checks.digest import ranks_by_digest
from penstock.errors import PenstockError

KINDS = ("outputs", "gradients", "optimizer", "weights")  # in the order in which a step makes them
REASONS = {  # a condition that two runs may differ in -> why bits are not promised then
    "dp": "sums over replicas have another order",
    "tp": "sums over ranks that share products have another order",
    "sharded": "fully_shard sums in another order than DistributedDataParallel",
    "order": "the microbatches' gradients are summed in another order",
    "device": "devices have kernels of their own",
    "torch": "releases of torch have kernels of their own",
    "processor": "processors have kernels of their own",
    "threads": "how many threads compute a product decides its bits",
}
UNSTEADY = "kernels of a device may sum in another order each time, see torch.use_deterministic_algorithms"


class NotComparable(PenstockError):
    """Runs that cannot be compared, or that differ where no bits are promised."""


class Step(NamedTuple):
    """What a run has kept of a step."""

    run: Mapping[str, Any]  # what it was started or resumed with, and where it had what
    digests: Mapping[str, Mapping[str, Any]]  # kind -> name -> digest, or several by rank


class Run(NamedTuple):
    """What a run in `folder` has kept."""

    folder: Path
    steps: Mapping[int, Step]


class Difference(NamedTuple):
    """Something that is not the same in two runs."""

    kind: str
    name: str
    digests: tuple[Any, Any]


def read(folder: Path) -> Run:
    """What the run in `folder` has kept. Raises NotComparable if that is nothing."""
    path = folder / FILE
    if not path.is_file():
        raise NotComparable(f"{folder} has no {FILE}: give the folder of a run that keeps digests (--digests-every, Trail)")
    steps, run = dict[int, Step](), dict[str, Any]()
    try:
        for record in json_lines.read(path):
            if "run" in record:
                run = {key: record["run"][key] for key in ("settings", "conditions", "parameters", "layers", "ranks")}
            else:
                steps[int(record["step"])] = Step(run, {kind: dict(record[kind]) for kind in KINDS if kind in record})
        run["conditions"]["deterministic"]  # a file without a line of a start is damaged, too
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotComparable(f"{path} is damaged, it is not what Penstock wrote there") from error
    if not steps:
        raise NotComparable(f"{path} has no step yet")
    return Run(folder, steps)


# -- one run ------------------------------------------------------------------------------------------------------------


def alone(run: Run) -> tuple[bool, str]:
    """Whether in each of its steps the ranks that have the same parameter agree; and what it has kept."""
    last = run.steps[max(run.steps)].digests
    kept = ", ".join(f"{len(named)} {kind}" for kind, named in last.items())
    text = f"{run.folder} has digests of {_several(list(run.steps))}: {kept}"
    for number, step in run.steps.items():
        for kind, name, by_rank in _apart(step):
            place = f"{told(kind, name)}, {_stage(step.run, kind, name)}: {ranks_by_digest(by_rank)}"
            return False, f"{text}\nstep {number} is the first in which ranks that have the same differ: {place}"
    return True, f"{text}\nranks that have the same parameter agree in it, in every step"


def _apart(step: Step) -> Iterator[tuple[str, str, Mapping[str, str]]]:
    """What ranks that share it have not alike: kind, name, digests by rank."""
    for kind, named in step.digests.items():
        yield from ((kind, name, each) for name, each in named.items() if isinstance(each, dict))


def _several(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"


# -- two runs -----------------------------------------------------------------------------------------------------------


def compare(a: Run, b: Run) -> tuple[bool, str]:
    """Whether two runs are the same to the bit, in all steps that both have kept; and in words, where not.

    Raises NotComparable for runs of other settings or another model, without a common step, and for runs that differ though
    no bits were promised.
    """
    common = sorted(a.steps.keys() & b.steps.keys())
    if not common:
        kept = " and ".join(f"{_several(list(each.steps))} in {each.folder}" for each in (a, b))
        raise NotComparable(f"the runs have no step in common: {kept}")
    equal: list[int] = []
    for number in common:
        one, other = a.steps[number], b.steps[number]
        _check_comparable(one.run, other.run)
        if found := differences(one, other):
            text = _told(a, b, number, equal, found)
            if doubts := not_promised(one.run, other.run):
                raise NotComparable(f"no bits are promised between these runs: {'; '.join(doubts)}\n{text}")
            return False, text
        equal.append(number)
    digests = a.steps[common[-1]].digests
    kept = ", ".join(f"{len(named)} {kind}" for kind, named in digests.items() if kind in b.steps[common[-1]].digests)
    return True, f"the same to the bit in {_several(common)}: {kept}"


def _check_comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raises NotComparable for runs of other settings, or of another model."""
    settings, others = one["settings"], other["settings"]
    unlike = [name for name in {**settings, **others} if settings.get(name) != others.get(name)]
    if unlike:
        pairs = ", ".join(f"{name} {settings.get(name)} and {others.get(name)}" for name in unlike)
        raise NotComparable(f"the runs cannot be compared, they have {pairs}")
    if lacking := [*(one["parameters"].keys() ^ other["parameters"].keys())]:
        raise NotComparable(f"the runs cannot be compared, they have other models: only one has {min(lacking)}")


def not_promised(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Why two runs need not have the same bits: nothing if they must."""
    here, there = one["conditions"], other["conditions"]
    reasons = [
        f"{reason} ({name} {here.get(name)} and {there.get(name)})"
        for name, reason in REASONS.items()
        if here.get(name) != there.get(name)
    ]
    return reasons + ([] if here["deterministic"] and there["deterministic"] else [UNSTEADY])


def differences(one: Step, other: Step) -> list[Difference]:
    """What is not the same in a step of two runs, in the order in which a step makes it: gradients from the last layer on."""
    order = {name: place for place, name in enumerate([*one.run["layers"], *one.run["parameters"]])}
    found = []
    for kind in KINDS:
        here, there = one.digests.get(kind, {}), other.digests.get(kind, {})
        names = here.keys() & there.keys() if kind == "outputs" or not (here and there) else here.keys() | there.keys()
        for name in sorted(names, key=lambda name: order.get(name, 0), reverse=kind == "gradients"):
            if here.get(name) != there.get(name):
                found.append(Difference(kind, name, (here.get(name), there.get(name))))
    return found


def _told(a: Run, b: Run, number: int, equal: list[int], found: list[Difference]) -> str:
    """The first of the differences that were `found` in a step, with where it is in each run, and how many there are."""
    kind, name, digests = found[0]
    runs = [(run, _stage(run.steps[number].run, kind, name)) for run in (a, b)]
    lines = [
        f"step {number} is the first that differs{f', {equal[-1]} is the same' if equal else ''}: {told(kind, name)}",
        *(f"  {_hex(digest)} in {run.folder}, {place}" for (run, place), digest in zip(runs, digests, strict=True)),
    ]
    kinds = [each.kind for each in found]
    counts = ", ".join(f"{kinds.count(each)} of {len(a.steps[number].digests[each])} {each}" for each in KINDS if each in kinds)
    lines.append(f"  different in that step: {counts}")
    between = number - (equal[-1] if equal else 0)
    if between > 1:
        lines.append(f"  it began in one of the {between} steps up to that: --digests-every 1 (every=1) tells in which")
    return "\n".join(lines)


def _hex(digest: Any) -> str:
    return "nothing" if digest is None else ranks_by_digest(digest) if isinstance(digest, dict) else digest


def _stage(run: Mapping[str, Any], kind: str, name: str) -> str:
    """Where a run has a layer or a parameter."""
    stages = [run["layers"][name]] if kind == "outputs" else run["parameters"].get(name, [])
    ranks = sorted({rank for stage in stages for rank in run["ranks"][stage]})
    return " and ".join(f"stage {stage}" for stage in stages) + f", rank{'s' * (len(ranks) > 1)} {'/'.join(map(str, ranks))}"
