"""What can be asked of a generation, under the names that Hugging Face and OpenAI use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from typing import Any, TypedDict, cast

from diptych.runtime.sampling import Sampling


class OptionNames(TypedDict, total=False):
    """The keyword arguments of generating; :class:`Options` tells what they mean."""

    max_tokens: int | None
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    eos_token_id: int | Sequence[int] | None
    skip_special_tokens: bool
    raw: bool | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True)
class Options:
    """Checked options of one generation.

    ===================== ==================================================================================
    max_tokens            at most so many new tokens; None: until the model ends or the cache is full
    temperature           0, the default, is greedy. A model's own settings (generation_config.json) are not
                          applied by themselves: pass ``**model.recommended``
    top_k, top_p, min_p,  see :class:`~diptych.runtime.sampling.Sampling`
    repetition_penalty
    seed                  repeats random choices; None draws one, and the result names it
    stop                  strings that end the text and are not part of it
    eos_token_id          ids that end the text instead of the artifact's; an empty list: none does
    skip_special_tokens   leave special tokens out of the text
    raw                   for a prompt that is a string. True: continue it as it is. False: it is a user's message.
                          None: a message if the artifact has a chat template
    tools                 handed to the chat template
    chat_template_kwargs  more variables for the chat template, such as {"enable_thinking": False}
    ===================== ==================================================================================
    """

    max_tokens: int | None = 512
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    eos_token_id: int | Sequence[int] | None = None
    skip_special_tokens: bool = True
    raw: bool | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    @classmethod
    def named(cls, options: Mapping[str, Any]) -> Options:
        """Raises TypeError for a name that is no option, saying what may have been meant; ValueError for a value."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise TypeError(f"there is no option {name!r}; {_hint(name, known)}")
        return cls(**options)

    def __post_init__(self) -> None:
        if self.max_tokens is not None and not _natural(self.max_tokens):
            raise ValueError(f"max_tokens must be an integer of at least 0, or None, not {self.max_tokens!r}")
        if self.seed is not None and not _natural(self.seed):
            raise ValueError(f"seed must be an integer of at least 0, not {self.seed!r}")
        if not all(map(_natural, self.eos_ids or ())):
            raise ValueError(f"eos_token_id must be a token id or a list of them, not {self.eos_token_id!r}")
        _ = self.sampling  # checks the rest

    @cached_property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)

    @property
    def eos_ids(self) -> tuple[int, ...] | None:
        """None: the artifact's."""
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else _tuple(self.eos_token_id)


def recommended(generation_config: Mapping[str, Any]) -> OptionNames:
    """The sampling settings of a generation_config.json, as options; with ``do_sample`` false or absent, greedy."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    found: dict[str, Any] = {name: value for name in names if (value := generation_config.get(name)) is not None}
    if not generation_config.get("do_sample"):
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
    elif "temperature" not in found:
        found["temperature"] = 1.0  # Hugging Face's default
    return cast("OptionNames", found)


# Other libraries' names for what we have, or where to find it.
_ELSEWHERE = {
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "max_length", "num_predict"), "max_tokens"),
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words"), "stop"),
    **dict.fromkeys(("stop_token_ids", "eos_token_ids"), "eos_token_id"),
    **dict.fromkeys(("streamer", "callback", "stream"), "on_piece, or the method stream()"),
    **dict.fromkeys(("messages", "input_ids", "inputs", "prompt_token_ids"), "the prompt: text, ids or messages"),
    **dict.fromkeys(("enable_thinking", "documents", "add_generation_prompt"), "chat_template_kwargs"),
    **dict.fromkeys(("n", "num_return_sequences"), "generate_batch() with the prompt repeated and a seed for each"),
    "repeat_penalty": "repetition_penalty",
    "do_sample": "temperature, where 0 is greedy",
    "ignore_eos": "eos_token_id=[]",
    "system": "a message with the role 'system'",
}  # fmt: skip


def _hint(name: str, known: Sequence[str]) -> str:
    if name in _ELSEWHERE:
        return f"use {_ELSEWHERE[name]}"
    close = get_close_matches(name, known, 1)
    return f"did you mean {close[0]!r}?" if close else f"the options are: {', '.join(known)}"


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tuple(value: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)
