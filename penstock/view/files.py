"""Pictures of timelines, each written to the file it is asked for."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import PenstockError
from penstock.view.record import Record


def write(
    records: list[Record],
    html: Path | None = None,
    perfetto: Path | None = None,
    svg: Path | None = None,
    png: Path | None = None,
    embed: bool = False,
    also: Collection[str] = (),
) -> Iterator[Path]:
    """Write `records` to those files that are given, and yield each once it is there; all but the page take the last record.

    `embed`: the page is the chart alone, to stand in another page. `also`: what figures show besides, of "memory", "path" and
    "arrows".

    Raises PenstockError where a file cannot be written.
    """
    from penstock.view.figure.png import save_png
    from penstock.view.figure.svg import svg as drawn
    from penstock.view.figure.timeline import figure
    from penstock.view.html import page
    from penstock.view.perfetto import trace

    writers: tuple[tuple[Path | None, Callable[[Path], object]], ...] = (
        (html, lambda path: path.write_text(page(records, embed), encoding="utf-8")),
        (perfetto, lambda path: path.write_text(trace(records[-1]), encoding="utf-8")),
        (svg, lambda path: path.write_text(drawn(figure(records[-1], also)), encoding="utf-8")),
        (png, lambda path: save_png(figure(records[-1], also), path)),
    )
    for path, writer in writers:
        if path is not None:
            with writing(path):
                writer(path)
            yield path


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Around what writes the file or folder `path`. Raises PenstockError where the system refuses that."""
    try:
        yield
    except OSError as error:
        raise PenstockError(f"{path} cannot be written: {error.strerror or error}") from error
