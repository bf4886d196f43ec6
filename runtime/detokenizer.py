"""From token ids to text, as they come, without ever splitting a character.

Each token stands for bytes; the bytes of a text go through an incremental UTF-8 decoder, which holds back at most three
of them, the beginning of a character whose rest may still come.  What can never become a character turns into U+FFFD
as soon as that is certain.

The bytes of a token follow from the ``decoder`` of tokenizer.json: ``ByteLevel`` (Radford et al. 2019, GPT-2: each byte
is written as one printable character) or the SentencePiece way (Kudo & Richardson 2018: ``▁`` is a space, ``<0x0A>``
a byte).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

ToBytes = Callable[[str], bytes]


class Detokenizer:
    """Bytes of tokens to text, piece by piece."""

    def __init__(self, vocabulary: TokenBytes, *, skip: Iterable[int] = (), strip_first_space: bool = False) -> None:
        self._vocabulary = vocabulary
        self._skip = frozenset(skip)
        self._strip = strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that a token completes; empty when it ends inside a character, or is one of those to skip."""
        if token in self._skip:
            return ""
        data = self._vocabulary[token]
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self, *, complete: bool) -> str:
        """The end of the text. Half a character becomes U+FFFD if the text is ``complete``, else it is left out."""
        rest = self._decoder.decode(b"", final=complete)
        self._decoder.reset()
        return rest


class TokenBytes:
    """The bytes of every token of a tokenizer.json, worked out when first asked for.

    ``decoder`` is that part of the file, ``added`` the contents of its added tokens.
    Raises ValueError for a decoder that is neither of the two known ways.
    """

    def __init__(
        self, id_to_token: Callable[[int], str | None], decoder: Mapping[str, Any] | None, added: Collection[str]
    ) -> None:
        self._id_to_token = id_to_token
        self._to_bytes = _to_bytes(decoder, frozenset(added))
        self.strips_first_space = _strips_first_space(decoder)
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        """Empty for an id that the tokenizer does not have: embeddings are often padded to a round size."""
        if token not in self._known:
            text = self._id_to_token(token)
            self._known[token] = b"" if text is None else self._to_bytes(text)
        return self._known[token]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters are themselves, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(added: frozenset[str]) -> ToBytes:
    def to_bytes(token: str) -> bytes:
        written_in_alphabet = token not in added and all(character in _ALPHABET for character in token)
        return bytes(_ALPHABET[character] for character in token) if written_in_alphabet else token.encode()

    return to_bytes


def _sentencepiece(space: str) -> ToBytes:
    def to_bytes(token: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace(space, " ").encode()

    return to_bytes


def _to_bytes(decoder: Mapping[str, Any] | None, added: frozenset[str]) -> ToBytes:
    steps = _steps(decoder)
    kinds = {step["type"] for step in steps}
    spaces = {_space(step) for step in steps if step["type"] in ("Replace", "Metaspace")}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return _byte_level(added)
    known = kinds <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
    if known and len(spaces) == 1 and (space := spaces.pop()):
        return _sentencepiece(space)
    raise ValueError(
        f"tokenizer.json: the decoder {' + '.join(step['type'] for step in steps) or 'null'} is not supported: "
        "it must be ByteLevel, or Replace or Metaspace with ByteFallback, Fuse and Strip"
    )


def _space(step: Mapping[str, Any]) -> str | None:
    """The character that a Replace or Metaspace step turns into a space; None where it does something else."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    return str(step["pattern"].get("String", "")) if step["content"] == " " else None


def _strips_first_space(decoder: Mapping[str, Any] | None) -> bool:
    """Whether a text on its own loses the space that the tokenizer put before its first word."""
    return any(
        (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in _steps(decoder)
    )


def _steps(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        return ()
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return (decoder,)
