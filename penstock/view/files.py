"""Write pictures of timelines to files."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import PenstockError
from penstock.view.figure.shapes import USUAL_STYLE, Figure, FigureStyle
from penstock.view.record import Record

FIGURE_SUFFIXES = (".svg", ".png", ".pdf")


def write(
    records: list[Record],
    html: Path | None = None,
    perfetto: Path | None = None,
    svg: Path | None = None,
    png: Path | None = None,
    embed: bool = False,
    extras: Collection[str] = (),
    pdf: Path | None = None,
    style: FigureStyle = USUAL_STYLE,
) -> Iterator[Path]:
    """Write each file that is not None, and yield its path. The HTML page shows all records, other files the last one.

    `embed`: write only the chart, for a frame in another page. `extras`: figures also show "memory", "path" or "arrows".
    `style`: of figures.

    Raises PenstockError if a file cannot be written, and for a figure whose name has another format's ending.
    """
    figure_paths = {"svg": svg, "png": png, "pdf": pdf}
    for option, figure_path in figure_paths.items():
        if figure_path is not None and figure_path.suffix not in ("", f".{option}"):
            right_name = figure_path.with_suffix(f".{option}")
            raise PenstockError(
                f"--{option} {figure_path} would be {option.upper()} in a {figure_path.suffix}: give {right_name}"
            )

    from penstock.view.figure.timeline_figure import figure
    from penstock.view.html import page
    from penstock.view.perfetto import trace

    if html is not None:
        yield _write_text(page(records, embed), html)
    if perfetto is not None:
        yield _write_text(trace(records[-1]), perfetto)
    for option, figure_path in figure_paths.items():
        if figure_path is not None:
            yield _write_figure(figure(records[-1], extras, style=style), figure_path, option)


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure to the file `path`, in the format of its name. Raises PenstockError for another one, and as `write`."""
    if path.suffix not in FIGURE_SUFFIXES:
        raise PenstockError(f"{path} is no figure that can be written: let its name end in {' or '.join(FIGURE_SUFFIXES)}")
    _write_figure(figure, path, path.suffix[1:])


def _write_figure(figure: Figure, path: Path, figure_format: str) -> Path:
    from penstock.view.figure.pdf import save_pdf
    from penstock.view.figure.png import save_png
    from penstock.view.figure.svg import svg

    if figure_format == "svg":
        return _write_text(svg(figure), path)
    with report_write_errors(path):
        (save_png if figure_format == "png" else save_pdf)(figure, path)
    return path


def _write_text(text: str, path: Path) -> Path:
    with report_write_errors(path):
        path.write_text(text, encoding="utf-8")
    return path


@contextmanager
def report_write_errors(path: str | Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes `path`, into a PenstockError."""
    try:
        yield
    except OSError as error:
        raise PenstockError(f"{path} cannot be written: {error.strerror or error}") from error
