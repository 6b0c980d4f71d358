"""Results of ranks that several tests read."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

from shared_ranks import on_ranks


def launch_once(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Return `on_ranks(function, ranks, *args)`, or raise its error; it runs for the first test that asks."""
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
        future.set_result(on_ranks(function, ranks, *args))
    except BaseException as error:  # pytest's own for a timeout is no Exception
        future.set_exception(error)
    return future


def rank_each(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [function(*case) for case in cases]
