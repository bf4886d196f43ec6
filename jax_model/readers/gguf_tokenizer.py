"""The tokenizer in a GGUF's metadata, as a tokenizer.json.

A GGUF holds the vocabulary (tokens, their types, their scores), for byte-level BPE also the merges, and names: of the
kind of tokenizer, and of the rule that splits text before the merges.  The rest is implied by those names; the tables
below say what, with the components of the models' own tokenizer.json files.

The conversion is ours and not transformers' ``convert_gguf_tokenizer`` because that one gives other ids than the
original tokenizers on both models that we test with: it knows no ``smollm``, whose digits stand alone, and orders the
merges of Gemma's whitespace otherwise.  Ours gives all 514906 merges of Gemma 3 and all 58980 of Llama 2 in the
original order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from diptych.jax_model.families import Foreign
from diptych.jax_model.tokenizers import NAMED, TokenizerFiles, around_text, assemble

__all__ = ["read_tokenizer"]

Component: TypeAlias = dict[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # gguf.TokenType
_ADDED = {_UNKNOWN: True, _CONTROL: True, _USER_DEFINED: False}  # matched whole in a text: as special tokens, or not
_SPACE = "▁"  # how sentencepiece writes a space

_KEY = "tokenizer.ggml."
_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}  # after general.sampling.


@dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]
    types: list[int]
    origin: str

    @property
    def ids(self) -> dict[str, int]:
        """Raises ValueError when two tokens are spelled alike."""
        ids = {token: i for i, token in enumerate(self.tokens)}
        if len(ids) < len(self.tokens):
            twice = next(token for i, token in enumerate(self.tokens) if ids[token] != i)
            raise ValueError(f"{self.origin}: the token {twice!r} occurs twice in the vocabulary")
        return ids

    def added(self) -> list[Component]:
        """The tokens that are matched whole in a text, before it is split."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": i, "content": token, **flags, "special": _ADDED[kind]}
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in _ADDED
        ]


@dataclass(frozen=True)
class _Parts:
    """What differs between kinds of tokenizers: components of tokenizer.json, and what holds if the file is silent."""

    normalizer: Component | None
    pre_tokenizer: Component | None
    decoder: Component
    model: Component
    adds_bos: bool
    ids: Mapping[str, int]


def read_tokenizer(metadata: Foreign) -> TokenizerFiles:
    """Convert the metadata of a GGUF file. Raises ValueError on a kind of tokenizer or a splitting rule without a table
    row, and on metadata that are missing, inconsistent or of the wrong type."""
    model = metadata.need(_KEY + "model", str)
    if model not in _KINDS:
        raise ValueError(f"{metadata.origin}: tokenizer {model!r} is not supported; supported: {', '.join(_KINDS)}")
    vocabulary = _vocabulary(metadata)
    if model == _SENTENCEPIECE:
        vocabulary = _respelled(vocabulary)
    parts = _KINDS[model](metadata, vocabulary)
    names = _names(metadata, vocabulary, parts)
    defaults = {"bos_token": parts.adds_bos, "eos_token": False}
    added = {name: metadata.get(f"{_KEY}add_{name}", default) for name, default in defaults.items()}
    config = {
        **{f"add_{name}": adds for name, adds in added.items()},
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    ids = vocabulary.ids
    bos, eos = (_around(metadata, names, ids, name) if adds else None for name, adds in added.items())
    tokenizer_json = json.dumps(
        _tokenizer_json(vocabulary, parts, around_text(bos, eos)), ensure_ascii=False, separators=(",", ":")
    )
    template = metadata.find("tokenizer.chat_template", str)
    return assemble(tokenizer_json, config, names, template, [_generation(metadata, parts)], metadata.origin)


def _vocabulary(metadata: Foreign) -> _Vocabulary:
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int)
    if len(tokens) != len(types):
        raise ValueError(f"{metadata.origin}: {len(tokens)} tokens, but {len(types)} token types")
    return _Vocabulary(tokens, types, metadata.origin)


