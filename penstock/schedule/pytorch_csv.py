"""PyTorch's lowered tables, which contain their sends and receives, as scripts that can be proved.

Besides the cells of a table (`0F0`, `1I0`, `(0F1;3B0)OVERLAP_F_B`) a rank's row has `0SEND_F0`, which sends the output of
0F0, with `1RECV_F0` on the rank of stage 1; and `3SEND_B1`, which sends the gradient of 3B1 or 3I1, with `2RECV_B1` on the
rank of stage 2. `0WAIT_SEND_F0` waits until the rank of stage 1 has received it (torch 2.15 and later write it; before, a
send needs no wait). Cells for sharded weights are skipped. `prove(script, shared=True)` proves that the table cannot
deadlock if both directions between two ranks share one queue, as on NCCL. `prove(script)`, with a queue for each direction
as on Gloo, proves that no receive gets the tensor of another.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.program import Compute, Instruction, Script, Transfer, TransferTable, remote_transfers
from penstock.schedule.proof import check_table
from penstock.schedule.schedule import FilePath, Schedule, from_rows, parse_pytorch_csv_cell, read_csv_cells
from penstock.schedule.table import Action, Cell, actions_of

_POST = re.compile(r"([0-9]{1,9})(SEND|RECV|WAIT_SEND)_([FB])([0-9]{1,9})")


class _CommunicationCell(NamedTuple):
    """A cell that sends what `stage` makes, receives what it needs, or waits until what it sent is received."""

    text: str
    sends: bool
    waits: bool
    forward: bool
    stage: int
    microbatch: int


def script_from_compute_comms_csv(path: FilePath, name: str | None = None) -> Script:
    """Read a CSV in PyTorch's `compute_comms` form, a line for each rank.

    Raises ScheduleError as `script_from_compute_comms_rows`.
    """
    return script_from_compute_comms_rows(name or str(path), read_csv_cells(path))


def script_from_compute_comms_rows(name: str, rows: Sequence[Iterable[str]]) -> Script:
    """Return the script of a lowered table, given the texts of its cells, a row for each rank. It is not proved yet.

    Raises ScheduleError for a cell that cannot be read, a table that is incomplete, a send before its action, a wait before
    its send, an action before its receive, and for a send or a receive that is missing, duplicated or without a partner.
    """
    parsed = [[cell for text in row for cell in _parse_cell_text(text)] for row in rows]
    table = [[cell for cell in row if not isinstance(cell, _CommunicationCell)] for row in parsed]
    schedule = from_rows(name, table)
    check_table(schedule)
    transfers = TransferTable(schedule, (), range(schedule.ranks))
    script = Script(
        schedule, tuple(tuple(_instructions_of_rank(rank, row, schedule, transfers)) for rank, row in enumerate(parsed))
    )
    sent_transfers = {
        cell for rank, row in enumerate(script.rows) for cell in row if isinstance(cell, Transfer) and cell.source == rank
    }
    for transfer in chain.from_iterable(transfers.channels.values()):
        if transfer not in sent_transfers:
            raise ScheduleError(f"rank {transfer.source} never sends the {transfer}, which rank {transfer.destination} needs")
    return script


def _parse_cell_text(text: str) -> Iterator[Cell | _CommunicationCell]:
    if post := _POST.fullmatch(text.strip()):
        stage, end, direction, microbatch = post.groups()
        yield _CommunicationCell(text.strip(), end != "RECV", end == "WAIT_SEND", direction == "F", int(stage), int(microbatch))
    else:
        yield from parse_pytorch_csv_cell(text)


def _instructions_of_rank(
    rank: int, cells: Sequence[Cell | _CommunicationCell], schedule: Schedule, transfers: TransferTable
) -> Iterator[Instruction]:
    done_actions: set[Action] = set()
    posted: set[Transfer] = set()
    for number, cell in enumerate(cells):
        if isinstance(cell, _CommunicationCell):
            transfer = _find_transfer(rank, cell, schedule, transfers)
            if cell.waits:
                if transfer not in posted:
                    raise ScheduleError(f"rank {rank} has {cell.text}, but before it no send of the {transfer}")
                yield Compute(
                    next((cell for cell in cells[number:] if not isinstance(cell, _CommunicationCell)), None), (transfer,)
                )
                continue
            if transfer in posted:
                raise ScheduleError(f"rank {rank} has {cell.text} twice")
            if cell.sends and transfer.action not in done_actions:
                raise ScheduleError(f"rank {rank} has {cell.text} before {transfer.action}, which makes what is sent")
            posted.add(transfer)
            yield transfer
        else:
            needs = []
            for action in actions_of(cell):
                for arriving in remote_transfers(transfers.inputs_of(action)):
                    if arriving not in posted:
                        raise ScheduleError(f"rank {rank} has {action}, but before it no receive of the {arriving}")
                    needs.append(arriving)
            done_actions.update(actions_of(cell))
            yield Compute(cell, tuple(needs))


def _find_transfer(rank: int, post: _CommunicationCell, schedule: Schedule, transfers: TransferTable) -> Transfer:
    """Return the transfer that `post` sends or receives. Raises ScheduleError if there is none."""
    if not post.stage < schedule.num_stages or schedule.placement[post.stage] != rank:
        raise ScheduleError(f"rank {rank} has {post.text}, but not stage {post.stage}")
    onward = 1 if post.forward else -1
    maker = post.stage if post.sends else post.stage - onward
    transfer = transfers.by_stages.get((maker, maker + onward), {}).get(post.microbatch)
    if transfer is None or not transfer.is_remote:
        raise ScheduleError(f"rank {rank} has {post.text}, but no other rank makes or needs that")
    return transfer
