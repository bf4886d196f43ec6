"""Run an artifact: token ids and text in, token ids and text out. NumPy, ONNX Runtime, tokenizers and Jinja, no more.

::

    model = load("artifacts/smollm2-135m-instruct")
    print(model.generate("Tell me the capital of France.", max_tokens=64).text)

    for piece in model.stream([{"role": "user", "content": "Tell me more."}], temperature=0.7, seed=1):
        print(piece, end="", flush=True)

A prompt goes through :mod:`text` (token ids), :mod:`generate` (the loop), :mod:`session` (rows and their cache) to the
graphs that :mod:`programs` opened as :mod:`settings` say.
"""

from diptych.runtime.generate import Generation, Result, Timing, Usage
from diptych.runtime.language_model import LanguageModel, load
from diptych.runtime.manifest import Manifest
from diptych.runtime.session import Session
from diptych.runtime.text import Message, Text

__all__ = [
    "Generation",
    "LanguageModel",
    "Manifest",
    "Message",
    "Result",
    "Session",
    "Text",
    "Timing",
    "Usage",
    "load",
]
