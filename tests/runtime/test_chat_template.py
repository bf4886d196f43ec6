"""Chat templates as transformers renders them, in a sandbox that no template gets out of or hangs in."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from diptych.runtime.chat_template import ChatTemplate

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " <b>1 & 2</b> 'é' "},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "é": [2.5]}}}],
    },
    {"role": "tool", "content": "3"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}]

TEMPLATES = {
    "ChatML": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
        "{% endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "whitespace control": (
        "{%- for m in messages -%}\n    {%- if loop.first %}\n        first\n    {%- elif loop.last -%}\n  last\n"
        "  {% endif %}\n{{ m.content | trim }}\n{% endfor %}\n\n"
    ),
    "loop variables": (
        "{% for m in messages %}{{ loop.index0 }}/{{ loop.length }}/{{ loop.revindex }}{{ loop.previtem is defined }} "
        "{% endfor %}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
        "{% if m.role == 'tool' %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    ),
    "filtered loop": "{% for m in messages if m.role != 'system' %}{{ m.role }},{% else %}none{% endfor %}",
    "recursive loop": (
        "{% for x in [[1, [2, [3]]]] recursive %}{% if x is iterable %}<{{ loop(x) }}>{% else %}{{ x }}{% endif %}"
        "{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n * 2 }}"
    ),
    "macro": "{% macro show(m, sep=': ') %}{{ m.role }}{{ sep }}{{ m.content }}{% endmacro %}{{ show(messages[0]) }}",
    "tojson": "{% for m in messages %}{{ m | tojson }}{{ [m.role] | tojson(indent=2) }}{% endfor %}",
    "tojson of tools": (
        "{{ tools | tojson(indent=4, separators=(',', ': '), sort_keys=true) }}{{ 'é<' | tojson(ensure_ascii=true) }}"
    ),
    "slices and strings": (
        "{{ messages[1:][::-1][0].role.upper() }}{{ 'a b'.split()[-1] ~ 3 }}{{ '-' * 5 }}{{ '%s' % 2 }}"
    ),
    "undefined": (
        "{{ missing }}{% if missing is not defined %}x{% endif %}{{ messages[9].content if messages | length > 9 }}"
    ),
    "scope of a generation": "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    "tests and filters": (
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}{{ 7 // 2 }}"
    ),
    "no tools": "{% if tools is none %}none{% else %}{{ tools | length }}{% endif %}",
}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_same_bytes_as_transformers(name: str, tools: list[dict[str, Any]] | None) -> None:
    render: Any = render_jinja_template  # its annotations are narrower than what it does
    rendered, _ = render([MESSAGES], tools, chat_template=TEMPLATES[name], add_generation_prompt=True)
    variables = {"messages": MESSAGES, "tools": tools, "documents": None, "add_generation_prompt": True}
    assert [ChatTemplate(TEMPLATES[name]).render(variables)] == rendered


def test_the_date() -> None:
    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}").render({}) == datetime.now().strftime("%d %b %Y")


def test_templates_may_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="the chat template refuses these messages: roles must alternate"):
        template.render({})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ range(10000000) | list }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ 'x' * 999999999999999999999 }}",
        "{{ undefined_function() }}",
        "{{ messages + 'x' }}",
        "{{ 1 / 0 }}",
        "{% include 'other' %}",
    ],
)
def test_what_the_sandbox_does_not_allow(source: str) -> None:
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises(ValueError, match="the chat template"):
        ChatTemplate(source).render({"messages": messages})
    assert messages == MESSAGES


ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over a list": (
        "{% set r = range(9999) | list %}"
        "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}"
    ),
    "slow steps": "{% set r = range(99999) | list %}{% for a in r %}{% set x = r | sort %}{% endfor %}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a macro without an end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_nothing_goes_on_for_ever(name: str) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match=re.escape("does not end in 0.2 seconds")):
        ChatTemplate(ENDLESS[name]).render({}, seconds=0.2)
    assert time.monotonic() - start < 10


def test_messages_are_not_html() -> None:
    assert ChatTemplate("{{ messages[1].content }}").render({"messages": MESSAGES}) == MESSAGES[1]["content"]
