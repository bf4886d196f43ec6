"""Models for the runtime's tests: the committed tiny artifact, its twins for other targets, scripted ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
import tiny_tokenizers
from diptych.export.pipeline import export
from diptych.jax_model.readers import open_checkpoint
from diptych.runtime import LanguageModel, load

TINY = Path(__file__).parents[2] / "artifacts" / "tiny"

Load = Callable[..., LanguageModel]


@pytest.fixture(scope="session")
def model() -> LanguageModel:
    """A random llama for target ``ort``; its text is nonsense, greedy decoding goes on for long."""
    return load(TINY, threads=1)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A copy of the tiny artifact, to damage."""
    return Path(shutil.copytree(TINY, tmp_path / "artifact"))


@pytest.fixture(scope="session")
def load_variant(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """``load_variant("gemma3", "onnx", sessions="one")``: exported on first use, opened once for each way."""
    folder = tmp_path_factory.mktemp("variants")
    opened: dict[tuple[str, ...], LanguageModel] = {}

    def get(family: str, target: str, sessions: str = "two") -> LanguageModel:
        source, output = folder / family, folder / f"{family}-{target}"
        if not source.exists():
            tiny.write_huggingface(
                tiny.llama(heads=(4, 2), head_size=16) if family == "llama" else tiny.gemma3(), source
            )
        if not output.exists():
            export(source, output, target=target, verify=False)
        key = (family, target, sessions)
        if key not in opened:
            opened[key] = load(output, sessions=sessions, threads=1)  # type: ignore[arg-type]
        return opened[key]

    return get


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_gguf: Path) -> dict[str, str]:
    """Byte-level BPE with a ChatML template; adds no beginning-of-sequence token."""
    return dict(open_checkpoint(smollm2_gguf).tokenizer.files)


@pytest.fixture(scope="session")
def gemma3_tokenizer(gemma3_gguf: Path) -> dict[str, str]:
    """SentencePiece-like BPE with byte fallback, 262144 ids; adds ``<bos>``; no chat template."""
    return dict(open_checkpoint(gemma3_gguf).tokenizer.files)


@pytest.fixture(scope="session")
def sentencepiece_tokenizer() -> dict[str, str]:
    """Small; every byte has a token, ``<bos>`` is added."""
    return {name: json.dumps(value) for name, value in tiny_tokenizers.huggingface_files("sentencepiece").items()}


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> dict[str, str]:
    """Small, with a ChatML template; characters outside its alphabet are dropped."""
    return {name: json.dumps(value) for name, value in tiny_tokenizers.huggingface_files("byte_level").items()}
