"""Copies of a tied parameter on several ranks, compared now and then: they are told before numbers go on that differ.

All owners get the same gradient, and the optimizer of each changes its own copy. Where that is not the same on all of them, the
model is no longer the uncut one.
"""

from penstock.comms.control import Control
from penstock.engine.checks.digest import crc_of, ranks_by_digest
from penstock.engine.checks.intervals import is_power_of_two
from penstock.errors import MismatchError
from penstock.stage.tied import TiedParameters

MOST_STEPS_BETWEEN = 64
CAUSES = (
    "usual causes are an optimizer whose groups are made by kinds of modules instead of names of pipe.named_parameters(), "
    "clipping by the norm of a list of parameters instead of pipe.clip_grad_norm_, another learning rate or optimizer on one "
    "rank, and weights loaded on one rank only; mend that, then load the weights on all ranks, as checkpoint.resume does"
)


def is_due(steps: int) -> bool:
    """Whether copies are compared after so many `steps`: 0, 1, 2, 4, .., then every `MOST_STEPS_BETWEEN`."""
    return steps % MOST_STEPS_BETWEEN == 0 or is_power_of_two(steps)


def check(control: Control, tied: TiedParameters, steps: int) -> None:
    """Raises MismatchError, the same on every rank, where owners of a tied parameter have other values. All ranks call it."""
    mine = {name: f"{crc_of(copy):08x}" for name, copy in tied.copies.items()}
    everyone = control.gather_objects(mine, "to compare tied parameters")
    for name in tied.owners:
        by_rank = {str(rank): digests[name] for rank, digests in enumerate(everyone) if name in digests}
        if len({*by_rank.values()}) > 1:
            told = f"after {steps} steps {name} is not the same on the ranks that share it ({ranks_by_digest(by_rank)})"
            raise MismatchError(f"{told}: {CAUSES}")
