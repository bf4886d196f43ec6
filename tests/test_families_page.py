"""The page of families says what the tables say, and every family is proved by a case."""

from __future__ import annotations

import re

import pytest

import make_families_page
from diptych.jax_model.families import FAMILIES


def test_the_page_is_up_to_date() -> None:
    """Or run ``python tools/make_families_page.py``."""
    assert make_families_page.PAGE.read_text(encoding="utf-8") == make_families_page.page()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_case(family: str) -> None:
    assert make_families_page.configurations(family)


def test_the_example_in_contributing_is_what_was_added() -> None:
    """Line by line, in files that are there; and it is as short as the text promises."""
    contributing = (make_families_page.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    diff = re.search(r"```diff\n(.*?)```", contributing, re.DOTALL)
    assert diff
    files = re.split(r"^\+\+\+ (.*)\n", diff[1], flags=re.MULTILINE)[1:]
    added = 0
    for path, lines in zip(files[::2], files[1::2], strict=True):
        text = (make_families_page.ROOT / path).read_text(encoding="utf-8").splitlines()
        for line in lines.splitlines():
            assert line.startswith("+") and line[1:] in text, f"{path}: {line}"
            added += 1
    assert 0 < added < 30
