"""Templates end, whatever they contain: a model's template is someone else's program."""

from __future__ import annotations

import resource
import time

import pytest

from kvloom.errors import KvloomError
from kvloom.text.chat_message import ChatMessage
from kvloom_common.text.chat_template import ChatTemplate

MESSAGES = [ChatMessage("user", "hello " * 1000)]
HOSTILE = {
    "a product": "{{ 'a' * 2000000000 }}",
    "a product from the left": "{{ 2000000000 * 'a' }}",
    "a list": "{{ ([0] * 2000000000) | length }}",
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "many texts": "{% set n = namespace(x='a' * 9999999, l=[]) %}{% for i in range(999) %}"
    "{% set n.l = n.l + [n.x ~ i] %}{% endfor %}",
    "a power": "{{ 9 ** 999999999 }}",
    "a number": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a padding method": "{{ 'a'.center(2000000000) }}",
    "a padding filter": "{{ 'a' | center(2000000000) }}",
    "an indentation": "{{ messages[0].content | indent(2000000000, true) }}",
    "a format": "{{ '%2000000000d' % 1 }}",
    "a format method": "{{ '{:2000000000}'.format(1) }}",
    "a format filter": "{{ '%2000000000d' | format(1) }}",
    "a replacement": "{{ messages[0].content.replace('', 'b' * 1000000) }}",
    "a joined text": "{{ ('b' * 1000000).join(messages[0].content.split()) }}",
    "a fill": "{{ [1] | batch(2000000000, 'x') | list }}",
    "a recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a long output": "{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_is_refused_with_a_reason(source: str) -> None:
    """They took 43 s and 5.7 GB: one request stopped the edge for everybody."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.thread_time()
    with pytest.raises(KvloomError) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.field == "messages"
    assert time.thread_time() - started < 20  # the bound is 5 s; without it the test would not end
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 2**10


def test_what_real_templates_do_is_still_possible() -> None:
    """Templates slice, join, format, concatenate and look at their loop's position."""
    source = (
        "{%- set n = namespace(seen=0) -%}{%- for m in messages[::-1] -%}{%- set n.seen = n.seen + 1 -%}"
        "{{ loop.index }}/{{ loop.length }}{{ '!' if loop.last else ',' }}{{ m.role | upper }}:"
        "{{ '%s' % m.content[:2] }}{{ 'a' ~ 'b' }}{{ '-' * 3 }}{{ ['x', 'y'] | join('+') }}"
        "{{ 'a b'.split(' ')[1].replace('b', 'c') }} {%- endfor -%}{{ n.seen }}"
    )
    messages = [ChatMessage("user", "hi there"), ChatMessage("assistant", "yes")]
    assert ChatTemplate(source, {}).render(messages) == "1/2,ASSISTANT:yeab---x+yc2/2!USER:hiab---x+yc2"
