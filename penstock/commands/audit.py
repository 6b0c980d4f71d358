"""The command `penstock audit`: two runs compared by the digests they have kept."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from penstock.commands.source import nearest_path
from penstock.errors import PenstockError


@dataclass(frozen=True)
class Audit:
    """Compare two runs by the digests they have kept: names the first step, kind and name that differ.

    Exit code 0: the same to the bit; 1: not the same; 2: not comparable, or different where no bits are promised.
    """

    run_a: tyro.conf.Positional[Path]
    """The folder of a run."""
    run_b: tyro.conf.Positional[Path]
    """That of another, on any other ranks, cut and schedule."""

    def run(self) -> None:
        """Read, compare, tell."""
        from penstock.checkpoint.audit import compare

        try:
            for folder in (self.run_a, self.run_b):
                if not folder.exists():
                    raise PenstockError(f"{folder} does not exist{nearest_path(folder)}")
            same, told = compare(self.run_a, self.run_b)
        except PenstockError as error:
            print(f"penstock: {error}", file=sys.stderr)
            sys.exit(2)
        print(told)
        sys.exit(0 if same else 1)
