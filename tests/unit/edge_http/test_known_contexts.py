"""Contexts that an edge remembers for when storage is away."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from edge_http import known_contexts
from edge_http.known_contexts import KEPT_SECONDS, KnownContexts
from kvloom.v1.orchestrator_service_pb2 import KeepResponseRequest, Owner, ReadContextRequest, ReadContextResponse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(name: str, previous: str = "", conversation: str = "", tenant: str = "ann") -> KeepResponseRequest:
    response = msgspec.json.encode({"id": name, "output": [{"text": f"out {name}"}]})
    return KeepResponseRequest(
        owner=Owner(tenant=tenant),
        response=response,
        input_items=[b'{"text":"in %b"}' % name.encode()],
        previous_response_id=previous,
        conversation_id=conversation,
    )


def asked(name: str, tenant: str = "ann", **more: Any) -> ReadContextRequest:
    return ReadContextRequest(owner=Owner(tenant=tenant), previous_response_id=name, **more)


def texts(found: ReadContextResponse | None) -> list[str] | None:
    return None if found is None else [msgspec.json.decode(item)["text"] for item in found.items]


def test_what_was_stored_is_known_with_what_came_before() -> None:
    """The next turn names the last one, which was never read. Of what it followed nothing may be missing."""
    contexts = KnownContexts()
    contexts.note_kept(kept("a"))
    contexts.note_kept(kept("b", previous="a"))
    contexts.note_kept(kept("d", previous="c"))
    assert texts(contexts.find(asked("b"))) == ["in a", "out a", "in b", "out b"]
    assert contexts.find(asked("d")) is None
    contexts.note_read(asked("d"), ReadContextResponse(items=[b'{"text":"x"}']))
    assert texts(contexts.find(asked("d"))) == ["x"]


def test_a_conversation_that_was_read_grows() -> None:
    """A response adds to it what the orchestrator adds."""
    contexts = KnownContexts()
    contexts.note_kept(kept("a", conversation="conv"))
    named = ReadContextRequest(owner=Owner(tenant="ann"), conversation_id="conv")
    assert contexts.find(named) is None
    contexts.note_read(named, ReadContextResponse(items=[b'{"text":"x"}']))
    contexts.note_kept(kept("b", conversation="conv"))
    assert texts(contexts.find(named)) == ["x", "in b", "out b"]
    assert texts(contexts.find(asked("b"))) == ["in b", "out b"]


@pytest.mark.parametrize("operation", ["deleteResponse", "deleteConversation", "removeConversation", "createErasure"])
def test_nothing_deleted_is_known(operation: str) -> None:
    """Also not what follows on it. Other tenants keep theirs."""
    contexts = KnownContexts()
    for tenant in ("ann", "bob"):
        contexts.note_kept(kept("a", tenant=tenant))
    contexts.note_change("ann", "getResponse")
    assert contexts.find(asked("a")) is not None
    contexts.note_change("ann", operation)
    assert contexts.find(asked("a")) is None
    assert contexts.find(asked("a", "bob")) is not None
    assert contexts.find(asked("a", "eve")) is None


def test_forks_prompts_and_references_are_not_guessed() -> None:
    """They need more than the items."""
    contexts = KnownContexts()
    contexts.note_kept(kept("a"))
    for more in (asked("a", prompt_id="p"), asked("a", at_item="i"), asked("a", item_ids=["i"])):
        assert contexts.find(more) is None


def test_old_contexts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have deleted them meanwhile; and the memory has a bound."""
    clock = Clock()
    monkeypatch.setattr(known_contexts, "MAX_BYTES", 100)
    contexts = KnownContexts(clock)
    contexts.note_kept(kept("a"))
    clock.now = KEPT_SECONDS
    assert contexts.find(asked("a")) is None
    for name in "bcdef":
        contexts.note_kept(kept(name))
    assert contexts.find(asked("b")) is None
    assert contexts.find(asked("f")) is not None
