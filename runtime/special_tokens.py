"""Keeps special tokens that stand in a message from becoming control tokens.

Every occurrence in the message is broken up by characters that no text has, before the template writes its own special
tokens around it.  The tokenizer then finds only the template's, and drops the breaks before it does anything else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

BREAK = "\ufdd0\ufdd1"  # two noncharacters, which Unicode reserves for a program's internal use
ESCAPED_BREAK = r"\ufdd0\ufdd1"  # how a template writes them that turns objects into strings, or into JSON of ASCII


class Guard:
    """Breaks up ``special`` tokens, and the beginning of one at the end of a string: templates may write two strings
    side by side.  A beginning of letters and digits only is let be, so that roles and types stay what they are.

    A special token of one character cannot be broken, and stays one.
    """

    def __init__(self, special: Collection[str]) -> None:
        self._tokens = frozenset(token for token in special if len(token) > 1)
        self._lengths = sorted({len(token) for token in self._tokens}, reverse=True)
        beginnings = (token[:end] for token in self._tokens for end in range(1, len(token)))
        self._beginnings = frozenset(beginning for beginning in beginnings if not beginning.isalnum())
        firsts = "".join(sorted({re.escape(token[0]) for token in self._tokens}))
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    def __call__(self, value: Any) -> Any:
        """``value`` with every string in it made harmless, keys too.

        Raises ValueError for what is not made of JSON values: text could hide in other objects.
        """
        if isinstance(value, str):
            return self._break_up(value)
        if isinstance(value, Mapping):
            return {self(key): self(content) for key, content in value.items()}
        if isinstance(value, list | tuple):
            return [self(item) for item in value]
        if value is None or isinstance(value, int | float):
            return value
        raise ValueError(f"messages and template variables are made of JSON values, not of {type(value).__name__}")

    def _break_up(self, text: str) -> str:
        pieces, done = [], 0
        for match in self._first.finditer(text):
            start = match.start()
            if start >= done and (token := self._token_at(text, start)):
                # Between all characters and behind the last, so that no other token that overlaps survives either.
                pieces += [text[done:start], BREAK.join(token), BREAK]
                done = start + len(token)
        pieces.append(text[done:])
        if any(text[-length:] in self._beginnings for length in range(1, self._lengths[0] if self._lengths else 1)):
            pieces.append(BREAK)
        return "".join(pieces)

    def _token_at(self, text: str, start: int) -> str | None:
        candidates = (text[start : start + length] for length in self._lengths)
        return next((candidate for candidate in candidates if candidate in self._tokens), None)
