"""Stop strings: nothing of them leaks, nothing else is lost, however the text is cut."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.runtime.stopping import StopStrings

FAMILY = "👨‍👩‍👧"


def run(stops: list[str], pieces: Iterable[str]) -> tuple[list[str], str | None]:
    watcher = StopStrings(stops)
    shown = []
    for piece in pieces:
        text, stop = watcher.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, watcher.flush()], None


def by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    """Read one character more at a time until the text ends in a stop string; the longest that it ends in counts."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "text", "expected", "stop"),
    [
        (["alpha beta"], "say alpha beta gamma", "say ", "alpha beta"),
        (["alpha beta"], "say alpha bet", "say alpha bet", None),
        (["\nUser:"], "hello\nUsers: no\nUser: yes", "hello\nUsers: no", "\nUser:"),
        (["ab", "abc"], "xabc", "x", "ab"),
        (["abc", "ab"], "xabc", "x", "ab"),
        (["bc", "abc"], "xabc", "x", "abc"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["aab"], "aaaab", "aa", "aab"),
        (["👩"], f"hi {FAMILY}!", "hi 👨\u200d", "👩"),
        (["\u200d"], FAMILY, "👨", "\u200d"),
        ([f"stop number {i}" for i in range(200)], "a stop number 1234", "a ", "stop number 1"),
        ([], "anything", "anything", None),
        (["x"], "", "", None),
    ],
)
def test_stop_strings(stops: list[str], text: str, expected: str, stop: str | None) -> None:
    assert by_definition(stops, text) == (expected, stop)
    for pieces in ([text], list(text), [text[:3], text[3:]]):
        shown, found = run(stops, pieces)
        assert ("".join(shown), found) == (expected, stop)


@given(
    stops=st.lists(st.text("ab c", min_size=1, max_size=5), max_size=6),
    pieces=st.lists(st.text("ab c", max_size=4), max_size=20),
)
def test_the_same_however_it_is_cut(stops: list[str], pieces: list[str]) -> None:
    shown, stop = run(stops, pieces)
    expected, expected_stop = by_definition(stops, "".join(pieces))
    assert ("".join(shown), stop) == (expected, expected_stop)


@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=20),
)
def test_text_is_held_no_longer_than_it_must(stops: list[str], pieces: list[str]) -> None:
    """What is held back is always the beginning of a stop string."""
    watcher, shown = StopStrings(stops), ""
    for i, piece in enumerate(pieces):
        text, stop = watcher.push(piece)
        if stop is not None:
            return
        shown += text
        held = "".join(pieces[: i + 1])[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_one_string_is_one_stop_string() -> None:
    assert StopStrings("end").push("the end") == ("the ", "end")


@pytest.mark.parametrize("wrong", ["", ["a", ""], [5], [None]])
def test_what_is_no_stop_string_is_refused(wrong: list[str]) -> None:
    with pytest.raises(ValueError, match="a stop string must be a non-empty string"):
        StopStrings(wrong)
