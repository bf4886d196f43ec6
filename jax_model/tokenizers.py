"""Tokenizers: whatever a checkpoint carries, as the text of the files that an artifact holds.

``tokenizer.json`` is complete in itself: its post-processor adds BOS exactly when the source says so, and control
tokens are marked special.  A Hugging Face folder's own file is taken as it is; GGUF metadata are converted by
:mod:`diptych.jax_model.readers.gguf_tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers as library

from diptych.jax_model.readers.files import read_json

__all__ = ["SOURCES", "TokenizerFiles", "around_text", "assemble", "from_folder"]

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
_SPECIAL_MAP, _OLD_TEMPLATE = "special_tokens_map.json", "chat_template.json"
# What of a Hugging Face folder is read here.
SOURCES = (TOKENIZER, CONFIG, GENERATION, TEMPLATE, _SPECIAL_MAP, _OLD_TEMPLATE)
# What transformers can make a tokenizer of when there is no tokenizer.json.
_OLD_VOCABULARIES = ("tokenizer.model", "vocab.json", "tekken.json")

NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
# Where one of these is a special token it ends a turn, whether or not the source declares it.
_ENDS = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")


@dataclass(frozen=True)
class TokenizerFiles:
    """The text of ``tokenizer.json``, ``tokenizer_config.json``, ``generation_config.json`` and, where the model has a
    chat template, ``chat_template.jinja``, by file name."""

    files: Mapping[str, str]

    @cached_property
    def _library(self) -> library.Tokenizer:
        return library.Tokenizer.from_str(self.files[TOKENIZER])

    @cached_property
    def _generation(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.files[GENERATION])
        return values

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a text, those that the source declares first."""
        return tuple(self._generation["eos_token_id"])

    @property
    def bos_token_id(self) -> int | None:
        """What ``tokenizer.json`` puts before a text; None when it puts nothing there."""
        before = self._library.encode("").ids
        return before[0] if before and before[0] == self._generation.get("bos_token_id") else None

    @property
    def pad_token_id(self) -> int | None:
        return self._generation.get("pad_token_id")


def assemble(
    tokenizer_json: str,
    config: Mapping[str, Any],
    names: Mapping[str, str],
    template: str | None,
    declared: Iterable[Mapping[str, Any]],
    origin: str,
) -> TokenizerFiles:
    """The files out of their parts.

    ``names`` are the tokens behind ``bos_token`` and the like; ``declared`` are sources of ``eos_token_id``,
    ``bos_token_id`` and ``pad_token_id``, the most important first, whose first one is the generation configuration.
    Raises ValueError when ``tokenizer_json`` cannot be read or an id is no number.
    """
    tokenizer = parse(tokenizer_json, origin)
    files = {
        TOKENIZER: tokenizer_json,
        CONFIG: dump({**config, **names}),
        GENERATION: dump(_generation(tokenizer, names, list(declared), origin)),
    }
    return TokenizerFiles(files if template is None else {**files, TEMPLATE: template})


def parse(tokenizer_json: str, origin: str) -> library.Tokenizer:
    """Raises ValueError when the tokenizers library cannot read it."""
    try:
        return library.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises Exception itself
        message = f"{origin}: tokenizers {library.__version__} cannot read this tokenizer: {error}"
        raise ValueError(message) from None


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def _generation(
    tokenizer: library.Tokenizer, names: Mapping[str, str], declared: list[Mapping[str, Any]], origin: str
) -> dict[str, Any]:
    """The first source as it is, with every EOS there is and the ids that it leaves to others."""
    values = dict(declared[0])
    values["eos_token_id"] = _ends(tokenizer, names, declared, origin)
    for key in ("bos_token_id", "pad_token_id"):
        stated = [_ids(source, key, origin) for source in declared]
        named = tokenizer.token_to_id(names.get(key.removesuffix("_id"), ""))
        values[key] = next((ids[0] for ids in stated if ids), named)
    return values


def _ends(
    tokenizer: library.Tokenizer, names: Mapping[str, str], declared: list[Mapping[str, Any]], origin: str
) -> list[int]:
    """The union of what every source declares, the token that is called EOS, and the well-known ends of a turn."""
    found = [id for source in declared for id in _ids(source, "eos_token_id", origin)]
    special = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    named = tokenizer.token_to_id(names.get("eos_token", ""))
    ends = [*found, named, *(special.get(token) for token in _ENDS)]
    return list(dict.fromkeys(id for id in ends if id is not None))


