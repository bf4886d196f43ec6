"""Do llama.cpp and an artifact mean the same by the same GGUF file? Next-token probabilities over real text, compared.

    make agreement                                          # of `make demo`'s model
    make agreement FLOAT32=1                                # the same, with no activations rounded anywhere
    PYTHONPATH=tools python -m bench.agreement gemma-3-270m artifacts/gemma-3-270m

Both round activations to 8 bits, each in its own way, so JAX in float32 on the file's numbers is read as well: the
distance of each from that is what its rounding does, and two roundings are about as far from each other.  In float32
what is left is what they disagree on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

import demo
import fetch_models
from bench import peers
from bench.peers import PEERS, PeerError
from diptych import load
from diptych.bench.engines import Engine, EngineError, Spec
from diptych.cli.console import show, table
from diptych.export import quality
from diptych.export.pipeline import export
from diptych.export.quality import Reader
from diptych.jax_model import params as parameters
from diptych.jax_model.config import Config
from diptych.jax_model.readers import open_checkpoint
from diptych.runtime import LanguageModel
from diptych.runtime.machine import physical_cores

Logits = NDArray[np.float32]
LLAMA_CPP = next(peer for peer in PEERS if peer.name == "llama_cpp")
# BLAS multiplies floats. It needs OpenBLAS with its headers and pkg-config, in Debian libopenblas-dev and pkg-config.
# Without the cache, where pip keeps what it has compiled for the other one.
LLAMA_CPP_FLOAT32 = replace(
    LLAMA_CPP,
    name="llama_cpp_float32",
    environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_BLAS=ON -DGGML_BLAS_VENDOR=OpenBLAS", "PIP_NO_CACHE_DIR": "1"},
)
PREFILLED = 16  # tokens of a text that decode finds in the cache


@dataclass(frozen=True)
class Agreement:
    """Of two readers over some positions: how often their likeliest tokens are the same, and the mean divergence."""

    positions: int
    top1: float
    kl: float


Pairs = dict[str, dict[str, Agreement]]


def compare(readers: Mapping[str, Reader], texts: Mapping[str, Sequence[int]]) -> Pairs:
    """Of each pair of readers, for each text and for all together. The divergence is from the first of a pair."""
    found: Pairs = {}
    for name, tokens in texts.items():
        for (first, second), agreement in _compare_on(readers, tokens).items():
            found.setdefault(f"{first} – {second}", {})[name] = agreement
    return {pair: {**each, "all": _together(each.values())} for pair, each in found.items()}


def _compare_on(readers: Mapping[str, Reader], tokens: Sequence[int]) -> dict[tuple[str, str], Agreement]:
    pairs = list(itertools.combinations(readers, 2))
    sums = {pair: np.zeros(2) for pair in pairs}
    for each in quality.log_probabilities(*(reader.read(tokens) for reader in readers.values())):
        read = dict(zip(readers, each, strict=True))
        for first, second in pairs:
            sums[first, second] += np.array(quality.divergence(read[first], read[second])) * len(read[first])
    count = len(tokens)
    return {pair: Agreement(count, float(top1) / count, float(kl) / count) for pair, (kl, top1) in sums.items()}


def _together(parts: Collection[Agreement]) -> Agreement:
    count = sum(part.positions for part in parts)
    top1, kl = (sum(getattr(part, name) * part.positions for part in parts) / count for name in ("top1", "kl"))
    return Agreement(count, top1, kl)


# ------------------------------------------------------------------------------------------------------------- readers


class PrefillReader:
    """An artifact's prefill."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def read(self, tokens: Sequence[int]) -> Iterator[Logits]:
        session = self._model.session()
        for piece in quality.pieces(tokens):
            yield session.prefill(0, piece, logits="all")


