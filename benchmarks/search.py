"""What `ps.schedule.search` finds, on instances made from seeds: beside the best published table, and how far above the bound.

    python benchmarks/search.py                              # small and unequal at quick, about 5 minutes
    python benchmarks/search.py --only deep --effort long    # P=8 in V-Min's memory
    python benchmarks/search.py --only small unequal noise --effort normal
    python benchmarks/search.py --only small --instances 7 --against optimal    # other instances, beside the optimum

`small` has P = 3 and 4, V = 2, equal stages, a dearer head, and stages that differ by up to 30 %, at several limits;
`--against` searches for each once more, with that effort and another seed. `deep` is P = 8 at F:I:W = 3:4:2 in V-Min's memory.
`unequal` is P = 6 with stages that differ, in V-Min's memory; `noise` takes its tables and gives every action another cost,
+-10 %, 200 times.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator

from tables import Row, show

from penstock.schedule import Costs, Found, Kind, Schedule, build, search, simulate
from penstock.schedule.table import PLACEMENTS

SEED = 20261122


def instance(kind: str, stages: int, dice: random.Random) -> Costs:
    """Costs of `kind`, F:I:W = 3:4:2 before they differ; a microbatch takes 1 on a rank of two stages."""
    times = [[base] * stages for base in (30.0, 40.0, 20.0)]
    if kind == "head":
        times = [[*each[:-1], 1.6 * each[-1]] for each in times]
    if kind == "stage":
        factors = [dice.uniform(0.7, 1.3) for _ in range(stages)]
        times = [[time * factor for time, factor in zip(each, factors, strict=True)] for each in times]
    if kind == "stage and kind":
        times = [[time * dice.uniform(0.7, 1.3) for time in each] for each in times]
    forward, inputs, weights = times
    return Costs(forward, inputs, weights, act=0.5)


def row(name: str, costs: Costs, placement: str, ranks: int, microbatches: int, limit: float, effort: str, seed: int) -> Row:
    """What is found for an instance."""
    began = time.process_time()
    found = search(costs, PLACEMENTS[placement](2 * ranks, ranks), microbatches, limit, effort, seed)
    gain = None if found.family_makespan is None else 100 * (1 - found.makespan / found.family_makespan)
    return {
        "instance": name,
        "P": ranks,
        "M": microbatches,
        "placement": placement,
        "limit": limit,
        "makespan": found.makespan,
        "family": found.family,
        "gain %": gain,
        "above bound %": 100 * (found.makespan / found.bound - 1),
        "proven": str(found.proven),
        "CPU s": time.process_time() - began,
        "found": found,
        "costs": costs,
    }


def small(effort: str, seed: int, instances: int) -> Iterator[Row]:
    """Tiny and small pipelines at limits from a third of P to 2 P microbatches."""
    dice = random.Random(instances)
    for ranks, microbatches in ((3, 5), (3, 6), (4, 6), (4, 8)):
        for kind in ("equal", "head", "stage", "stage and kind"):
            for placement in PLACEMENTS:
                limit = dice.choice([-(-2 * ranks // 3) / 2, ranks / 2, ranks * 0.75, ranks, 2 * ranks])
                yield row(kind, instance(kind, 2 * ranks, dice), placement, ranks, microbatches, max(1.0, limit), effort, seed)


def above(rows: list[Row], effort: str, seed: int) -> None:
    """Search for each of `rows` again with another effort, and note how far above the shorter table the row's is."""
    for each in rows:
        placement = each["found"].schedule.placement
        again = search(each["costs"], placement, each["M"], each["limit"], effort, seed)
        best = min(each["makespan"], again.makespan)
        each["above best %"] = 100 * (each["makespan"] / best - 1)
        each["proven"] = str(each["found"].proven or (again.proven and again.makespan == best))


def deep(effort: str, seed: int, instances: int) -> Iterator[Row]:
    """P = 4 at a limit of 2 microbatches, and P = 8 in V-Min's memory."""
    for ranks, microbatches in ((4, 8), (8, 16), (8, 32)):
        costs = instance("equal", 2 * ranks, random.Random(SEED))
        limit = max(simulate(build("v-min", ranks, microbatches), costs).peak_memory)
        yield row("3:4:2", costs, "V", ranks, microbatches, limit, effort, seed)


