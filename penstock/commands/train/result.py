"""The result of a training."""

import math
from dataclasses import dataclass, field


@dataclass
class TrainResult:
    """The result of a run, on rank 0; it grows step by step."""

    ranks: int
    reordered: bool = False  # sums over replicas or `tp` have another order than in one process
    losses: list[float] = field(default_factory=list)  # of every step
    seconds: list[float] = field(default_factory=list)
    idle_shares: list[float] = field(default_factory=list)
    peak_memory: float = 0.0  # bytes, the fullest rank's
    rows_per_step: int = 0
    tokens_per_step: int = 0
    preempted: bool = False  # stopped before the last step; the steps so far are saved
    validation_loss: float = math.nan
    prompt: str = ""
    sample: str = ""
    planned_bubble: float = 0.0  # of the table with equal stages, a backward twice as long as a forward
    planned_idle: float = 0.0  # of the same table: idle share of all ranks' time
    clock_error: float = 0.0  # seconds by which the clocks of several machines may differ
    planned: str = ""  # planned and measured time of a step; the first line is printed
    explanation: str = ""  # where the time of the last steps went; the first line is the verdict
    crowding: str = ""  # a warning that ranks share cores
