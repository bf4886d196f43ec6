"""Two tokenizers for tiny checkpoints: byte-level BPE as SmolLM2 has, BPE with byte fallback as Gemma has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import gguf

Kind = Literal["byte_level", "sentencepiece"]

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = "0123456789"
# Newline and space in the byte-level alphabet, then what UTF-8 needs for é and 🙂: every other character is dropped.
_BYTES = ["Ċ", "Ġ", *_LETTERS, *_LETTERS.upper(), *_DIGITS, *".,!?'-:;", "Ã", "©", "ð", "Ł", "Ļ", "Ĥ"]
_MERGES = (
    "Ġ t", "h e", "i n", "Ġ a", "e r", "o n", "Ġt he", "a t", "Ġ s", "e n", "Ġ c", "in g", "a n", "e d", "Ġa n", "o u",
)  # fmt: skip
BYTE_LEVEL = (*_SPECIALS, *_BYTES, *(merge.replace(" ", "") for merge in _MERGES))

_CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>")
_FALLBACK = tuple(f"<0x{byte:02X}>" for byte in range(256))
_PIECES = (
    "▁t", "he", "in", "▁a", "er", "▁the", "▁s", "ing", "an", "é", "\n", "▁", *_LETTERS, *"TC.,!", *_DIGITS,
)  # fmt: skip
SENTENCEPIECE = (*_CONTROL, *_FALLBACK, *_PIECES)

# ChatML: a loop, a condition, a generation prompt.
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _sentencepiece_merges() -> Iterator[tuple[str, str]]:
    """Every way to build a piece out of two others, in the order of the vocabulary: what a Gemma file's ids imply."""
    vocabulary = set(_PIECES)
    for piece in _PIECES:
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        yield from (split for split in splits if vocabulary.issuperset(split))


def _added_tokens(tokens: tuple[str, ...]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": i, "content": token, **flags} for i, token in enumerate(tokens)]


def _byte_level_json() -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(_SPECIALS),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, level]},
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(BYTE_LEVEL)},
            "merges": [merge.split(" ") for merge in _MERGES],
        },
    }


def _sentencepiece_json() -> dict[str, Any]:
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(_CONTROL),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, text],
            "pair": [bos, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(SENTENCEPIECE)},
            "merges": [list(merge) for merge in _sentencepiece_merges()],
        },
    }


def huggingface_files(kind: Kind) -> dict[str, dict[str, Any]]:
    """The tokenizer's files of a Hugging Face folder, as JSON values."""
    if kind == "byte_level":
        config = {
            "add_prefix_space": False,
            "bos_token": "<|im_start|>",
            "chat_template": _CHATML,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "tokenizer_class": "GPT2Tokenizer",
            "unk_token": "<|endoftext|>",
        }
        generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
        return {
            "tokenizer.json": _byte_level_json(),
            "tokenizer_config.json": config,
            "generation_config.json": generation,
        }
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<bos>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "tokenizer_class": "GemmaTokenizer",
        "unk_token": "<unk>",
    }
    generation = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    return {
        "tokenizer.json": _sentencepiece_json(),
        "tokenizer_config.json": config,
        "generation_config.json": generation,
    }


def write_gguf(writer: gguf.GGUFWriter, kind: Kind) -> None:
    """Add a tokenizer's metadata as llama.cpp's converter does."""
    byte_level = kind == "byte_level"
    vocabulary, specials = (BYTE_LEVEL, _SPECIALS) if byte_level else (SENTENCEPIECE, _CONTROL)
    writer.add_tokenizer_model("gpt2" if byte_level else "llama")
    writer.add_tokenizer_pre("smollm" if byte_level else "default")
    writer.add_token_list(vocabulary)
    writer.add_token_types([_gguf_type(token, specials) for token in vocabulary])
    if byte_level:
        writer.add_token_merges(_MERGES)
        writer.add_chat_template(_CHATML)
    else:
        writer.add_token_scores([-1000.0] * len(_CONTROL + _FALLBACK) + [-float(i) for i in range(len(_PIECES))])
    bos, eos, unknown, pad = (1, 2, 0, 2) if byte_level else (2, 1, 3, 0)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(unknown)
    writer.add_pad_token_id(pad)
    writer.add_add_bos_token(not byte_level)
    writer.add_add_space_prefix(False)


def _gguf_type(token: str, specials: tuple[str, ...]) -> gguf.TokenType:
    if token in specials:
        return gguf.TokenType.CONTROL
    return gguf.TokenType.BYTE if token in _FALLBACK else gguf.TokenType.NORMAL