class DecodeReader:
    """An artifact's decode, behind a prompt of some tokens that prefill has read."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def read(self, tokens: Sequence[int]) -> Iterator[Logits]:
        session = self._model.session()
        for i, piece in enumerate(quality.pieces(tokens)):
            prompt = piece[: 0 if i else PREFILLED]
            first = [session.prefill(0, prompt, logits="all")] if prompt else []
            yield np.concatenate([*first, *(session.decode([token]) for token in piece[len(prompt) :])])


class LlamaCppReader:
    """llama.cpp, in a process of its environment."""

    def __init__(self, engine: Engine, scratch: Path) -> None:
        self._engine, self._file = engine, scratch / "logits.npy"

    def read(self, tokens: Sequence[int]) -> Iterator[Logits]:
        self._engine.ask("call", name="reset")
        for piece in quality.pieces(tokens):
            self._engine.ask("call", name="read", tokens=list(piece), path=str(self._file))
            yield np.load(self._file)


def measure(gguf: Path, artifact: Path, threads: int, *, float32: bool = False) -> Pairs:
    """How all readers agree on our texts.

    ``float32``: none rounds activations. The artifact is then made once more, with accuracy level 1, whose decode is
    too slow for a text and left out.

    Raises EngineError, and what opening either raises.
    """
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if float32:
            artifact = export(gguf, scratch / "level 1", accuracy_level=1, verify=False).path
        model = load(artifact, sessions="one" if float32 else "two", threads=threads)
        texts = quality.texts(artifact, model.manifest.vocabulary.size, model.manifest.max_context)
        config = Config.from_json(model.manifest.data["config"])
        longest = max(map(len, texts.values()))
        options = {"model": str(gguf), "threads": threads, "capacity": longest, "float32": float32}
        peer = LLAMA_CPP_FLOAT32 if float32 else LLAMA_CPP
        spec = Spec(peer.name, Path(__file__).parent / "llama_cpp_reader.py", options, str(peer.python))
        engine = stack.enter_context(Engine(spec))
        readers: dict[str, Reader] = {
            "JAX": quality.JaxReader(config, parameters.load(open_checkpoint(gguf), config)),
            "llama.cpp": LlamaCppReader(engine, scratch),
            "prefill": PrefillReader(model),
        }
        if not float32:
            readers["decode"] = DecodeReader(model)
        return compare(readers, texts)


# ------------------------------------------------------------------------------------------------------------ the tool

EXPLANATION = (
    "The share of positions where both have the same likeliest token; and the mean divergence KL(first ‖ second) of "
    "their next-token probabilities, in nats. All read the same token ids. "
)
SHIPPED = (
    "JAX computes in float32 on the numbers of the file. Prefill and decode are the artifact's, decode behind the "
    f"first {PREFILLED} tokens of a text."
)
FLOAT32 = (
    "All compute in float32 on the numbers of the file, prefill with the artifact's graph at accuracy level 1. Only "
    "llama.cpp still rounds to 8 bits in the last piece of a text, where that has fewer than 32 tokens."
)


def tables(pairs: Pairs, readers: str = SHIPPED) -> Iterator[Table | str]:
    """For people: a row for each pair, a column for each text, and what is said of the ``readers``."""
    columns = [f"{name}>" for name in next(iter(pairs.values()))]
    top1, kl = table("same top 1", *columns), table("KL", *columns)
    top1.add_row("positions", *(str(one.positions) for one in next(iter(pairs.values())).values()))
    for pair, found in pairs.items():
        top1.add_row(pair, *(f"{one.top1:.1%}" for one in found.values()))
        kl.add_row(pair, *(f"{one.kl:.2g}" for one in found.values()))
    yield from (top1, kl, EXPLANATION + readers)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="agreement", description="llama.cpp against an artifact of the same GGUF.")
    parser.add_argument("model", nargs="?", default=fetch_models.DEFAULT, help="what `make demo` takes")
    parser.add_argument("artifact", nargs="?", type=Path, help="default: the demo's")
    parser.add_argument(
        "--float32",
        action="store_true",
        help="no activations in 8 bits: the artifact is made once more for it, and llama.cpp built with OpenBLAS",
    )
    parser.add_argument("--threads", type=int, default=physical_cores() or os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    artifact = options.artifact or demo.ROOT / demo.artifact_of(options.model)
    try:
        peer = LLAMA_CPP_FLOAT32 if options.float32 else LLAMA_CPP
        if not peer.is_installed():
            print(f"installing {peer.name} into {peer.python.parents[1]}", file=sys.stderr)
            peers.install(peer)
        found = measure(Path(demo.source_of(options.model)), artifact, options.threads, float32=options.float32)
    except (EngineError, PeerError, fetch_models.FetchError, OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    output = demo.ROOT / "build" / "bench" / demo.artifact_name(options.model)
    output.mkdir(parents=True, exist_ok=True)
    pairs = {pair: {name: asdict(one) for name, one in each.items()} for pair, each in found.items()}
    name = "agreement-float32" if options.float32 else "agreement"
    (output / f"{name}.json").write_text(json.dumps(pairs, indent=1) + "\n", encoding="utf-8")
    show(*tables(found, FLOAT32 if options.float32 else SHIPPED))
    return 0


if __name__ == "__main__":
    sys.exit(main())
