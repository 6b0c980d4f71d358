"""`penstock studio` and `penstock watch`: serve pages to this machine's browser."""

from functools import partial
from pathlib import Path

import tyro

from penstock.commands.command_options import command
from penstock.commands.source import nearest_path, question_of
from penstock.errors import PenstockError


@command(file="[FILE]")
class StudioCommand:
    """Open the playground: edit and prove schedules on a page."""

    file: tyro.conf.Positional[str | None] = None
    """A table to open: .csv, .py (run here), a plan.json or a run's timeline.json; read again when it changes."""
    ranks: int = 4
    """Ranks of the table that a Python file makes."""
    microbatches: int = 8
    """Microbatches of the table that a Python file makes."""
    port: int = 0
    """Port of the page, on 127.0.0.1 only; 0 takes any free port."""
    browser: bool = True
    """Open the page in a browser."""

    def run(self) -> None:
        """Serve until Ctrl-C."""
        from penstock.view.studio.studio_server import OpenedFile, serve

        opened_file = None
        if self.file:
            read = partial(question_of, self.file, self.ranks, self.microbatches)
            read()  # raises here, before anything is served
            opened_file = OpenedFile(Path(self.file), read)
        serve(self.port, self.browser, opened_file)


@command(run_folder="RUN")
class WatchCommand:
    """Open the page of a run, while it trains or afterwards."""

    run_folder: tyro.conf.Positional[Path]
    """Folder of a run of `penstock train`."""
    port: int = 0
    """Port of the page, on 127.0.0.1 only; 0 takes any free port."""
    browser: bool = True
    """Open the page in a browser."""

    def run(self) -> None:
        """Serve until Ctrl-C."""
        if not (self.run_folder / "run.json").is_file():
            raise PenstockError(f"{self.run_folder} is no run, it has no run.json{nearest_path(self.run_folder)}")
        from penstock.view.watch.watch_server import serve

        serve(self.run_folder, self.port, self.browser)
