"""Several tests on one start of the ranks: to start one and to end it takes a tenth of a second of a processor."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

import penstock as ps


def launch_once(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Return `ps.launch(function, ranks, *args)`, or raise its error; only the first test that asks starts the ranks."""
    return _launch(function, ranks, args).result()


def together(function: Callable[..., Any], ranks: int, cases: tuple[tuple[Any, ...], ...]) -> dict[tuple[Any, ...], list[Any]]:
    """Return the results of `function(*case)`, by case and rank; all cases run in one `launch_once`."""
    everyone = launch_once(rank_each, ranks, function, cases)
    return {case: [results[number] for results in everyone] for number, case in enumerate(cases)}


@cache
def _launch(function: Callable[..., Any], ranks: int, args: tuple[Any, ...]) -> Future[list[Any]]:
    """Return the results or the error: a launch that takes minutes to fail would else do so in each of its tests."""
    future = Future[list[Any]]()
    try:
        future.set_result(ps.launch(function, ranks, *args))
    except BaseException as error:  # pytest's own for a timeout is no Exception
        future.set_exception(error)
    return future


def rank_each(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [function(*case) for case in cases]
