"""Models that no laptop can run, as what their layers cost: seconds by operations, bytes as 16-bit training keeps them.

Memory is that of activations and messages: what parameters take is beside it.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median

from tables import Row, show

from penstock.partition.balance import balanced_starts as balanced
from penstock.plan import LayerCost, ModelProfile, plan
from penstock.plan.partition_search import Limits, PartitionSearch
from penstock.plan.planning import Effort, family_timers
from penstock.plan.schedule_timer import ScheduleTimer
from penstock.plan.stage_costs import LayerChain, Recompute, StageCost
from penstock.schedule import build
from penstock.schedule.catalog import FAMILIES

SPEED = 200e12  # operations a second
NUMBER = 2  # bytes
RANKS, BATCH, COUNTS = 8, 32, (8, 16, 32)


def block(name: str, tokens: int, width: int, hidden: float = 4, seen: int = 0, used: int = 1) -> LayerCost:
    """A transformer block for a row of `tokens`, which attends to itself and to `seen` tokens more.

    `hidden`: of its MLP, in widths; `used`: how many such work on each token.
    """
    attention = 4 * width**2 + (2 * width**2 * (1 + seen / tokens) if seen else 0)
    mlp = 2 * hidden * width**2
    weights = 2 * tokens * (attention + used * mlp) / SPEED
    scores = 2 * tokens * (tokens + 2 * seen) * width / SPEED
    row = NUMBER * tokens * width
    kept = row * (8 + 4 * (seen > 0) + used * (1 + 2.5 * hidden))
    needed = row * (8 + 4 * (seen > 0) + used * (2 + 2 * hidden))
    return LayerCost(name, weights + scores, weights + 2 * scores, weights, kept, needed, 0, row + NUMBER * seen * width)


def embedding(tokens: int, width: int) -> LayerCost:
    """Reads a row of its table for each token."""
    seconds, row = tokens * width * NUMBER / 2e12, NUMBER * tokens * width
    return LayerCost("embedding", seconds, 0, 2 * seconds, 8 * tokens, row, 0, row)


def head(tokens: int, width: int, vocabulary: int) -> LayerCost:
    """Logits and their loss, in 32 bits."""
    seconds = 2 * tokens * width * vocabulary / SPEED
    logits, row = tokens * vocabulary, NUMBER * tokens * width
    return LayerCost("head", seconds, seconds, seconds, row + 6 * logits, row + 2 * logits, 0, 4)


def gpt(blocks: int, tokens: int, width: int, vocabulary: int) -> ModelProfile:
    """A decoder, dense throughout."""
    middle = [block(f"blocks.{index}", tokens, width) for index in range(blocks)]
    return ModelProfile.from_layers([embedding(tokens, width), *middle, head(tokens, width, vocabulary)])


def encoder_decoder(blocks: int, tokens: int, answer: int, width: int, vocabulary: int) -> ModelProfile:
    """Encoder blocks over long rows, decoder blocks over short ones that look at what the encoder gave."""
    encoder = [block(f"encoder.{index}", tokens, width) for index in range(blocks)]
    decoder = [block(f"decoder.{index}", answer, width, seen=tokens) for index in range(blocks)]
    return ModelProfile.from_layers([embedding(tokens, width), *encoder, *decoder, head(answer, width, vocabulary)])


def hierarchical_vit() -> ModelProfile:
    """Four groups of blocks: each has a quarter of the tokens of the one before, and twice its width."""
    depths, tokens, width, layers = (2, 2, 18, 2), 96 * 96, 192, []
    for group, depth in enumerate(depths):
        layers += [block(f"groups.{group}.{index}", tokens // 4**group, width * 2**group) for index in range(depth)]
    return ModelProfile.from_layers([embedding(tokens, width), *layers, head(1, width * 8, 21_000)])


def mixture(blocks: int, tokens: int, width: int, vocabulary: int) -> ModelProfile:
    """Every second block has sixteen experts, two of which work on a token."""
    middle = [block(f"blocks.{index}", tokens, width, 2.5, used=1 + index % 2) for index in range(blocks)]
    return ModelProfile.from_layers([embedding(tokens, width), *middle, head(tokens, width, vocabulary)])


MODELS: dict[str, Callable[[], ModelProfile]] = {
    "GPT, vocabulary of 128k": lambda: gpt(32, 2048, 4096, 128_000),
    "GPT, vocabulary of 256k": lambda: gpt(28, 2048, 3072, 256_000),
    "encoder-decoder": lambda: encoder_decoder(16, 2048, 512, 2048, 64_000),
    "hierarchical ViT": hierarchical_vit,
    "mixture of experts": lambda: mixture(24, 2048, 2048, 64_000),
}


class UniformLayerChain(LayerChain):
    """The layers in a row, where all stages have one recomputation, whether that fits or not."""

    def __init__(self, layers: Sequence[LayerCost], recompute: Recompute) -> None:
        super().__init__(layers)
        self.recompute = recompute

    def stage_cost(self, start: int, end: int) -> StageCost:
        """The layers from `start` up to `end`, held so."""
        stage = super().stage_cost(start, end)
        fitting = [policy for policy in stage.policies if policy.recompute == self.recompute]
        return stage._replace(policies=(*fitting, stage.policies[-1])[:1])


def even_cut(layers: ModelProfile, terms: Limits, batch: int, counts: Sequence[int], names: Sequence[str]) -> float:
    """Seconds of the best of these families on cuts whose slowest stage is the fastest, with all recomputed or nothing."""
    best = math.inf
    for count, name in product(counts, names):
        lines = [UniformLayerChain(layers.costs_at(batch / count), way) for way in (None, "stage", "block")]
        for table in family_timers([name], len(terms.memory_bytes), count, len(layers.layer_names)):
            starts = tuple(balanced(lines[0].layer_seconds, len(table.placement)))
            for candidate in (PartitionSearch(line, table, terms).evaluate(starts) for line in lines):
                best = min(best, math.inf if candidate.excess_bytes else candidate.seconds)
    return best


def limit_of(layers: ModelProfile, ranks: int, batch: int, count: int, share: float) -> float:
    """Bytes: this `share` of what 1f1b on an even cut takes on its fullest rank."""
    line = UniformLayerChain(layers.costs_at(batch / count), None)
    cutting = PartitionSearch(line, ScheduleTimer(build("1f1b", ranks, count)), Limits((math.inf,) * ranks))
    return share * max(choice.peak_bytes for choice in cutting.evaluate(tuple(balanced(line.layer_seconds, ranks))).choices)


def large_models(effort: Effort) -> list[Row]:
    """The plan beside the best family on an even cut, with all recomputed or nothing."""
    rows: list[Row] = []
    for name, make in MODELS.items():
        for share in (0.25, 0.35, 0.45):
            layers = make()
            limit = limit_of(layers, RANKS, BATCH, 16, share)
            terms, begin = Limits((limit,) * RANKS), time.process_time()
            found = plan(
                layers,
                RANKS,
                limit,
                batch=BATCH,
                microbatches=COUNTS,
                effort=effort,
            )[0]
            took = time.process_time() - begin
            even = even_cut(layers, terms, BATCH, COUNTS, [family for family in FAMILIES if family != "naive"])
            rows.append(
                {
                    "model": name,
                    "memory": f"{share:.0%}",
                    "even cut ms": 1e3 * even,
                    "planned ms": 1e3 * found.seconds,
                    "faster %": 100 * (even / found.seconds - 1),
                    "above bound %": 100 * found.share_above_bound,
                    "schedule": found.schedule.name,
                    "planning s": took,
                }
            )
            show(rows[-1:], *rows[-1])
    print(f"faster in the median by {median(row['faster %'] for row in rows):.1f} %")
    return rows
