r"""Byte-level BPE as llama.cpp describes it for ``smollm``, written plainly: an oracle for our tokenizer.json.

llama.cpp applies two patterns one after the other for this name, ``\p{N}`` and then GPT-2's
``'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)``; what lies between matches is a piece too.
The rest is Sennrich et al. 2016 (arXiv:1508.07909) over GPT-2's byte alphabet.  Nothing here comes from the tokenizers
library or from our conversion, except that a byte without a token (0x06, say) vanishes before the merges, as it does
there; llama.cpp drops it after them.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

# Unicode's White_Space, which is what \\s means in such patterns.
_SPACES = {*"\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000", *map(chr, range(0x2000, 0x200B))}
_CONTRACTION = re.compile("'(?:s|t|re|ve|m|ll|d)")
# Over the kinds of characters: L letter, N number, space itself, S other space, O the rest.
_RUN = re.compile(" ?L+| ?N+| ?O+|[ S]+(?![LNO])")
_CONTROL = 3


def _alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others for what follows U+00FF."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}


class NaiveBpe:
    """Encode with the vocabulary in the metadata of a GGUF file."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        tokens = metadata["tokenizer.ggml.tokens"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        types = metadata["tokenizer.ggml.token_type"]
        self.control = {token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL}
        longest_first = sorted(self.control, key=len, reverse=True)
        self.splitter = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self.alphabet = _alphabet()

    def encode(self, text: str) -> list[int]:
        return [id for segment in self.splitter.split(text) for id in self._segment(segment)]

    def _segment(self, text: str) -> Iterator[int]:
        if text in self.control:
            yield self.ids[text]
            return
        for stretch in _numbers_apart(text):
            for piece in _pieces(stretch):
                yield from (self.ids[token] for token in self._merged(piece))

    def _merged(self, piece: str) -> list[str]:
        parts = [char for byte in piece.encode() if (char := self.alphabet[byte]) in self.ids]
        while len(parts) > 1:
            pairs = enumerate(itertools.pairwise(parts))
            rank, i = min((self.ranks.get(pair, len(self.ranks)), i) for i, pair in pairs)
            if rank == len(self.ranks):
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts


def _kind(char: str) -> str:
    if char in _SPACES:
        return " " if char == " " else "S"
    category = unicodedata.category(char)[0]
    return category if category in "LN" else "O"


def _numbers_apart(text: str) -> Iterator[str]:
    for number, group in itertools.groupby(text, key=lambda char: _kind(char) == "N"):
        if number:
            yield from group
        else:
            yield "".join(group)


def _pieces(text: str) -> Iterator[str]:
    kinds = "".join(map(_kind, text))
    at = 0
    while at < len(text):
        match = _CONTRACTION.match(text, at) or _RUN.match(kinds, at)
        end = match.end() if match else at + 1  # what no pattern matches is one space before a word
        yield text[at:end]
        at = end
