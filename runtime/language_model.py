"""An opened artifact: text, messages or token ids in, results out."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np
import numpy.typing as npt

from diptych.runtime.generate import Completion, Generation, Prompt, Result, run_batch
from diptych.runtime.manifest import Manifest, read_object
from diptych.runtime.options import OptionNames, Options, recommended
from diptych.runtime.programs import Programs, open_programs, short_name
from diptych.runtime.session import Session, token_ids
from diptych.runtime.settings import Sessions, Settings, choose
from diptych.runtime.text import Message, Text
from diptych.runtime.tuning import remembered

PromptLike = str | Sequence[int] | npt.NDArray[np.integer[Any]] | Sequence[Message]


def load(
    path: str | Path,
    *,
    sessions: Sessions | None = None,
    threads: int | None = None,
    spinning: bool | None = None,
    float32_prefill: bool | None = None,
    provider: str = "cpu",
    check_hashes: bool = False,
) -> LanguageModel:
    """Open an artifact.

    ``sessions``, ``threads``, ``spinning`` and ``float32_prefill`` are explained at
    :class:`~diptych.runtime.settings.Settings`; where none is given, what ``diptych tune`` found on this machine
    counts, else the defaults: one session, a thread for each physical core, spinning.  ``model.settings`` tells what
    was chosen and why.  ``provider`` is ONNX Runtime's, such as ``"cpu"`` or ``"cuda"``, and never replaced by another;
    ``check_hashes`` reads every file and compares it with the manifest.

    Raises FileNotFoundError when there is no artifact, ValueError when it is damaged, not to be trusted, or cannot run
    here.
    """
    manifest = Manifest.open(path, check_hashes=check_hashes)
    if manifest.verification == "failed":
        warnings.warn(f"{path}: the export found that this artifact does not agree with its source", stacklevel=2)
    asked = {"sessions": sessions, "threads": threads, "spinning": spinning, "float32_prefill": float32_prefill}
    tuned = remembered(manifest) if short_name(provider) == "cpu" else None  # where it was measured
    settings = choose(asked, tuned)
    text = Text(manifest)  # first, so that ONNX Runtime packs weights into the memory that parsing used
    return LanguageModel(manifest, open_programs(manifest, settings, provider=provider), text)


class LanguageModel:
    """May be used from several threads at once: each generation has a session of its own."""

    def __init__(self, manifest: Manifest, programs: Programs, text: Text) -> None:
        self.manifest = manifest
        self.text = text
        self._programs = programs

    @property
    def provider(self) -> str:
        """What the graphs run on."""
        return self._programs.provider

    @property
    def settings(self) -> Settings:
        """How it runs here, and why so."""
        return self._programs.settings

    @property
    def recommended(self) -> OptionNames:
        """The model's own sampling settings, from its generation_config.json.

        They apply only when passed on: ``model.generate(prompt, **model.recommended)``.
        """
        path = self.manifest.path("generation_config.json")
        return recommended(read_object(path) if path else {})

    def session(self, rows: int = 1, capacity: int | None = None) -> Session:
        """A fresh cache of ``rows`` sequences; see :class:`Session`."""
        return Session(self._programs, rows, capacity)

    def encode(self, prompt: PromptLike, **options: Unpack[OptionNames]) -> list[int]:
        """The token ids that generating from ``prompt`` with these options starts from."""
        return self._prompt(prompt, Options.named(options)).token_ids

    def generate(
        self,
        prompt: PromptLike,
        *,
        on_piece: Callable[[str], object] | None = None,
        session: Session | None = None,
        **options: Unpack[OptionNames],
    ) -> Result:
        """Generate to the end, like :meth:`stream`. ``on_piece`` sees the text as it comes, and may raise to stop."""
        with self.stream(prompt, session=session, **options) as generation:
            for piece in generation:
                if on_piece:
                    on_piece(piece)
        return generation.result

    def stream(
        self, prompt: PromptLike, *, session: Session | None = None, **options: Unpack[OptionNames]
    ) -> Generation:
        """Generate piece by piece; options: see :class:`~diptych.runtime.options.Options`.

        ``prompt`` is a string, token ids (used as they are), or messages.  It must fit into the context; a prompt of n
        tokens in a capacity of c leaves room for c - n + 1 new ones, since the last one need not be held.

        ``session``, of one row, is continued: of what it holds, the longest common beginning with the prompt is not
        computed again.

        Raises, before anything is computed: TypeError for a name that is no option; ValueError for a wrong value, an
        empty prompt, a token that the model does not have, or a prompt that does not fit.  While it runs:
        NonFiniteLogits.
        """
        checked = Options.named(options)
        completion = self._completion(self._prompt(prompt, checked), checked)
        session = self.session() if session is None else session
        if session.rows != 1:
            raise ValueError(f"a generation needs a session of one row, not {session.rows}; see generate_batch()")
        _check_fit(completion, session.limit)
        return Generation(session, completion, self._runtime())

    def generate_batch(
        self,
        prompts: Sequence[PromptLike],
        *,
        overrides: Sequence[OptionNames] | None = None,
        **options: Unpack[OptionNames],
    ) -> list[Result]:
        """Generate from several prompts, whose rows take their steps together; each has the result it has alone.

        ``overrides`` are options of single prompts, one mapping for each.  A prompt whose logits are not finite has a
        result with the reason ``error``.
        """
        if isinstance(prompts, str):
            raise ValueError(f"a batch is a sequence of prompts, not one string: [{prompts!r:.40}]")
        merged = [Options.named({**options, **own}) for own in overrides or [{}] * len(prompts)]
        if not prompts or len(merged) != len(prompts):
            raise ValueError(f"a batch needs prompts, and overrides for each: not {len(prompts)} and {len(merged)}")
        completions = [
            self._completion(self._prompt(prompt, each), each) for prompt, each in zip(prompts, merged, strict=True)
        ]
        session = self.session(rows=len(prompts))
        for completion in completions:
            _check_fit(completion, session.limit)
        run_batch(session, completions)
        return [completion.result(self._runtime()) for completion in completions]

    def _completion(self, prompt: Prompt, options: Options) -> Completion:
        eos = options.eos_ids if options.eos_ids is not None else self.manifest.vocabulary.eos_token_ids
        return Completion(self.text, options, frozenset(eos), prompt)

    def _runtime(self) -> dict[str, Any]:
        return {
            "model": self.manifest.name,
            "target": self.manifest.target,
            "provider": self.provider,
            **self.settings.to_json(),
        }

    def _prompt(self, prompt: PromptLike, options: Options) -> Prompt:
        start = time.perf_counter()
        ids, goes_on = self._encode(prompt, options)
        if not len(ids):
            raise ValueError(
                "the prompt is empty: this tokenizer adds no beginning-of-sequence token that one could start from"
            )
        checked: list[int] = token_ids(ids, self.manifest.vocabulary.size).tolist()
        return Prompt(checked, time.perf_counter() - start, goes_on)

    def _encode(self, prompt: PromptLike, options: Options) -> tuple[Sequence[int], bool]:
        """Token ids, and whether the answer goes on with the prompt's text."""
        if isinstance(prompt, str):
            as_message = self.text.has_chat_template if options.raw is None else not options.raw
            if as_message:
                return self._encode_chat([{"role": "user", "content": prompt}], options), False
            return self.text.encode(prompt), True
        if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Sequence | np.ndarray):
            raise ValueError(f"a prompt is a string, or a sequence of token ids or of messages, not {prompt!r:.80}")
        if len(prompt) and isinstance(prompt[0], Mapping):
            if options.raw:
                raise ValueError("raw=True continues text as it is; messages go through the chat template: choose one")
            return self._encode_chat(cast("Sequence[Message]", prompt), options), False
        return cast("Sequence[int]", prompt), True

    def _encode_chat(self, messages: Sequence[Message], options: Options) -> list[int]:
        tools = {"tools": options.tools} if options.tools else {}
        return self.text.encode_chat(messages, **{**tools, **(options.chat_template_kwargs or {})})


def _check_fit(completion: Completion, limit: int) -> None:
    if len(completion.prompt) > limit:
        raise ValueError(
            f"the prompt has {len(completion.prompt)} tokens, and the context holds {limit}: shorten it, or export the "
            "model with a larger context"
        )
