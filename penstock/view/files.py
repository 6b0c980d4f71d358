"""Write pictures of timelines to files."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import PenstockError
from penstock.view.figure.shapes import Figure
from penstock.view.record import Record


def write(
    records: list[Record],
    html: Path | None = None,
    perfetto: Path | None = None,
    svg: Path | None = None,
    png: Path | None = None,
    embed: bool = False,
    extras: Collection[str] = (),
) -> Iterator[Path]:
    """Write each file that is not None, and yield its path. The HTML page shows all records, other files the last one.

    `embed`: write only the chart, for a frame in another page. `extras`: figures also show "memory", "path" or "arrows".

    Raises PenstockError if a file cannot be written, and for a figure whose name has another format's ending.
    """
    for option, figure_path in (("svg", svg), ("png", png)):
        if figure_path is not None and figure_path.suffix not in ("", f".{option}"):
            right_name = figure_path.with_suffix(f".{option}")
            raise PenstockError(
                f"--{option} {figure_path} would be {option.upper()} in a {figure_path.suffix}: give {right_name}"
            )

    from penstock.view.figure.png import save_png
    from penstock.view.figure.svg import svg as svg_text
    from penstock.view.figure.timeline import figure
    from penstock.view.html import page
    from penstock.view.perfetto import trace

    writers: tuple[tuple[Path | None, Callable[[Path], object]], ...] = (
        (html, lambda path: path.write_text(page(records, embed), encoding="utf-8")),
        (perfetto, lambda path: path.write_text(trace(records[-1]), encoding="utf-8")),
        (svg, lambda path: path.write_text(svg_text(figure(records[-1], extras)), encoding="utf-8")),
        (png, lambda path: save_png(figure(records[-1], extras), path)),
    )
    for path, writer in writers:
        if path is not None:
            with report_write_errors(path):
                writer(path)
            yield path


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure to the file `path`, in the format of its name. Raises PenstockError for another one, and as `write`."""
    from penstock.view.figure.png import save_png
    from penstock.view.figure.svg import svg

    writers: dict[str, Callable[[], object]] = {
        ".svg": lambda: path.write_text(svg(figure), encoding="utf-8"),
        ".png": lambda: save_png(figure, path),
    }
    if path.suffix not in writers:
        raise PenstockError(f"{path} is no figure that can be written: let its name end in {' or '.join(writers)}")
    with report_write_errors(path):
        writers[path.suffix]()


@contextmanager
def report_write_errors(path: str | Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes `path`, into a PenstockError."""
    try:
        yield
    except OSError as error:
        raise PenstockError(f"{path} cannot be written: {error.strerror or error}") from error
