"""Bounds on times, for machines that have other work to do as well."""

import time

SAMPLE = 0.1  # seconds of a processor
SHARED = 4  # how much busier the machine may have been, where other tests run beside


def patience() -> float:
    """How much longer computing takes than on a quiet machine: about 7 where twelve processes compute on two cores."""
    begin, used = time.perf_counter(), time.process_time()
    while time.process_time() - used < SAMPLE:
        sum(range(1000))
    return (time.perf_counter() - begin) / SAMPLE


def within(seconds: float, bound: float) -> bool:
    """Whether something took no longer than `bound`, or than what `bound` comes to on a machine as busy as this one is.

    How busy it is shows only now, when it is over: a test that is `timed`, which runs alone, compares with `patience()` itself.
    """
    return seconds < bound or seconds < SHARED * bound * patience()