def _list(metadata: Foreign, key: str, kind: type) -> list[Any]:
    values: list[Any] = metadata.need(_KEY + key, list)
    if values and type(values[0]) is not kind:  # arrays of a GGUF are of one type
        raise ValueError(f"{metadata.origin}: '{_KEY}{key}' should hold {kind.__name__}, found {values[0]!r}")
    return values


def _respelled(vocabulary: _Vocabulary) -> _Vocabulary:
    """Runs of spaces are stored as spaces, but looked up in text whose spaces have been replaced."""
    tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in vocabulary.tokens]
    return _Vocabulary(tokens, vocabulary.types, vocabulary.origin)


def _names(metadata: Foreign, vocabulary: _Vocabulary, parts: _Parts) -> dict[str, str]:
    """The tokens with a role, by role."""
    names = {}
    for name in NAMED:
        id = metadata.find(_KEY + _IDS[name], int)
        id = parts.ids.get(name) if id is None else id
        if id is not None:
            names[name] = _token(vocabulary, id, _IDS[name])
    return names


def _token(vocabulary: _Vocabulary, id: int, key: str) -> str:
    if not 0 <= id < len(vocabulary.tokens):
        raise ValueError(
            f"{vocabulary.origin}: '{_KEY}{key}' is {id}, but the vocabulary has {len(vocabulary.tokens)} tokens"
        )
    return vocabulary.tokens[id]


def _around(metadata: Foreign, names: Mapping[str, str], ids: Mapping[str, int], name: str) -> tuple[str, int]:
    if name not in names:
        raise ValueError(f"{metadata.origin}: '{_KEY}add_{name}' is true, but '{_KEY}{_IDS[name]}' is missing")
    return names[name], ids[names[name]]


