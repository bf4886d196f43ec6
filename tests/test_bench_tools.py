"""What the benchmark makes and compares besides speed: a random model, exports, agreement between readers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table

from bench import agreement, export_engine, random_llama
from bench.agreement import DecodeReader, PrefillReader
from diptych import load
from diptych.export import quality
from diptych.export.pipeline import export
from diptych.runtime import Manifest

TINY = Path(__file__).parents[1] / "artifacts" / "tiny"
SMALL = random_llama.CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
}


class Fixed:
    """A reader that says the same behind every token: a double."""

    def __init__(self, *logits: float) -> None:
        self._logits = np.array(logits, np.float32)

    def read(self, tokens: Sequence[int]) -> Iterator[quality.Logits]:
        yield from (np.tile(self._logits, (len(piece), 1)) for piece in quality.pieces(tokens))


def test_agreement_is_over_all_positions_of_all_pairs() -> None:
    readers = {"a": Fixed(0, np.log(3)), "b": Fixed(0, np.log(3)), "c": Fixed(np.log(3), 0)}
    found = agreement.compare(readers, {"long": range(70), "short": range(3)})
    assert set(found) == {"a – b", "a – c", "b – c"}
    assert [one.positions for one in found["a – b"].values()] == [70, 3, 73]
    assert all((one.top1, one.kl) == (1, 0) for one in found["a – b"].values())
    # probabilities of 1/4 and 3/4 against 3/4 and 1/4
    assert all(one.top1 == 0 and one.kl == pytest.approx(np.log(3) / 2) for one in found["a – c"].values())


def test_both_programs_read_a_text_alike() -> None:
    model, tokens = load(TINY, sessions="two"), [i % 90 for i in range(70)]
    found = agreement.compare({"prefill": PrefillReader(model), "decode": DecodeReader(model)}, {"text": tokens})
    assert found["prefill – decode"]["all"].positions == 70
    assert found["prefill – decode"]["all"].kl < 1e-9  # float32 in another order
    counts = [grid.row_count for grid in agreement.tables(found) if isinstance(grid, Table)]
    assert counts == [2, 1]  # positions and one pair, one pair


@pytest.mark.parametrize("tied", [True, False])
def test_a_random_llama_is_a_checkpoint(tmp_path: Path, tied: bool) -> None:
    random_llama.make(tmp_path / "random", SMALL | {"tie_word_embeddings": tied})
    report = export(tmp_path / "random", tmp_path / "out", quantize="int4", verify=False, accuracy_level=4)
    assert report.model["parameters"] == sum(
        np.prod(shape) for shape in random_llama.shapes(SMALL | {"tie_word_embeddings": tied}).values()
    )
    options = export_engine.options_of(Manifest.open(tmp_path / "out"))
    assert options["verify"] is False
    assert (options["quantize"], options["accuracy_level"]) == ("int4", 4)
    found = export_engine.cost(tmp_path / "random", options, tmp_path / "scratch")
    assert found["seconds"].keys() == report.seconds.keys()
    assert not list((tmp_path / "scratch").iterdir())
    json.dumps(found)


def test_a_seed_makes_one_model(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        random_llama.make(tmp_path / name, SMALL, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_a_billion_parameters() -> None:
    count = sum(int(np.prod(shape)) for shape in random_llama.shapes(random_llama.CONFIG).values())
    assert count == 1_235_814_400
