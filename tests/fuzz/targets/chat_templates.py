"""Chat templates as a model may come with: hostile ones, put together of what is costly in Jinja, and mutated.

A template is refused when it is loaded (ValueError), or renders or refuses the messages (KvloomError), within its
bounds of time and size.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from hypothesis import strategies as st

from kvloom.errors import KvloomError
from kvloom_common.text.bounded_template import MAX_SECONDS
from kvloom_common.text.chat_template import MAX_RENDERED_CHARS, ChatMessage, ChatTemplate
from tests.fakes.tiny_tokenizer import CHATML
from tests.fuzz.byte_edits import EDITS, edited
from tests.fuzz.log_watch import LogWatch
from tests.fuzz.target import Check, Target

MESSAGES: Final = [ChatMessage("system", "s"), ChatMessage("user", "the fox <b>é🙂</b>"), ChatMessage("assistant", "")]
GRACE_SECONDS: Final = 2.0
"""Beyond the template's own limit, for a busy machine."""
MAX_EXTRA_KIB: Final = 1_500_000
"""By how much the process's largest memory may grow in a run: far less than a template could ask for."""

ATOMS = st.sampled_from(
    [
        *("'a'", "''", "1", "0", "-1", "9999999999", "10**9", "2.5", "none", "true", "messages", "messages[0].content"),
        *("messages|length", "range(9999999)", "range(100)", "'%99999999d'", "'{:99999999}'", "[1,2,3]", "{'a': 1}"),
        *("loop", "self", "cycler(1,2)", "joiner(',')", "namespace(a='x')", "dict(a=1)", "bos_token", "undefined_name"),
        *(
            "''.__class__",
            "messages.__class__.__mro__",
            "cycler.__init__.__globals__",
            "strftime_now('%Y')",
            "lipsum()",
        ),
    ]
)
FILTERS: Final = (
    *("upper", "join(',')", "list", "string", "tojson", "tojson(indent=99999999)", "length", "sum", "sort", "unique"),
    *(
        "reverse",
        "first",
        "last",
        "indent(99999999)",
        "center(99999999)",
        "wordwrap(1)",
        "truncate(5)",
        "batch(9999999)",
    ),
    *(
        "slice(9999999)",
        "replace('', 'x' * 9999)",
        "map('upper')",
        "map(attribute='content')",
        "select",
        "groupby('role')",
    ),
    *("format(9999)", "urlize", "escape", "safe", "pprint", "xmlattr", "filesizeformat", "round(99)", "int", "float"),
    *("wordcount", "striptags", "default('x')", "attr('__class__')", "items", "dictsort", "random", "urlencode", "e"),
)
METHODS: Final = (
    *(".replace('', 'x' * 9999)", ".ljust(99999999)", ".zfill(99999999)", ".format(1)", ".join(['a'] * 999)"),
    *(".split('')", ".split()", ".expandtabs(99999999)", ".encode()", ".translate({})", ".splitlines()", ".append(1)"),
    *("[::-1]", "[0]", "[99:]", ".content", ".items()", ".count('')", ".__class__", ".format_map({})", ".upper()"),
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds(
            lambda a, o, b: f"({a} {o} {b})", inner, st.sampled_from(["*", "**", "%", "+", "~", "/", "in"]), inner
        ),
        st.builds(lambda a, f: f"({a}|{f})", inner, st.sampled_from(FILTERS)),
        st.builds(lambda a, m: f"({a}{m})", inner, st.sampled_from(METHODS)),
        st.builds(lambda a, b: f"[{a}, {b}]", inner, inner),
    ),
    max_leaves=6,
)
STATEMENTS = st.recursive(
    st.builds(lambda e: "{{ " + e + " }}", EXPRESSIONS) | st.sampled_from(["x", "\n", CHATML, "{% break %}"]),
    lambda inner: st.one_of(
        st.builds(lambda e, b: f"{{% for i in {e} %}}{b}{{% endfor %}}", EXPRESSIONS, inner),
        st.builds(lambda b: f"{{% for i in range(999999) %}}{b}{{% endfor %}}", inner),
        st.builds(lambda b: f"{{% for m in messages recursive %}}{b}{{{{ loop(messages) }}}}{{% endfor %}}", inner),
        st.builds(lambda e, b: f"{{% set x = {e} %}}{b}", EXPRESSIONS, inner),
        st.builds(
            lambda b: (
                f"{{% set ns = namespace(s='a') %}}{{% for i in range(99) %}}{{% set ns.s = ns.s ~ ns.s %}}{b}"
                "{% endfor %}"
            ),
            inner,
        ),
        st.builds(lambda b: f"{{% set x %}}{b}{{{{ x ~ x }}}}{{% endset %}}{{{{ x }}}}", inner),
        st.builds(lambda b: f"{{% macro m(a) %}}{b}{{{{ m(a ~ a) }}}}{{% endmacro %}}{{{{ m('x') }}}}", inner),
        st.builds(lambda e, b: f"{{% if {e} %}}{b}{{% endif %}}", EXPRESSIONS, inner),
        st.builds(lambda b: f"{{% filter upper %}}{b}{{% endfilter %}}", inner),
        st.builds(lambda b: f"{{% call(x) m() %}}{b}{{% endcall %}}{{% include 'x' %}}{{% import 'y' as z %}}", inner),
        st.builds(lambda b: f"{{% generation %}}{b}{{% endgeneration %}}{{{{ raise_exception('no') }}}}", inner),
        st.builds(lambda a, b: a + b, inner, inner),
    ),
    max_leaves=4,
)
INPUTS = st.fixed_dictionaries({"template": STATEMENTS, "edits": st.just([]) | EDITS})


def source_of(value: Any) -> str:
    return edited(value["template"].encode(), value["edits"]).decode("utf-8", "replace")


@contextlib.asynccontextmanager
async def open_templates(_watch: LogWatch) -> AsyncIterator[Check]:
    largest_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def check(value: Any) -> None:
        begin = time.process_time()
        render(source_of(value))
        seconds = time.process_time() - begin
        assert seconds < MAX_SECONDS + GRACE_SECONDS, f"{seconds:.1f} s"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - largest_before
        assert grown < MAX_EXTRA_KIB, f"{grown} KiB more"
        await asyncio.sleep(0)

    yield check


def render(source: str) -> None:
    try:
        template = ChatTemplate(source, {"bos_token": "<s>"})
    except ValueError:
        return
    refusal = None
    rendered = ""
    try:
        rendered = template.render(MESSAGES)
    except KvloomError as error:
        refusal = error
    if refusal is not None:
        assert refusal.kind.http_status == 400
        assert len(refusal.message) < 2000, refusal.message[:200]
    assert len(rendered) <= MAX_RENDERED_CHARS
    assert "<class" not in rendered


TARGET = Target("chat_templates", INPUTS, open_templates, suite_examples=25)
