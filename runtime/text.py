"""Text in, token ids out, and back: the tokenizer, the chat template, and what keeps users' text text."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from diptych.runtime.chat_template import ChatTemplate
from diptych.runtime.detokenizer import Detokenizer, TokenBytes
from diptych.runtime.manifest import Manifest, read_object, read_text
from diptych.runtime.special_tokens import BREAK, ESCAPED_BREAK, Guard

Message = Mapping[str, Any]

# What templates find even if nobody gives it; transformers does the same, and templates ask whether tools are none.
_TEMPLATE_DEFAULTS = {"add_generation_prompt": True, "tools": None, "documents": None}


class Text:
    """The text side of an artifact.

    A raw prompt is tokenised as it stands: special tokens in it are control tokens.  In messages they are not: only
    the chat template's own are, whatever a message contains.

    The beginning-of-sequence token comes exactly once where the tokenizer adds one, also when the prompt or the
    template begins with it already, and never where the tokenizer adds none and the text does not name it.

    An artifact without a tokenizer works with token ids alone: they have no text, and strings and messages are refused.
    """

    def __init__(self, manifest: Manifest) -> None:
        path = manifest.path("tokenizer.json")
        self._opened = _open_tokenizer(read_text(path), path) if path else None
        self._path = path
        self._config = read_object(file) if (file := manifest.path("tokenizer_config.json")) else {}
        added = self._opened.get_added_tokens_decoder() if self._opened else {}
        eos = manifest.vocabulary.eos_token_ids
        self._special = {id_: token.content for id_, token in added.items() if token.special or id_ in eos}
        self._bytes = _token_bytes(self._opened, {token.content for token in added.values()})
        self._skipped = frozenset(self._special)
        self._guard = Guard(self._special.values())
        self._bos = _first_added(self._opened) if self._opened else None
        source = _chat_template(manifest, self._config)
        self._template = ChatTemplate(source) if source else None

    # ----------------------------------------------------------------------------------------------------- tokenising

    def encode(self, text: str) -> list[int]:
        """A raw prompt's token ids, with the beginning-of-sequence token where the tokenizer adds one."""
        return self._with_one_bos(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The token ids of a conversation; the arguments are those of :meth:`render`."""
        text = self._render(messages, variables)
        tokenizer = self._guarded_tokenizer if BREAK in text else self._tokenizer
        return self._with_one_bos(tokenizer.encode(text, add_special_tokens=False).ids)

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The conversation as the chat template writes it.

        ``variables`` are passed on to the template: ``tools``, ``add_generation_prompt`` (True unless given), and
        whatever else it knows (such as ``enable_thinking``).

        Raises ValueError when there is no template, the messages are malformed, or the template refuses them.
        """
        return self._render(messages, variables).replace(BREAK, "")

    def special_token(self, text: str) -> int | None:
        """The id of a special token; None if there is none that is written so."""
        return next((token for token, content in self._special.items() if content == text), None)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    # --------------------------------------------------------------------------------------------------- detokenising

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, as of a text on its own. Bytes that are no UTF-8 become U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, tokens)) + detokenizer.finish(complete=True)

    def detokenizer(self, *, skip_special_tokens: bool = True, continues: bool = False) -> Detokenizer:
        """For tokens as they come. ``continues``: the text goes on behind another one, so a first space is kept."""
        strip = self._bytes.strips_first_space and not continues
        return Detokenizer(self._bytes, skip=self._skipped if skip_special_tokens else (), strip_first_space=strip)

    # ------------------------------------------------------------------------------------------------------ internals

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._opened is None:
            raise ValueError("this artifact has no tokenizer: give the prompt as token ids")
        return self._opened

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        if self._bos is None:
            return ids
        start = next((i for i, token in enumerate(ids) if token != self._bos), len(ids))
        return [self._bos, *ids[start:]]

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The conversation, with special tokens in messages and variables broken up."""
        if self._template is None:
            raise ValueError(
                "this artifact has no chat template, so it takes no messages: give text with raw=True, or ids"
            )
        _check_messages(messages)
        given = self._guard({**_TEMPLATE_DEFAULTS, **variables, "messages": [_without_nulls(m) for m in messages]})
        text = self._template.render({**token_names(self._config), **given})
        return text.replace(ESCAPED_BREAK, BREAK)

    @cached_property
    def _guarded_tokenizer(self) -> Tokenizer:
        """The same tokenizer, which drops the breaks after it has looked for special tokens and before all else.

        Special tokens are looked for in the text as it comes (``normalized: false``); then the normaliser runs.
        """
        assert self._path is not None  # there is a tokenizer, or there would be no text to guard
        definition = read_object(self._path)
        for token in definition.get("added_tokens") or []:
            token["normalized"] = token["normalized"] and token["id"] not in self._special
        drop = {"type": "Replace", "pattern": {"String": BREAK}, "content": ""}
        rest = definition.get("normalizer")
        definition["normalizer"] = {"type": "Sequence", "normalizers": [drop, rest] if rest else [drop]}
        return _open_tokenizer(json.dumps(definition), self._path)


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise ValueError("the conversation has no messages: give at least one, such as {'role': 'user', 'content': …}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} must be a mapping with a 'role' (a string), not {message!r:.80}")


def _without_nulls(message: Message) -> Message:
    """OpenAI's clients write ``"content": null``; templates test whether a key is there, as transformers sees to."""
    return {key: value for key, value in message.items() if value is not None}


def _chat_template(manifest: Manifest, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or else what tokenizer_config.json holds: one template, or several with a default."""
    if file := manifest.path("chat_template.jinja"):
        return read_text(file)
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


def token_names(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like, for templates; tokenizer_config.json holds their text plain or in an object."""
    tokens = {name: value for name, value in config.items() if name.endswith("_token") and value}
    return {name: value["content"] if isinstance(value, Mapping) else value for name, value in tokens.items()}


def _open_tokenizer(definition: str, path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(definition)
    except Exception as error:  # what the library raises is a plain Exception
        raise ValueError(f"{path} is not a tokenizer that this version of tokenizers reads: {error}") from None
    # Files often keep a training run's settings, which would silently cut or fill prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _first_added(tokenizer: Tokenizer) -> int | None:
    """The token that a tokenizer puts before every text."""
    bare, full = (tokenizer.encode("a text, 1 of 2", add_special_tokens=flag).ids for flag in (False, True))
    return full[0] if full[: len(bare)] != bare else None


def _token_bytes(tokenizer: Tokenizer | None, added: Collection[str]) -> TokenBytes:
    """The decoder is read from its pickled state, which is its part of tokenizer.json: the file may have 30 MB."""
    if tokenizer is None:
        return TokenBytes(lambda _: None, {"type": "ByteLevel"}, added)
    decoder: Any = tokenizer.decoder
    return TokenBytes(tokenizer.id_to_token, decoder and json.loads(decoder.__getstate__()), added)
