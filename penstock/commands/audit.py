"""`penstock audit`: compare two runs by their digests."""

import sys
from pathlib import Path

import tyro

from penstock.commands.command_options import command
from penstock.commands.source import nearest_path
from penstock.errors import PenstockError


@command(run_a="RUN_A", run_b="RUN_B")
class AuditCommand:
    """Find the first step in which two runs differ.

    Exit code 0: the same to the bit. 1: different. 2: not comparable, or different where no equal bits are promised.
    """

    run_a: tyro.conf.Positional[Path]
    """Folder of a run."""
    run_b: tyro.conf.Positional[Path]
    """Folder of another run; its ranks, cut and schedule may differ."""

    def run(self) -> None:
        """Compare the digests, print the result and exit."""
        from penstock.checkpoint.training_digests import compare_runs

        try:
            for folder in (self.run_a, self.run_b):
                if not folder.exists():
                    raise PenstockError(f"{folder} does not exist{nearest_path(folder)}")
            are_equal, report = compare_runs(self.run_a, self.run_b)
        except PenstockError as error:
            print(f"penstock: {error}", file=sys.stderr)
            sys.exit(2)
        print(report)
        sys.exit(0 if are_equal else 1)
