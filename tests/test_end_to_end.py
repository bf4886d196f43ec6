"""The whole road with a real model: a GGUF file to an artifact, a text to a text."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import diptych
from diptych.runtime import LanguageModel
from reference import samples


@pytest.fixture(scope="module", params=["none", "keep"])
def smollm2(
    request: pytest.FixtureRequest, smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> LanguageModel:
    """In floats, and in the file's own blocks of integers: they mean the same, so they say the same."""
    folder = tmp_path_factory.mktemp("artifacts") / request.param
    # No gate: what it checks is compared with transformers here. Level 1: no activation is rounded to 8 bits.
    diptych.export(smollm2_gguf, folder, quantize=request.param, accuracy_level=1, verify=False)
    return diptych.load(folder)


def test_a_prompt_becomes_the_text_that_transformers_gives(smollm2: LanguageModel) -> None:
    """All three stored prompts: 5, 24 and some 800 tokens, 32 greedy tokens each, or until one ends the text."""
    ends = smollm2.manifest.vocabulary.eos_token_ids
    for sample in samples.load("smollm2"):
        want = list(itertools.takewhile(lambda token: token not in ends, sample.continuation))
        result = smollm2.generate(sample.prompt, max_tokens=len(sample.continuation))
        assert [token for token in result.token_ids if token not in ends] == want


def test_the_capital_of_france(smollm2: LanguageModel) -> None:
    raw = smollm2.generate("The capital of France is", raw=True, max_tokens=64)
    assert raw.text == " Paris.\n\nThe answer is: 2018-01-22 12:12:53."
    assert raw.finish_reason == "eos"
    answer = smollm2.generate([{"role": "user", "content": "What is the capital of France?"}], max_tokens=64)
    assert (answer.text, answer.finish_reason, answer.finish_detail) == ("The capital of France is Paris.", "eos", 2)
