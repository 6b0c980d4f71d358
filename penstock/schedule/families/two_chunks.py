"""The next actions of a rank that has two stages, chunk 0 and chunk 1, for rules that say what comes next and not which."""

from collections import defaultdict
from collections.abc import Iterator

from penstock.schedule.table import Action, Cell, Kind


class TwoChunks:
    """What a rank has done so far. Microbatches from M = `microbatches` on are counted, and left out."""

    def __init__(self, stages: tuple[int, int], microbatches: int) -> None:
        self.stages, self.microbatches = stages, microbatches
        self.done: dict[str, int] = defaultdict(int)  # F0, F1, B0 and B1, which I0 and I1 count as
        self.put_off: list[Action] = []  # each W whose I is done, the oldest first

    def run(self, *cells: str) -> Iterator[Cell]:
        """`F0` is the next forward of chunk 0, `W` the oldest weight gradient of all, if any, `F0+B1` a pair."""
        for cell in cells:
            real = [action for action in map(self._next, cell.split("+")) if action and action.microbatch < self.microbatches]
            if len(real) == 2:
                yield real[0], real[1]
            elif real:
                yield real[0]

    def _next(self, name: str) -> Action | None:
        letter, chunk = name[0], name[1:]
        if letter == "W":
            found = (action for action in self.put_off if not chunk or action.stage == self.stages[int(chunk)])
            if action := next(found, None):
                self.put_off.remove(action)
            return action
        counted = "F" + chunk if letter == "F" else "B" + chunk
        action = Action(_KINDS[letter], self.stages[int(chunk)], self.done[counted])
        self.done[counted] += 1
        if letter == "I":
            self.put_off.append(action._replace(kind=Kind.W))
        return action


_KINDS = {kind.value: kind for kind in Kind}
