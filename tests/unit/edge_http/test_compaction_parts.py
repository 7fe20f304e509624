"""What stands for a compacted conversation."""

from __future__ import annotations

from typing import Any

import msgspec

from edge_http.openai.responses.compaction import CompactionSeal, compacted, last_turn, unfolded
from kvloom_common.trust.state_seal import StateSealer

SEAL = CompactionSeal(StateSealer(b"k" * 32), "acme/search")


def raws(*items: dict[str, Any]) -> list[msgspec.Raw]:
    return [msgspec.Raw(msgspec.json.encode(item)) for item in items]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def texts(items: Any) -> list[Any]:
    return [msgspec.json.decode(item)["content"] for item in items]


def test_the_latest_words_of_the_user_are_kept_within_their_limit() -> None:
    """A conversation of long questions must become shorter, too."""
    items = raws(user("a" * 9), {"role": "assistant", "content": "x"}, user("b" * 5), user("c" * 5))
    assert compacted(items, (), "s").said == "aaaaaaaaa\n\nbbbbb\n\nccccc"
    assert compacted(items, (), "s", 10).said == "bbbbb\n\nccccc"
    assert compacted(items, (), "s", 9).said == "ccccc"
    assert compacted(items, (), "s", 0).said == ""


def test_the_system_and_the_turn_stay_as_they_are() -> None:
    """What a developer has said holds for the whole conversation; the turn has the calls that are to be continued."""
    system, call = {"role": "developer", "content": "be brief"}, {"type": "function_call", "name": "f"}
    items = raws(user("a"), system, user("b"), call)
    first = last_turn(items)
    assert first == 2
    part = compacted(items[:first], items[first:], "s")
    assert texts(part.items()[:2]) == ["be brief", "a"]
    assert part.items()[-2:] == items[first:]
    assert last_turn(raws({"role": "assistant", "content": "x"})) == 0


def test_the_last_compaction_that_can_be_read_stands_for_all_before() -> None:
    """A second one contains the first."""
    once = SEAL.item("cmp_1", compacted(raws(user("a")), (), "first"))
    earlier, _, _ = unfolded(raws(user("a"), once, user("b")), [], SEAL.part)
    assert texts(earlier)[::2] == ["a", "b"]
    twice = SEAL.item("cmp_2", compacted(earlier, (), "second"))
    foreign = CompactionSeal(SEAL.sealer, "other").item("cmp_3", compacted(raws(user("z")), (), "third"))
    given = raws(once, twice, foreign, user("c"))
    earlier, rest, num_replaced = unfolded(raws(user("before")), given, SEAL.part)
    assert (num_replaced, rest) == (2, given[2:])
    assert texts(earlier)[0] == "a\n\nb"
    assert "second" in texts(earlier)[1]
    nothing = raws(foreign, user("c"))
    assert unfolded((), nothing, SEAL.part) == ((), nothing, 0)
