"""Merging steps never loses, repeats or reorders a sequence's content, however the steps are cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.frames import Step
from router.links.step_outbox import merge_steps
from tests.examples import num_examples

entry = st.tuples(st.integers(0, 5), st.lists(st.integers(0, 99), max_size=3), st.text(max_size=3))
step_entries = st.lists(entry, max_size=6, unique_by=lambda e: e[0])


def step_of(entries: list[tuple[int, list[int], str]]) -> Step:
    step = Step()
    for slot, ids, text in entries:
        step.slots.append(slot)
        step.token_ids.extend(ids)
        step.deltas.append(text)
        step.logprobs.extend((slot, token) for token in ids)
    if any(len(ids) != 1 for _, ids, _ in entries):
        step.num_tokens = [len(ids) for _, ids, _ in entries]
    return step


@settings(max_examples=num_examples(200))
@given(st.lists(step_entries, min_size=2, max_size=5))
def test_each_sequence_receives_the_same_as_without_merging(all_entries: list) -> None:
    """The merged step is read as a client reads it, and compared with the single steps."""
    merged = merge_steps([step_of(entries) for entries in all_entries])
    assert len(set(merged.slots)) == len(merged.slots)
    position = 0
    for i, slot in enumerate(merged.slots):
        count = merged.num_tokens[i] if merged.num_tokens else 1
        own = [e for entries in all_entries for e in entries if e[0] == slot]
        tokens = [token for _, ids, _ in own for token in ids]
        assert merged.token_ids[position : position + count] == tokens
        assert merged.deltas[i] == "".join(text for *_, text in own)
        assert [token for s, token in merged.logprobs if s == slot] == tokens
        position += count
    assert position == len(merged.token_ids)
    assert [token for _, token in merged.logprobs] == merged.token_ids
