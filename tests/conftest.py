"""What every test may ask for: the two real models, fetched when they are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

import fetch_models


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="rewrite the files of expected graphs instead of comparing")


def _fetched(name: str) -> Path:
    path = fetch_models.MODELS / fetch_models.KNOWN[name].file
    return path if path.exists() else fetch_models.fetch(name)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: llama, 30 layers, 9 query and 3 key/value heads, tied, chat template, no BOS."""
    return _fetched("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma-3-270M, Q4_K_M: windows, two rope bases, norms on heads, V = 262144, BOS added, no chat template."""
    return _fetched("gemma-3-270m")
