"""Parse a pickle without running it: what it names stays a name, and what it would call stays a record of the call.

A pickle is a program, which an unpickler runs. This parser makes numbers, texts, tuples and lists of it, `Items` of a dict, and
a `Record` of a call or an object whose class the caller allows by name. It imports, calls, hashes and compares nothing. Its
memory is bounded by a multiple of the pickle's size: its memo is a dict, so an index cannot allocate.
"""

import struct
from collections.abc import Callable, Collection
from typing import Any

BYTES_PER_OBJECT = 8  # a pickle of more objects than this is refused: torch's have 20 bytes for each
FREE_OBJECTS = 1000
MAX_TEXT = 60  # characters of a name that a message repeats


class Name(str):
    """The name of a class, a function or a constant: `torch.float32`."""

    __slots__ = ()


class Record:
    """An object or a call: the class's or the function's name, the arguments, and the state that the object would get."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: Any) -> None:
        self.name, self.arguments, self.state = name, arguments, None


class Items:
    """The pairs of a dict, in order. Keys are not hashed: that of a nested tuple may take for ever."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []


PERSISTENT = "persistent id"  # the name of the record of an object that is stored elsewhere, with its id as argument


def parse_pickle(data: bytes, allowed_names: Collection[str]) -> Any:
    """Return what `data` pickles. Raises ValueError for anything but plain values and `allowed_names`, and for damage."""
    return _Parser(data, allowed_names).run()


