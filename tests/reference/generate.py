"""Make the stored reference values with PyTorch and transformers, or check that they would come out the same.

    python tests/reference/generate.py [NAME ...]            writes tests/reference/values/
    python tests/reference/generate.py --check [NAME ...]    compares and writes nothing

Without names: every tiny checkpoint and both real models.  Needs the ``reference`` extra; the real models lie in
``models/`` (``python tools/fetch_models.py``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

import fetch_models  # noqa: E402
import tiny  # noqa: E402
from reference import gguf_models, samples  # noqa: E402
from reference.samples import Sample  # noqa: E402

# Greedy tokens are only worth comparing where the best logit leads by twice what the tests tolerate.
MARGIN = 4e-3

REAL = {"smollm2": "smollm2-135m-instruct", "gemma3-270m": "gemma-3-270m"}


def tiny_samples(name: str) -> list[Sample]:
    """Prompts of 5, 20 and 63 random tokens (200 where positions are scaled), each with 24 greedy tokens."""
    checkpoint = tiny.VARIANTS[name]
    lengths = (5, 20, 63, 200) if checkpoint.config["rope_scaling"] else (5, 20, 63)
    with tempfile.TemporaryDirectory() as folder:
        model = load_folder(tiny.write_huggingface(checkpoint, folder))
    return [random_sample(model, length, new=24, columns=64) for length in lengths]


def real_samples(name: str) -> list[Sample]:
    """The three prompts of ``prompts/``, each with 32 greedy tokens; fewer columns for the long one."""
    path = fetch_models.MODELS / fetch_models.KNOWN[REAL[name]].file
    model = gguf_models.load(path)
    tokenizer = load_tokenizer(path)
    made = []
    for prompt, columns in (("short", 512), ("medium", 512), ("long", 192)):
        text = (Path(__file__).parent / "prompts" / f"{prompt}.txt").read_text(encoding="utf-8")
        made.append(sample(model, tokenizer(text)["input_ids"], new=32, columns=columns))
    return made


def load_folder(folder: Path) -> PreTrainedModel:
    """The float32 model of a Hugging Face folder. Raises ValueError unless tensors and parameters match one to one."""
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if wrong := {kind: names for kind, names in loading.items() if names}:
        raise ValueError(f"{folder}: {wrong}")
    loaded: PreTrainedModel = model.eval()
    return loaded


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file. transformers does not know SmolLM's way of splitting: digits first, each alone."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if path.name.startswith("SmolLM2"):
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return tokenizer


def random_sample(model: PreTrainedModel, length: int, new: int, columns: int) -> Sample:
    """The first of a fixed series of random prompts whose greedy tokens are clear choices."""
    for attempt in range(100):
        draw = np.random.RandomState(zlib.crc32(f"prompt/{length}/{attempt}".encode()))
        try:
            return sample(model, draw.randint(3, model.config.vocab_size, length).tolist(), new, columns)
        except CloseChoiceError:
            continue
    raise CloseChoiceError(f"no prompt of {length} tokens has {new} clear greedy choices")


class CloseChoiceError(ValueError):
    """A greedy choice that rounding could turn."""


def sample(model: PreTrainedModel, prompt: Sequence[int], new: int, columns: int) -> Sample:
    """``prompt`` with ``new`` greedy tokens. Raises CloseChoiceError where the best logit hardly leads."""
    with torch.no_grad():
        ids = greedy(model, prompt, new)
        logits = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0].float().numpy()  # one pass, nothing cached
    decisions = logits[len(prompt) - 1 :]
    second, first = np.partition(decisions, -2)[:, -2:].T
    margin = float((first - second).min())
    if margin < MARGIN:
        raise CloseChoiceError(f"a greedy choice leads by {margin:.2g} only; use another prompt")
    if decisions.argmax(-1).tolist() != ids[len(prompt) :]:
        raise AssertionError("transformers contradicts itself: with and without a cache the greedy tokens differ")
    return samples.reduce(ids, len(prompt), logits, columns)


def greedy(model: PreTrainedModel, prompt: Sequence[int], new: int) -> list[int]:
    ids = list(prompt)
    step = model(torch.tensor([ids]), use_cache=True)
    for _ in range(new):
        ids.append(int(step.logits[0, -1].argmax()))
        step = model(torch.tensor([ids[-1:]]), cache=step.cache, use_cache=True)
    return ids


def difference(new: Sequence[Sample], stored: Sequence[Sample]) -> float:
    """The largest difference of logits; infinite where ids or columns differ."""
    exact = ("ids", "prompt_length", "columns", "argmax")
    pairs = list(zip(new, stored, strict=True))
    if any(not np.array_equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in exact):
        return float("inf")
    floats = ("logits", "logsumexp")
    return max(float(np.abs(getattr(a, name) - getattr(b, name)).max()) for a, b in pairs for name in floats)


CASES: dict[str, Callable[[str], list[Sample]]] = {
    **dict.fromkeys(tiny.VARIANTS, tiny_samples),
    **dict.fromkeys(REAL, real_samples),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the stored values instead of writing them")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(CASES)}")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CASES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    failed = False
    for name in options.names or CASES:
        made = CASES[name](name)
        if options.check:
            worst = difference(made, samples.load(name))
            failed |= not worst < 1e-3  # another CPU sums in another order; real models differ by some 1e-4
            print(f"{name}: largest difference {worst:.2g}")
        else:
            path = samples.save(name, made)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
