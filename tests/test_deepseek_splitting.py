"""How DeepSeek V3 cuts a text, piece by piece as its three patterns read."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from test_tokenizer_conversion import convert, tiny_metadata

PIECES = [
    ["In", " ", "201", "5", " there", " were", " ", "12", ".", "5"],
    ["f", "(x", ")[", "0", "]", " =", " y", ";\n\n", "  ", " print"],
    ["isn", "'t", ' "', "so", '"'],
    ["abc", "\u4f60\u597d", "\uff0c", "\u3053\u3093", "def"],
    ["a\u0301e", " ", " \u043c\u0438\u0440", "!\r\n", "\t  "],
]


@pytest.mark.parametrize("pieces", PIECES, ids=["numbers", "code", "quotes", "scripts", "marks and spaces"])
def test_pieces(pieces: list[str], tmp_path: Path) -> None:
    metadata = tiny_metadata("byte_level", tmp_path) | {"tokenizer.ggml.pre": "deepseek-v3"}
    tokenizer = tokenizers.Tokenizer.from_str(convert(metadata).files["tokenizer.json"])
    text = "".join(pieces)
    cut = [text[start:stop] for _, (start, stop) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces
