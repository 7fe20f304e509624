"""Every family on outputs that were written by hand after the models' public chat templates."""

from __future__ import annotations

from collections import Counter

import pytest

from kvloom_common.parsers import registry
from kvloom_common.parsers.events import Event, merge
from kvloom_common.parsers.output_parser import make_parser
from tests.examples import SOME_OR_ALL
from tests.unit.kvloom_common.parsers.corpus import TOOLS, Case, cases

FAMILIES: dict[str, list[Case]] = {}
for one in cases():
    FAMILIES.setdefault(one.family, []).append(one)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_becomes_these_events(family: str) -> None:
    """A client gets what the model meant, whole."""
    for case in FAMILIES[family]:
        parser = make_parser(case.spec, TOOLS)
        assert merge(parser.feed(case.text) + parser.finish()) == case.events, case.name


@pytest.mark.parametrize("stride", SOME_OR_ALL)
@pytest.mark.parametrize("family", FAMILIES)
def test_character_by_character_it_is_the_same_after_every_character(family: str, stride: int) -> None:
    """Whatever a step of the engine gave, and wherever another process takes over."""
    for case in FAMILIES[family]:
        slow = make_parser(case.spec, TOOLS)
        events: list[Event] = []
        for i, character in enumerate(case.text):
            events = merge(events + slow.feed(character))
            if i % stride == 0:
                assert events == merge(make_parser(case.spec, TOOLS).feed(case.text[: i + 1])), case.name
        assert merge(events + slow.finish()) == case.events, case.name


def test_every_family_has_its_cases() -> None:
    """A family without a corpus is a family that was never tried."""
    tools = Counter(case.spec.tools for case in cases())
    families = set(registry.tool_families()) - {"deepseek_r1"}  # another name of deepseek_v3
    assert {name for name in families if tools[name] < 20} == set()
    reasoning = Counter(case.spec.reasoning for case in cases())
    assert {name for name in registry.reasoning_families() if reasoning[name] < 15} == set()