def _generation(metadata: Foreign, parts: _Parts) -> dict[str, Any]:
    ends = [metadata.find(_KEY + key, int) for key in _ENDS]
    if ends[0] is None:
        ends[0] = parts.ids.get("eos_token")
    sampling = {name: metadata.find(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {
        "bos_token_id": metadata.find(_KEY + _IDS["bos_token"], int),
        "eos_token_id": [id for id in ends if id is not None],
        "pad_token_id": metadata.find(_KEY + _IDS["pad_token"], int),
        **{name: value for name, value in sampling.items() if value is not None},
    }


def _tokenizer_json(vocabulary: _Vocabulary, parts: _Parts, post_processor: Component | None) -> Component:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "normalizer": parts.normalizer,
        "pre_tokenizer": parts.pre_tokenizer,
        "post_processor": post_processor,
        "decoder": parts.decoder,
        "model": parts.model,
    }


def _bpe(vocabulary: _Vocabulary, merges: Sequence[Sequence[str]], **options: Any) -> Component:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


# ------------------------------------------------------------------------------------------------------ byte-level BPE


@dataclass(frozen=True)
class _Splitting:
    """How a text is cut before the merges: what llama.cpp calls its pre-tokenizer, in the components of tokenizers."""

    steps: tuple[Component, ...]
    ignore_merges: bool = False  # a piece that is in the vocabulary is taken whole
    adds_bos: bool = False  # unless the file says otherwise
    normalizer: Component | None = None


def _byte_level_step(*, use_regex: bool) -> Component:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> Component:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_GPT2 = _byte_level_step(use_regex=True)  # GPT-2's pattern is built into the step
_DIGITS = {"type": "Digits", "individual_digits": True}


def _words(digits: str) -> tuple[Component, ...]:
    """As GPT-4 cuts words, with ``digits`` for the pattern of numbers."""
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return _split(pattern), _byte_level_step(use_regex=False)


_THREE_DIGITS = _words(r"\p{N}{1,3}")
_LLAMA3 = _Splitting(_THREE_DIGITS, ignore_merges=True, adds_bos=True)
_QWEN2 = _Splitting(_words(r"\p{N}"), normalizer={"type": "NFC"})
_SINGLE_DIGITS = _Splitting((_DIGITS, _GPT2))
# Numbers first, then Chinese and Japanese by themselves, then words with what stands before them.
_DEEPSEEK_V3 = _Splitting(
    (
        _split(r"\p{N}{1,3}"),
        _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        _split(
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
        ),
        _byte_level_step(use_regex=False),
    )
)

# By ``tokenizer.ggml.pre``.
_SPLITTINGS = {
    "codeshell": _SINGLE_DIGITS,
    "dbrx": _Splitting(_THREE_DIGITS),
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": _DEEPSEEK_V3,
    "gpt-2": _Splitting((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "phi-2": _Splitting((_GPT2,)),
    "qwen2": _QWEN2,
    "refact": _SINGLE_DIGITS,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
}


def _byte_level(metadata: Foreign, vocabulary: _Vocabulary) -> _Parts:
    name = metadata.get(_KEY + "pre", "")
    if name not in _SPLITTINGS:
        raise ValueError(
            f"{metadata.origin}: '{_KEY}pre' is {name!r}, an unknown way to split a text; "
            f"known: {', '.join(_SPLITTINGS)}"
        )
    splitting = _SPLITTINGS[name]
    merges = [merge.split(" ") for merge in _list(metadata, "merges", str)]
    return _Parts(
        normalizer=splitting.normalizer,
        pre_tokenizer={"type": "Sequence", "pretokenizers": list(splitting.steps)},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model=_bpe(vocabulary, merges, ignore_merges=splitting.ignore_merges),
        adds_bos=splitting.adds_bos,
        ids={},
    )


# ------------------------------------------------------------------------------------------------------- sentencepiece

_SENTENCEPIECE_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}  # llama.cpp's, where the file names none


def _sentencepiece(metadata: Foreign, vocabulary: _Vocabulary) -> _Parts:
    """BPE with byte fallback, as the original tokenizer.json files of Llama 2 and Gemma write it down."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: Component = replace
    if metadata.get(_KEY + "add_space_prefix", True):
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, replace]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = metadata.get(_KEY + _IDS["unk_token"], _SENTENCEPIECE_IDS["unk_token"])
    architecture = metadata.need("general.architecture", str)
    return _Parts(
        normalizer=normalizer,
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        model=_bpe(
            vocabulary,
            _merges(vocabulary, _scores(metadata, vocabulary), longest_left_first=architecture.startswith("gemma")),
            unk_token=_token(vocabulary, unknown, _IDS["unk_token"]),
            fuse_unk=True,
            byte_fallback=True,
        ),
        adds_bos=True,
        ids=_SENTENCEPIECE_IDS,
    )


def _scores(metadata: Foreign, vocabulary: _Vocabulary) -> list[float]:
    """What sentencepiece orders merges by. User-defined pieces score 0; llama.cpp's converter wrote -1000 over it."""
    scores = _list(metadata, "scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise ValueError(f"{metadata.origin}: {len(vocabulary.tokens)} tokens, but {len(scores)} scores")
    return [0.0 if kind == _USER_DEFINED else score for score, kind in zip(scores, vocabulary.types, strict=True)]


def _merges(vocabulary: _Vocabulary, scores: Sequence[float], *, longest_left_first: bool) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the highest score first.

    Several ways to make the same token have equal scores: the order among them decides how long runs of spaces come
    apart.  The original files of Gemma 3 put the longest left part first, those of Llama 2 the smallest ids.
    """
    ids = vocabulary.ids
    lengths = sorted({len(token) for token in ids})
    found = [
        (scores[ids[token]], token[:cut], token[cut:])
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)  # no text may add up to a control token
        for cut in lengths
        if cut < len(token) and token[:cut] in ids and token[cut:] in ids
    ]
    if longest_left_first:
        found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    else:
        order = {token: i for i, token in enumerate(vocabulary.tokens)}
        found.sort(key=lambda merge: (-merge[0], order[merge[1] + merge[2]], order[merge[1]], order[merge[2]]))
    return [(left, right) for _, left, right in found]


_SENTENCEPIECE = "llama"
# By ``tokenizer.ggml.model``.
_KINDS: dict[str, Callable[[Foreign, _Vocabulary], _Parts]] = {"gpt2": _byte_level, _SENTENCEPIECE: _sentencepiece}
