"""What every test may ask for: the two real models, fetched when they are not there; and how hypothesis behaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import fetch_models


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="rewrite the files of expected graphs instead of comparing")


# A busy machine is no fault of the code: no deadlines. CI repeats the same examples, so that a change is what fails.
settings.register_profile("diptych", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("diptych"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "diptych")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What somebody tuned on this machine changes no test."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


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
