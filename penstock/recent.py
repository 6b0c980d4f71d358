"""A dict of a bounded size, which forgets what was not added for longest."""

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class RecentDict(dict[Key, Value]):
    """A dict with the newest `max_entries`. An entry that is added again is the newest."""

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self.max_entries = max_entries

    def add(self, key: Key, value: Value) -> Value:
        """Add an entry as the newest, and forget the oldest if there are too many. Return its value."""
        self.pop(key, None)
        self[key] = value
        if len(self) > self.max_entries:
            del self[next(iter(self))]
        return value
