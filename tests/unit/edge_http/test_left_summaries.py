"""The summaries of turns that are left out."""

from __future__ import annotations

from edge_http.openai.responses import left_summaries
from edge_http.openai.responses.left_summaries import HEAD, KEPT_SECONDS, LeftSummaries, LeftTurns, with_summary
from kvloom.text.chat_message import ChatMessage

TURNS = [ChatMessage("user", "the fox"), ChatMessage("assistant", "jumps"), ChatMessage("user", "the dog")]
LEFT = LeftTurns("ann", "small 1", 100, TURNS)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_summary_is_of_one_scope_version_and_beginning() -> None:
    """Other tenants, models and conversations find nothing; a longer conversation finds that of its beginning."""
    summaries = LeftSummaries("small")
    summaries.add(LEFT._replace(messages=TURNS[:2]), "A fox jumps.")
    assert summaries.find(LEFT) == ("A fox jumps.", 2)
    summaries.add(LEFT, "A fox jumps, and a dog.")
    assert summaries.find(LEFT) == ("A fox jumps, and a dog.", 3)
    for other in (
        LEFT._replace(scope="bob"),
        LEFT._replace(version="small 2"),
        LEFT._replace(max_tokens=50),
        LEFT._replace(messages=[ChatMessage("user", "the cat"), *TURNS[1:]]),
    ):
        assert summaries.find(other) == ("", 0)


def test_summaries_are_forgotten() -> None:
    """After an hour, so that nothing of what was erased stays; and when there are too many."""
    clock = Clock()
    summaries = LeftSummaries("small", clock)
    summaries.add(LEFT, "A fox.")
    clock.now = KEPT_SECONDS
    assert summaries.find(LEFT) == ("", 0)
    for number in range(3):
        one = LEFT._replace(scope=str(number))
        summaries.add(one, "x" * (left_summaries.MAX_BYTES // 2))
        assert summaries.find(one)[1] == 3
    assert summaries.find(LEFT._replace(scope="0"))[1] == 0


def test_a_summary_stands_behind_the_instructions() -> None:
    """The prompt begins with them as before, so that the cache has them; most templates know one system message."""
    system = ChatMessage("system", "Be brief.")
    assert with_summary([system, TURNS[2]], "A fox.") == [
        ChatMessage("system", f"Be brief.\n\n{HEAD}A fox."),
        TURNS[2],
    ]
    assert with_summary([TURNS[2]], "A fox.") == [ChatMessage("system", f"{HEAD}A fox."), TURNS[2]]
