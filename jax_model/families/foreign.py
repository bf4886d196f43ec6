"""Reading foreign configurations: the one place where a key may be absent."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any


class Foreign:
    """A checkpoint's configuration or metadata, with errors that say which key and where.

    ``origin`` names the file for error messages.
    """

    def __init__(self, data: Mapping[str, Any], origin: str) -> None:
        self._data = data
        self.origin = origin

    def keys(self) -> Set[str]:
        """Every key that is there with a value."""
        return {key for key, value in self._data.items() if value is not None}

    def need(self, key: str, kind: type = object) -> Any:
        """The value of ``key``. Raises ValueError when it is absent, null or not a ``kind``."""
        value = self.find(key, kind)
        if value is None:
            raise ValueError(f"{self.origin}: there is no {key!r}")
        return value

    def find(self, key: str, kind: type = object) -> Any:
        """The value of ``key``, or None when it is absent or null. Raises ValueError when it is not a ``kind``."""
        value = self._data.get(key)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise ValueError(f"{self.origin}: {key!r} should be of type {kind.__name__}, found {value!r}")
        return value

    def get(self, key: str, default: Any) -> Any:
        """The value of ``key``, or ``default`` when it is absent or null; of the default's type, or ValueError."""
        value = self.find(key, object if default is None else type(default))
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """A count of something there is at least one of. Raises ValueError when it is absent or not positive."""
        value: int = self.need(key, int) if default is None else self.get(key, default)
        if value < 1:
            raise ValueError(f"{self.origin}: {key!r} should be positive, found {value}")
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """Raise ValueError unless ``key`` is absent or one of ``allowed``: for switches that we do not have yet."""
        value = self._data.get(key)
        if value is not None and value not in allowed:
            known = ", ".join(map(repr, (*allowed, None)))
            raise ValueError(f"{self.origin}: {key!r} is {value!r}; this version supports {known}")
