"""The turns that are kept of a conversation that does not fit the model's window."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_http.openai.responses.context_window import KEPT_SHARE, first_kept, left_out, within
from kvloom.text.chat_message import ChatMessage
from tests.examples import num_examples
from tests.fakes.context_windows import conversation, measured, sliding

ROOM = 1000
TURNS = st.lists(st.integers(1, 400), min_size=1, max_size=60)


@given(turns=TURNS)
@settings(max_examples=num_examples(100), deadline=None)
def test_what_is_kept_fits_and_the_last_turn_is_kept(turns: list[int]) -> None:
    """A turn that does not fit by itself is refused later, with the name of its field."""
    first = first_kept(turns, ROOM)
    assert first < len(turns)
    assert sum(turns[first:]) <= ROOM
    assert first_kept([*turns[:-1], 5 * ROOM], ROOM) == len(turns) - 1


@given(turns=TURNS)
@settings(max_examples=num_examples(100), deadline=None)
def test_a_prefix_changes_seldom(turns: list[int]) -> None:
    """Between two changes at least as much is said as is left free by one, less one turn; and what was left out once is
    never told again."""
    firsts = [first_kept(turns[:end], ROOM) for end in range(1, len(turns) + 1)]
    assert firsts == sorted(firsts)
    changes = [number for number in range(1, len(turns)) if firsts[number] != firsts[number - 1]]
    for before, after in itertools.pairwise(changes):
        assert sum(turns[before + 1 : after + 1]) > ROOM * (1 - KEPT_SHARE) - max(turns)


def test_instructions_stay_where_they_are() -> None:
    """Those of the system and of developers hold for the whole conversation. What an assistant and its tools have said
    goes with the question."""
    roles = ["system", "user", "assistant", "tool", "assistant", "system", "user", "assistant", "user"]
    messages = [ChatMessage(role, str(number)) for number, role in enumerate(roles)]
    kept = within(messages, [100] * len(messages), 600)
    assert [message.content for message in kept] == ["0", "5", "6", "7", "8"]
    assert within(messages, [100] * len(messages), 900) == messages


def test_pinned_turns_stay() -> None:
    """A client says what must not be forgotten. Whole turns stay, since templates expect answers behind questions."""
    messages = [ChatMessage(role, f"{role} {number}") for number in range(5) for role in ("user", "assistant")]
    for pinned in (2, 3):
        marked = [message._replace(is_pinned=number == pinned) for number, message in enumerate(messages)]
        kept = within(marked, [100] * len(messages), 600)
        assert [message.content[-1] for message in kept] == ["1", "1", "3", "3", "4", "4"]
        assert [message.content[-1] for message in left_out(marked, kept)] == ["0", "0", "2", "2"]
    assert within([messages[0]._replace(is_pinned=True)], [900], 600)[0].content == "user 0"


def test_the_prefix_cache_survives() -> None:
    """In conversations of 30 turns nearly as much is found in the cache as with the whole history, where a sliding
    window finds half of it."""
    rng = random.Random(1)
    talks = [conversation(30, rng) for _ in range(5)]
    whole = measured(talks, lambda messages, _: messages)
    kept = measured(talks, lambda messages, sizes: within(messages, sizes, 4096))
    slid = measured(talks, sliding(4096))
    assert max(kept["longest_prompt"], slid["longest_prompt"]) <= 4096
    assert slid["hit_rate"] < 0.6 < 0.8 < kept["hit_rate"] < whole["hit_rate"]
