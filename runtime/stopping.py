"""Stop strings: text is released only when it cannot become part of one any more."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches text that comes in pieces, and gives the same result however it is cut.

    The match that ends first wins, of those that end together the one that begins first; so it is always the match
    that a reader of single characters would find.  Raises ValueError for an empty stop string: it would match at once.
    """

    def __init__(self, stop: str | Sequence[str] = ()) -> None:
        self.strings = (stop,) if isinstance(stop, str) else tuple(stop)
        for string in self.strings:
            if not isinstance(string, str) or not string:
                raise ValueError(f"a stop string must be a non-empty string, not {string!r}")
        self._beginnings = {string[:end] for string in self.strings for end in range(1, len(string))}
        self._longest = max(map(len, self.strings), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece; returns the text that may be shown now, and the stop string if one has come.

        After a match the text is what stood before it, and the rest is dropped.
        """
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self.strings if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            _, start, stop = min(matches)
            return text[:start], stop
        held = self._possible_beginning(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """What is still held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """How many of the last characters could be the beginning of a stop string."""
        longest = min(self._longest - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text[-n:] in self._beginnings), 0)
