"""Chat templates: Jinja in a sandbox, with what the templates of Hugging Face models expect to find.

The conventions (whitespace control, ``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, loop
controls, the ``generation`` block) are those of transformers' ``apply_chat_template``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_SECONDS = 10.0
_LONGEST = 1 << 62  # of a product

_deadline: ContextVar[float] = ContextVar("deadline")


class ChatTemplate:
    """A compiled template. Raises ValueError when it is not valid Jinja."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from None

    def render(self, variables: Mapping[str, Any], *, seconds: float = RENDER_SECONDS) -> str:
        """The text for ``variables``. Raises ValueError when the template refuses or fails, or takes too long."""
        token = _deadline.set(time.monotonic() + seconds)
        try:
            return self._template.render(variables)
        except _Refused as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ValueError(f"the chat template fails on these messages: {error}") from error
        except (RecursionError, MemoryError, _TookTooLong):
            raise ValueError(f"the chat template does not end in {seconds:g} seconds, or nests too deeply") from None
        finally:
            _deadline.reset(token)


class _Refused(Exception):
    """The template called raise_exception."""


class _TookTooLong(Exception):
    pass


def _tick() -> None:
    if time.monotonic() > _deadline.get():
        raise _TookTooLong


def _ticking(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _tick()
        yield item


class _Environment(ImmutableSandboxedEnvironment):
    """Every loop step and every call looks at the clock: a template comes with a model and may be anything."""

    intercepted_binops = frozenset({"*", "**"})  # a single one of these may take for ever, or all memory

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "ticking", [], [], None, None)
        return template

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _tick()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or _size(left) * _size(right) > _LONGEST:
            raise SecurityError(f"{operator} with operands of this size")
        return super().call_binop(context, operator, left, right)


def _size(operand: Any) -> int:
    """A string's or list's length, a number's size."""
    return len(operand) if hasattr(operand, "__len__") else abs(int(operand))


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant says, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.filters["ticking"] = _ticking
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