class _Parser:
    """The stack machine of one pickle."""

    def __init__(self, data: bytes, allowed_names: Collection[str]) -> None:
        self._data, self._allowed_names = data, allowed_names
        self._position, self._num_objects = 0, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []  # heights of the stack
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Run all operations. Return what is on top of the stack at the end."""
        data, operations, stack, memo = self._data, _OPERATIONS, self._stack, self._memo
        while self._position < len(data):
            code = data[self._position]
            self._position += 1
            if code == _MEMOIZE and stack:  # with the next, half of all operations
                memo[len(memo)] = stack[-1]
                continue
            if code in _MEMO_INDEX_BYTES:
                self._push_from_memo(self._number(_MEMO_INDEX_BYTES[code]))
                continue
            if code == _STOP:
                return self._pop()
            operation = operations.get(code)
            if operation is None:
                raise ValueError(f"it has the operation {chr(code)!r}, which no plain value needs")
            operation(self)
        raise ValueError("it has no end")

    # -- reading and the stack ---------------------------------------------------------------------------------------

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise ValueError("it ends in the middle of a value")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise ValueError("it takes a value that is not there")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise ValueError("it has no mark to go back to")
        height = self._marks.pop()
        popped = self._stack[height:]
        del self._stack[height:]
        return popped

    def _push_object(self, value: Any) -> None:
        self._num_objects += 1
        if self._num_objects > len(self._data) // BYTES_PER_OBJECT + FREE_OBJECTS:
            raise ValueError("it makes more objects than it has room to describe")
        self._stack.append(value)

    # -- operations --------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def discard(self) -> None:
        self._pop()

    def push_tuple(self, size: int) -> None:
        items = [self._pop() for _ in range(size)]
        self._push_object(tuple(reversed(items)))

    def append(self) -> None:
        self._extend([self._pop()])

    def _extend(self, values: list[Any]) -> None:
        target = self._pop()
        if not isinstance(target, list):
            raise ValueError("it appends to what is no list")
        target += values
        self._stack.append(target)

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _set_items(self, values: list[Any]) -> None:
        target = self._pop()
        if not isinstance(target, Items) or len(values) % 2:
            raise ValueError("it sets an item of what is no dict")
        target.pairs += zip(values[::2], values[1::2], strict=True)
        self._stack.append(target)

    def name(self, module: Any, attribute: Any) -> None:
        name = f"{module}.{attribute}" if type(module) is type(attribute) is str else ""
        if name not in self._allowed_names:
            raise ValueError(f"it names {name[:MAX_TEXT]!r}, which has no place there: nothing of it was run")
        self._stack.append(Name(name))

    def name_in_lines(self) -> None:
        """Push the name whose module and attribute are the next two lines."""
        lines = []
        for _ in range(2):
            end = self._data.find(b"\n", self._position)
            if end < 0:
                raise ValueError("it ends in the middle of a name")
            lines.append(self._take(end - self._position).decode())
            self._take(1)
        self.name(*lines)

    def name_on_stack(self) -> None:
        attribute, module = self._pop(), self._pop()
        self.name(module, attribute)

    def call(self) -> None:
        arguments, name = self._pop(), self._pop()
        if not isinstance(name, Name) or not isinstance(arguments, tuple):
            raise ValueError("it calls what is no name")
        self._push_object(Record(name, arguments))

    def set_state(self) -> None:
        state, record = self._pop(), self._pop()
        if not isinstance(record, Record) or record.state is not None:
            raise ValueError("it sets the state of what has none")
        record.state = state
        self._stack.append(record)

    def memoize(self, index: int) -> None:
        value = self._pop()
        self._stack.append(value)
        self._memo[index] = value

    def _push_from_memo(self, index: int) -> None:
        if index not in self._memo:
            raise ValueError("it takes a value that it has not stored")
        self._stack.append(self._memo[index])


_STOP, _MEMOIZE = ord("."), 0x94
_MEMO_INDEX_BYTES = {ord("h"): 1, ord("j"): 4}


def _text(size: int) -> Callable[[_Parser], None]:
    return lambda parser: parser.push(parser._take(parser._number(size)).decode("utf-8", "surrogatepass"))


def _unpacked(layout: str) -> Callable[[_Parser], None]:
    size = struct.calcsize(layout)
    return lambda parser: parser.push(struct.unpack(layout, parser._take(size))[0])


def _constant(value: Any) -> Callable[[_Parser], None]:
    return lambda parser: parser.push(value)


def _into_memo(size: int) -> Callable[[_Parser], None]:
    return lambda parser: parser.memoize(parser._number(size))


_OPERATIONS: dict[int, Callable[[_Parser], None]] = {
    ord(code): operation
    for code, operation in {
        "\x80": lambda parser: parser._take(1),  # the protocol
        "\x95": lambda parser: parser._take(8),  # a frame, which only helps to read ahead
        "N": _constant(None),
        "\x88": _constant(True),
        "\x89": _constant(False),
        ")": _constant(()),
        "J": _unpacked("<i"),
        "K": _unpacked("<B"),
        "M": _unpacked("<H"),
        "G": _unpacked(">d"),
        "\x8a": lambda parser: parser.push(int.from_bytes(parser._take(parser._number(1)), "little", signed=True)),
        "X": _text(4),
        "\x8c": _text(1),
        "\x8d": _text(8),
        "(": _Parser.mark,
        "0": _Parser.discard,
        "1": lambda parser: parser._pop_to_mark(),
        "t": lambda parser: parser._push_object(tuple(parser._pop_to_mark())),
        "\x85": lambda parser: parser.push_tuple(1),
        "\x86": lambda parser: parser.push_tuple(2),
        "\x87": lambda parser: parser.push_tuple(3),
        "]": lambda parser: parser._push_object([]),
        "}": lambda parser: parser._push_object(Items()),
        "a": _Parser.append,
        "e": lambda parser: parser._extend(parser._pop_to_mark()),
        "s": _Parser.set_item,
        "u": lambda parser: parser._set_items(parser._pop_to_mark()),
        "c": _Parser.name_in_lines,
        "\x93": _Parser.name_on_stack,
        "R": _Parser.call,
        "\x81": _Parser.call,  # of a class, by its `__new__`
        "b": _Parser.set_state,
        "Q": lambda parser: parser._push_object(Record(PERSISTENT, (parser._pop(),))),
        "q": _into_memo(1),
        "r": _into_memo(4),
    }.items()
}
