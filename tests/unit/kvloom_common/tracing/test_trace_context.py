"""The W3C trace context, and which spans are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.tracing.spans import KeepRule, Span
from kvloom_common.tracing.trace_context import TraceContext, is_drawn, parse_traceparent

contexts = st.builds(
    TraceContext, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans()
)  # fmt: skip
RULE = KeepRule(slow_ttft_seconds=2.0, slow_seconds=30.0)


@given(context=contexts)
def test_a_header_is_read_as_it_was_written(context: TraceContext) -> None:
    """Processes of other languages read it, too."""
    assert len(context.header) == 55
    assert parse_traceparent(context.header) == context


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-0-0-01",
        f"00-{'0' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'0' * 16}-01",
        f"ff-{'1' * 32}-{'1' * 16}-01",
        f"00-{'1' * 32}-{'1' * 16}-01-more",
        f"00-{'A' * 32}-{'1' * 16}-01",
    ],
)
def test_a_malformed_header_is_no_context(text: str) -> None:
    """The recommendation names these as invalid."""
    assert parse_traceparent(text) is None


def test_a_later_version_may_have_more_fields() -> None:
    """The recommendation wants its first four read."""
    context = parse_traceparent(f"01-{'1' * 32}-{'2' * 16}-03-more")
    assert context == TraceContext(int("1" * 32, 16), int("2" * 16, 16), is_sampled=True)


@given(context=contexts, names=st.lists(st.text(max_size=20), min_size=2, max_size=2, unique=True))
def test_children_have_ids_that_all_processes_agree_on(context: TraceContext, names: list[str]) -> None:
    """A router does not tell a shard its span: both derive it."""
    first, second = (context.child(name) for name in names)
    assert first == context.child(names[0])
    assert first.span_id != second.span_id
    assert (first.trace_id, first.is_sampled) == (context.trace_id, context.is_sampled)


@given(trace_id=st.integers(1, 2**128 - 1), share=st.floats(0, 1))
def test_a_larger_share_draws_what_a_smaller_one_draws(trace_id: int, share: float) -> None:
    """So processes with different shares agree as far as they can; all and none are exact."""
    assert is_drawn(trace_id, 1.0)
    assert not is_drawn(trace_id, 0.0)
    assert not is_drawn(trace_id, share) or is_drawn(trace_id, min(1.0, share * 2))


def span(*, is_sampled: bool = False, seconds: float = 1.0, **fields: object) -> Span:
    return Span("s", TraceContext(1, 2, is_sampled), 0, 100.0, 100.0 + seconds, **fields)


@pytest.mark.parametrize(
    ("told", "is_kept"),
    [
        (span(), False),
        (span(is_sampled=True), True),
        (span(error="engine_failed"), True),
        (span(is_notable=True), True),
        (span(seconds=30.0), True),
        (span(ttft_seconds=2.0), True),
        (span(seconds=29.0, ttft_seconds=1.9), False),
    ],
)
def test_what_is_slow_failed_or_notable_is_kept(told: Span, *, is_kept: bool) -> None:
    """The share alone would lose nearly all of what operators look for."""
    assert RULE.keeps(told) is is_kept
