"""From tokens to text: whole characters only, nothing lost, nothing late."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from transformers.convert_slow_tokenizer import bytes_to_unicode

from diptych.runtime.detokenizer import Detokenizer, TokenBytes

MIXED = "🇫🇷👨‍👩‍👧 삼겹살 ďábel नमस्ते\n\ttab  two — “quotes” ▁Ġ é é"
LEVEL = json.loads(decoders.ByteLevel().__getstate__())
PIECE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


def byte_alphabet() -> list[str]:
    """GPT-2's characters for the 256 bytes, as another implementation has them."""
    characters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    return [characters[byte] for byte in range(256)]


def vocabulary(decoder: dict[str, Any], tokens: list[str], added: Collection[str] = ()) -> TokenBytes:
    return TokenBytes(lambda i: tokens[i] if i < len(tokens) else None, decoder, added)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def of_bytes(request: pytest.FixtureRequest) -> TokenBytes:
    """Token i is byte i."""
    return vocabulary(LEVEL, byte_alphabet()) if request.param == "byte level" else vocabulary(PIECE, BYTES)


def test_our_alphabet_is_the_one() -> None:
    table = vocabulary(LEVEL, byte_alphabet())
    assert b"".join(table[i] for i in range(256)) == bytes(range(256))


@given(data=st.one_of(st.binary(max_size=30), st.text(max_size=10).map(str.encode)))
def test_pieces_are_the_text_of_the_bytes(of_bytes: TokenBytes, data: bytes) -> None:
    detokenizer = Detokenizer(of_bytes)
    pieces = [detokenizer.push(byte) for byte in data]
    assert "".join(pieces) + detokenizer.finish(complete=True) == data.decode("utf-8", "replace")


@given(data=st.binary(max_size=30))
def test_at_most_three_bytes_are_held(of_bytes: TokenBytes, data: bytes) -> None:
    detokenizer, shown = Detokenizer(of_bytes), ""
    for i, byte in enumerate(data):
        shown += detokenizer.push(byte)
        held = [n for n in range(4) if data[: i + 1 - n].decode("utf-8", "replace") == shown]
        assert held


@given(text=st.text(min_size=1, max_size=8), cut=st.integers(0, 3))
def test_a_character_cut_short(of_bytes: TokenBytes, text: str, cut: int) -> None:
    """By a limit: it is left out. By the end of the text: it is no character, and says so."""
    data = text.encode()
    data = data[: len(data) - min(cut, len(text[-1].encode()) - 1)]
    limited, ended = Detokenizer(of_bytes), Detokenizer(of_bytes)
    shown = "".join(map(limited.push, data)) + limited.finish(complete=False)
    whole = "".join(map(ended.push, data)) + ended.finish(complete=True)
    assert shown == data.decode("utf-8", "ignore")
    assert whole == data.decode("utf-8", "replace")


def test_an_invalid_run_is_shown_at_once(of_bytes: TokenBytes) -> None:
    detokenizer = Detokenizer(of_bytes)
    assert [detokenizer.push(byte) for byte in b"\xff\xffa\xe2\x82b\xf0\x9f\x87\xab"] == [
        "\ufffd", "\ufffd", "a", "", "", "\ufffdb", "", "", "", "🇫",
    ]  # fmt: skip


def test_special_tokens_may_be_shown_or_not() -> None:
    tokens = ["<|end|>", "Ġa", "Ã", "©"]
    table = vocabulary(LEVEL, tokens, {"<|end|>"})
    for skip, expected in (((), " a<|end|>é"), ((0,), " aé")):
        detokenizer = Detokenizer(table, skip=skip)
        assert "".join(map(detokenizer.push, [1, 0, 2, 3])) == expected


def test_added_tokens_are_text_and_the_others_are_bytes() -> None:
    table = vocabulary(LEVEL, ["é", "Ġé", "é", "<｜start▁of｜>"], {"é", "Ġé", "<｜start▁of｜>"})
    assert [table[i] for i in range(4)] == ["é".encode(), "Ġé".encode(), "é".encode(), "<｜start▁of｜>".encode()]
    assert vocabulary(PIECE, ["▁▁"], {"▁▁"})[0] == b"  "


def test_ids_without_a_token_have_no_text() -> None:
    assert vocabulary(LEVEL, ["a"])[5] == b""


STRIPPING = {**PIECE, "decoders": [*PIECE["decoders"], {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}


@pytest.mark.parametrize(
    ("decoder", "strips"),
    [
        (LEVEL, False),
        (PIECE, False),
        (STRIPPING, True),
        (METASPACE, True),
        ({**METASPACE, "prepend_scheme": "never"}, False),
    ],
)
def test_the_first_space_as_the_library_has_it(decoder: dict[str, Any], strips: bool) -> None:
    table = vocabulary(decoder, ["▁Hello", "▁world"])
    assert table.strips_first_space == strips
    detokenizer = Detokenizer(table, strip_first_space=table.strips_first_space)
    ours = "".join(map(detokenizer.push, [0, 1]))
    model = {"type": "WordLevel", "vocab": {"▁Hello": 0, "▁world": 1}, "unk_token": "?"}
    definition = {"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model}
    assert ours == Tokenizer.from_str(json.dumps(definition)).decode([0, 1])


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "Fuse"},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "_"}, "content": "-"}]},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "_"}, "content": " "}]},
        {"type": "Sequence", "decoders": [LEVEL, METASPACE]},
    ],
    ids=str,
)
def test_decoders_that_mean_something_else_are_refused(decoder: dict[str, Any] | None) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: the decoder .* is not supported"):
        TokenBytes(str, decoder, set())
