"""Rows of results, printed as aligned tables."""

from typing import Any

Row = dict[str, Any]


def show(rows: list[Row], *columns: str) -> None:
    """Print these columns of the rows, aligned."""
    lines = [columns, *(tuple(_text(row[column]) for column in columns) for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
    if type(value) is tuple:
        return " ".join(_text(item) if item is None else f"{item:.3f}" for item in value)
    return "-" if value is None else str(value)