def _ids(source: Mapping[str, Any], key: str, origin: str) -> list[int]:
    """What ``key`` says: a number, a list of numbers, or nothing. Raises ValueError when it is anything else."""
    value = source.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise ValueError(f"{origin}: {key!r} should be a token's number, a list of them or null, found {value!r}")
    return ids


def around_text(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> dict[str, Any] | None:
    """A post-processor that puts tokens (text, id) around a text; None when there is nothing to put there."""
    if bos is None and eos is None:
        return None

    def template(letter: str, segment: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": letter, "type_id": segment}}
        before, after = (
            [{"SpecialToken": {"id": token[0], "type_id": segment}}] if token else [] for token in (bos, eos)
        )
        return [*before, text, *after]

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": template("A", 0) + template("B", 1),
        "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]} for text, id in filter(None, (bos, eos))},
    }


# ------------------------------------------------------------------------------------------------- Hugging Face folders


def from_folder(folder: Path) -> TokenizerFiles:
    """The tokenizer files of a Hugging Face folder. Raises FileNotFoundError or ValueError when none can be used."""
    config = _optional(folder / _SPECIAL_MAP) | _optional(folder / CONFIG)
    names = {key: _content(config[key]) for key in NAMED if config.get(key)}
    template = _template(folder, config)
    for moved in ("chat_template", "added_tokens_decoder"):  # the one has its own file, the other is in tokenizer.json
        config.pop(moved, None)
    declared = [_optional(folder / GENERATION), _optional(folder / "config.json")]
    return assemble(_tokenizer_json(folder, config, names), config, names, template, declared, str(folder))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(token: Any) -> str:
    """A token is written as a string, or as an object with flags."""
    return str(token["content"] if isinstance(token, dict) and "content" in token else token)


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template from wherever transformers has kept it over the years; of several, the default one."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    template = _optional(folder / _OLD_TEMPLATE).get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return str(template) if template else None


def _tokenizer_json(folder: Path, config: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """The folder's own file; changed only where the configuration beside it says otherwise, as transformers does."""
    path = folder / TOKENIZER
    text = path.read_text(encoding="utf-8") if path.is_file() else _converted(folder)
    tokenizer = parse(text, str(path))
    if _mark_special(tokenizer, names):
        text = str(tokenizer.to_str(pretty=True))
    if "add_bos_token" in config or "add_eos_token" in config:
        bos, eos = (_around(tokenizer, config, names, name) for name in ("bos_token", "eos_token"))
        if tokenizer.encode("").ids != [id for _, id in filter(None, (bos, eos))]:
            text = dump({**json.loads(text), "post_processor": around_text(bos, eos)})
    return text


def _converted(folder: Path) -> str:
    """A tokenizer.json that transformers makes of an older kind of vocabulary."""
    if not any((folder / name).is_file() for name in _OLD_VOCABULARIES):
        raise FileNotFoundError(f"{folder}: no {TOKENIZER}")
    if (folder / "tokenizer.model").is_file():
        import sentencepiece  # noqa: F401  # transformers reads it with this, and without says that tiktoken is missing
    from transformers import AutoTokenizer

    try:
        return str(AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer.to_str(pretty=True))
    except Exception as error:  # whatever its converters raise
        reason = " ".join(str(error).split())
        message = f"{folder}: no {TOKENIZER}, and transformers cannot make one of what is there: {reason}"
        raise ValueError(message) from error


def _mark_special(tokenizer: library.Tokenizer, names: Mapping[str, str]) -> bool:
    """Make the tokens with a role special where they are not yet; say whether there were any."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    plain = [name for name in dict.fromkeys(names.values()) if name not in special]
    tokenizer.add_special_tokens([library.AddedToken(name, special=True, normalized=False) for name in plain])
    return bool(plain)


def _around(
    tokenizer: library.Tokenizer, config: Mapping[str, Any], names: Mapping[str, str], name: str
) -> tuple[str, int] | None:
    id = tokenizer.token_to_id(names.get(name, ""))
    return (names[name], id) if config.get(f"add_{name}") and id is not None else None