def unequal(effort: str, seed: int, instances: int) -> Iterator[Row]:
    """Stages that differ, in V-Min's memory."""
    dice = random.Random(instances)
    for kind in ("head", "stage", "stage", "stage and kind", "stage and kind"):
        costs = instance(kind, 12, dice)
        limit = max(simulate(build("v-min", 6, 12), costs).peak_memory)
        yield row(kind, costs, "V", 6, 12, limit, effort, seed)


def noise(rows: list[Row]) -> list[Row]:
    """How much of their gain tables keep, and how often they win, where every action takes up to 10 % more or less."""
    return [_kept(each) for each in rows if each["family"] and each["gain %"] > 0]


def _kept(each: Row, draws: int = 200) -> Row:
    found: Found = each["found"]
    published = build(found.family or "", found.schedule.ranks, found.schedule.microbatches)
    dice, pairs = random.Random(SEED), []
    for _ in range(draws):
        factors: dict[tuple[Kind, int, int], float] = {}
        pairs.append([_noisy(table, each["costs"], factors, dice) for table in (found.schedule, published)])
    gains = [100 * (1 - mine / theirs) for mine, theirs in pairs]
    return {
        "instance": each["instance"],
        "gain %": each["gain %"],
        "with noise %": statistics.median(gains),
        "worst %": min(gains),
        "wins %": 100 * sum(gain > 0 for gain in gains) / draws,
    }


def _noisy(table: Schedule, costs: Costs, factors: dict[tuple[Kind, int, int], float], dice: random.Random) -> float:
    """The makespan where each action takes its own time: those of the simulator's order, one after the other."""
    times, ends = costs.action_costs(table.num_stages), dict[tuple[Kind, int, int], float]()
    free = [0.0] * table.ranks
    for event in sorted(simulate(table, costs).events, key=lambda event: (event.start, event.end)):
        kind, stage, microbatch, _ = event.action
        after = [(Kind.F, stage - 1)] if kind is Kind.F else [(Kind.I, stage + 1), (Kind.B, stage + 1), (Kind.F, stage)]
        needed = [ends.get((*before, microbatch), 0.0) for before in after]
        factor = factors.setdefault((kind, stage, microbatch), dice.uniform(0.9, 1.1))
        free[event.rank] = max(free[event.rank], *needed) + times[kind][stage] * factor
        ends[kind, stage, microbatch] = free[event.rank]
    return max(free)


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["small", "deep", "unequal", "noise"], default=["small", "unequal"])
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--instances", type=int, default=SEED, help="the seed from which the instances are made")
    parser.add_argument("--against", help="an effort: each of `small` is searched for once more")
    options = parser.parse_args()
    columns = ("instance", "P", "M", "placement", "limit", "makespan", "family", "gain %", "above bound %", "proven", "CPU s")
    for name, rows in (("small", small), ("deep", deep), ("unequal", unequal)):
        if name in options.only or (name == "unequal" and "noise" in options.only):
            found = list(rows(options.effort, options.seed, options.instances))
            print(f"\n{name}, effort {options.effort}, seed {options.seed}, instances {options.instances}")
            show(found, *columns)
            if name == "small" and options.against:
                above(found, options.against, options.seed + 1)
                show(found, "instance", "P", "M", "placement", "limit", "makespan", "above best %", "proven")
                gaps = [each["above best %"] for each in found]
                print(f"above the best known: worst {max(gaps):.2f} %, median {statistics.median(gaps):.2f} %,", end=" ")
                print(f"{sum(gap > 1 for gap in gaps)} above 1 %, {sum(gap > 3 for gap in gaps)} above 3 %")
            gains = [each["gain %"] for each in found if each["gain %"] is not None]
            print(f"shorter than the best published table: {statistics.median(gains):.1f} % in the median")
    if "noise" in options.only:
        print("\nnoise, the tables of unequal stages")
        show(noise(found), "instance", "gain %", "with noise %", "worst %", "wins %")


if __name__ == "__main__":
    main()
