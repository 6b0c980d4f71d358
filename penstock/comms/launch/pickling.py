"""What ranks are to run, as bytes: by name where they can import it, by value where it was typed: in a notebook, at a prompt.

A script's functions travel by name, as pickle has them: ranks import the script. What was typed, piped in or given to
`python -c` is in no file, so cloudpickle takes its functions and classes apart, with the globals they use.
"""

import inspect
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import process
from typing import Any

from penstock.errors import PenstockError


def pickle_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The function and its arguments, for `unpickled`. Raises PenstockError if they do not pickle."""
    by_value = _is_typed(function)
    try:
        return choose_dumps(by_value)((function, args, _typed_lines() if by_value else None))
    except Exception as error:  # of whatever an object does when it is pickled
        name = getattr(function, "__qualname__", repr(function))
        hint = "define it at the top level of a module, and pass arguments that pickle"
        if by_value:
            used = _unpicklable(function)
            hint = f"make {' and '.join(used) or 'what does not pickle'} inside of {name}, or pass arguments that pickle"
        raise PenstockError(f"cannot send {name} to other processes ({error}): {hint}") from error


def unpickle_call(work: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], bool]:
    """The function, its arguments, and whether they came by value: so do results go back."""
    try:
        function, args, lines = pickle.loads(work)
    except Exception as error:  # it is of a module that this process cannot import
        told = f"ranks cannot read the function that they are to run, or its arguments ({' '.join(str(error).split())})"
        raise PenstockError(f"{told}: define it in a file, and import it from there") from error
    if lines is None:
        return function, args, False

    linecache.cache.update(lines)  # tracebacks show them
    if function.__module__ == "__main__":  # where classes of values that travel between stages are looked up by name
        used = getattr(inspect.unwrap(function), "__globals__", {})
        vars(sys.modules["__main__"]).update({name: value for name, value in used.items() if not name.startswith("__")})
    return function, args, True


def choose_dumps(by_value: bool) -> Callable[[Any], bytes]:
    """What pickles an object by value, or by name."""
    if not by_value:
        return pickle.dumps
    import cloudpickle  # only those who need it wait for it

    return cloudpickle.dumps


@contextmanager
def hide_missing_main_file() -> Iterator[None]:
    """Processes started inside import the program they belong to, but do not look for one that is in no file: `<stdin>`."""
    main = sys.modules["__main__"]
    hidden = {} if _has_file(main) or not hasattr(main, "__file__") else {"__file__": main.__file__}
    for name in hidden:
        delattr(main, name)
    try:
        yield
    finally:
        vars(main).update(hidden)


def _is_typed(function: Any) -> bool:
    """Whether ranks cannot import it, since its program, or its own code, is in no file."""
    main = sys.modules["__main__"]
    code = getattr(inspect.unwrap(function), "__code__", None)
    typed_later = code is not None and function.__module__ == "__main__" and not os.path.isfile(code.co_filename)
    return not _has_file(main) or typed_later


def _has_file(main: Any) -> bool:
    """Whether other processes can import the program, as `multiprocessing` would."""
    if getattr(getattr(main, "__spec__", None), "name", None) is not None:  # started by `python -m`
        return True
    return os.path.isfile(os.path.join(process.ORIGINAL_DIR or "", getattr(main, "__file__", None) or ""))  # type: ignore[attr-defined]


def _typed_lines() -> dict[str, Any]:
    """The code of cells, where Python looks for the lines of a traceback: entries without a time belong to no file."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def _unpicklable(function: Any) -> list[str]:
    """The names that a typed function uses whose values do not pickle."""
    names = []
    with suppress(TypeError):  # no function of Python's
        used = inspect.getclosurevars(inspect.unwrap(function))
        for name, value in {**used.globals, **used.nonlocals}.items():
            try:
                choose_dumps(True)(value)
            except Exception:
                names.append(name)
    return names
