"""Pickle the function that ranks run, and its arguments.

A script's function is pickled by name, as ranks import the script. A function that was typed in a notebook or at a prompt,
piped in, or given to `python -c`, is in no file. cloudpickle pickles it by value, with the globals that it uses.
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
    """Return the function and its arguments as bytes, for `unpickle_call`. Raises PenstockError if they do not pickle."""
    by_value = _is_in_no_file(function)
    try:
        return choose_pickle_dumps(by_value)((function, args, _interactive_source_lines() if by_value else None))
    except Exception as error:  # of any class: objects run code when they are pickled
        name = getattr(function, "__qualname__", repr(function))
        hint = "define it at the top level of a module, and pass arguments that pickle"
        if by_value:
            names = _unpicklable_names(function)
            hint = f"make {' and '.join(names) or 'what does not pickle'} inside of {name}, or pass arguments that pickle"
        raise PenstockError(f"cannot send {name} to other processes ({error}): {hint}") from error


def unpickle_call(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], bool]:
    """Return the function, its arguments, and whether it was pickled by value, as results then must be too."""
    try:
        function, args, source_lines = pickle.loads(data)
    except Exception as error:  # this process may be unable to import its module
        problem = f"ranks cannot read the function that they are to run, or its arguments ({' '.join(str(error).split())})"
        raise PenstockError(f"{problem}: define it in a file, and import it from there") from error
    if source_lines is None:
        return function, args, False

    linecache.cache.update(source_lines)  # for tracebacks
    if function.__module__ == "__main__":  # `encoding` looks up classes of messages there by name
        names = getattr(inspect.unwrap(function), "__globals__", {})
        vars(sys.modules["__main__"]).update({name: value for name, value in names.items() if not name.startswith("__")})
    return function, args, True


def choose_pickle_dumps(by_value: bool) -> Callable[[Any], bytes]:
    """Return cloudpickle's `dumps`, which pickles functions and classes by value, or pickle's, which does so by name."""
    if not by_value:
        return pickle.dumps
    import cloudpickle  # slow to import, and rarely needed

    return cloudpickle.dumps


@contextmanager
def hide_missing_main_file() -> Iterator[None]:
    """Keep processes that the block starts from importing the program's main file if it does not exist (`<stdin>`)."""
    main = sys.modules["__main__"]
    hidden = {} if _main_can_be_imported(main) or not hasattr(main, "__file__") else {"__file__": main.__file__}
    for name in hidden:
        delattr(main, name)
    try:
        yield
    finally:
        vars(main).update(hidden)


def _is_in_no_file(function: Any) -> bool:
    """Return whether ranks cannot import `function`, as the program, or the function's code, is in no file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    typed_at_prompt = code is not None and function.__module__ == "__main__" and not os.path.isfile(code.co_filename)
    return not _main_can_be_imported(sys.modules["__main__"]) or typed_at_prompt


def _main_can_be_imported(main: Any) -> bool:
    """Return whether other processes can import the program's main module, as `multiprocessing` would."""
    if getattr(getattr(main, "__spec__", None), "name", None) is not None:  # started by `python -m`
        return True
    return os.path.isfile(os.path.join(process.ORIGINAL_DIR or "", getattr(main, "__file__", None) or ""))  # type: ignore[attr-defined]


def _interactive_source_lines() -> dict[str, Any]:
    """Return the entries of linecache with the source of notebook cells. Such an entry has no modification time."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def _unpicklable_names(function: Any) -> list[str]:
    """Return the names of globals and closure variables that `function` uses and whose values do not pickle."""
    names = []
    with suppress(TypeError):  # `function` may be no Python function
        variables = inspect.getclosurevars(inspect.unwrap(function))
        for name, value in {**variables.globals, **variables.nonlocals}.items():
            try:
                choose_pickle_dumps(True)(value)
            except Exception:
                names.append(name)
    return names
