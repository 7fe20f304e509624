"""Requests for embeddings, as the core decides them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason, Pooling
from router.core.actions import Action, FleetChanged, RequestEnded, SubmitAttempt
from router.core.dispatch.attempt_sender import PROBE_CLIENT_ID
from router.core.events import ShardDown
from router.core.frames import Finish, Start
from tests.fakes.core_rig import CoreRig, only, sent, submitted
from tests.unit.router.core.test_health import HealthRig

EMBED, GENERATE = frozenset({"embed"}), frozenset({"generate"})
VECTOR = b"\0\0\x80?" * 4


def rig_with(**capabilities: frozenset[str]) -> CoreRig:
    rig = CoreRig()
    for shard_id, own in capabilities.items():
        rig.add_shard(shard_id, capabilities=own, embedding_size=4 if "embed" in own else 0)
    return rig


def embed(rig: CoreRig, request_id: str = "r", slot: int = 1, **fields: Any) -> list[Action]:
    return rig.submit(request_id, slots=(slot,), pooling=Pooling(), **{"max_tokens": 0, **fields})


def finish(rig: CoreRig, shard_id: str, slot: int) -> list[Action]:
    ended = Finish(slot, FinishReason.FINISH_REASON_STOP, 5, embedding=VECTOR)
    return rig.step(shard_id, starts=[Start(slot, 0, 0.0)], finishes=[ended])


def refusal(actions: Sequence[Action]) -> tuple[int, str]:
    (ended,) = sent(actions).finishes
    assert ended.error is not None
    return ended.error.reason, ended.error.message


def test_the_vector_reaches_the_client_and_the_prompt_is_metered() -> None:
    """It ends once, with no output tokens."""
    rig = rig_with(s0=EMBED | GENERATE)
    shard_id, (slot,) = submitted(embed(rig))
    actions = finish(rig, shard_id, slot)
    (ended,) = sent(actions).finishes
    assert (ended.embedding, ended.num_prompt_tokens, ended.num_output_tokens) == (VECTOR, 5, 0)
    assert only(actions, RequestEnded).num_output_tokens == 0
    rig.core.check_integrity()


def test_a_lost_embedding_is_computed_elsewhere() -> None:
    """There are no tokens to continue behind: it begins again."""
    rig = rig_with(s0=EMBED, s1=EMBED, s2=GENERATE)
    shard_id, _ = submitted(embed(rig))
    attempt = only(rig.handle(ShardDown(shard_id)), SubmitAttempt)
    assert attempt.shard_id in {"s0", "s1"} - {shard_id}
    assert (attempt.max_tokens, attempt.attempt_id) == (0, 2)
    rig.core.check_integrity()


def test_shards_of_one_model_get_what_they_can_do() -> None:
    """While a model's shards are replaced, they may differ."""
    rig = rig_with(s0=EMBED, s1=GENERATE, s2=frozenset())
    for number in range(4):
        assert submitted(embed(rig, f"e{number}", 10 + number))[0] == "s0"
        assert submitted(rig.submit(f"g{number}", slots=(20 + number,)))[0] in {"s1", "s2"}


@pytest.mark.parametrize(
    ("capabilities", "wants_embedding", "message"),
    [(GENERATE, True, "gives no embeddings"), (EMBED, False, "generates no text")],
)
def test_a_model_that_cannot_is_named(capabilities: frozenset[str], wants_embedding: bool, message: str) -> None:
    """At once, and not after a wait for a shard that could."""
    rig = rig_with(s0=capabilities)
    reason, found = refusal(embed(rig) if wants_embedding else rig.submit())
    assert reason == ErrorReason.ERROR_REASON_UNSUPPORTED_PARAMETER
    assert message in found


def test_models_say_how_large_their_vectors_are() -> None:
    """Edges check `dimensions` by it."""
    rig = CoreRig()
    rig.add_shard("s0", capabilities=EMBED, embedding_size=4)
    (model,) = rig.core.fleet.models
    assert isinstance(rig.core.fleet, FleetChanged)
    assert (model.embedding_size, model.capabilities) == (4, EMBED)


def test_an_encoder_that_stalled_is_probed_with_an_embedding() -> None:
    """A probe for a token would be refused, and the shard would never come back."""
    rig = HealthRig()
    for shard_id in ("s0", "s1"):
        rig.handle(ShardDown(shard_id))
        rig.add_shard(shard_id, capabilities=EMBED, embedding_size=4)
    shard_id, (slot,) = submitted(embed(rig))
    moved = [a for a in rig.wait(1.3) if isinstance(a, SubmitAttempt) and a.request.client_id != PROBE_CLIENT_ID]
    assert [attempt.shard_id for attempt in moved] == [{"s0": "s1", "s1": "s0"}[shard_id]]
    finish(rig, moved[0].shard_id, moved[0].choices[0].slot)
    rig.finish(shard_id, slot, FinishReason.FINISH_REASON_CANCELLED)
    for _ in range(2):
        (probe,) = rig.probes(rig.wait(1.1))
        assert (probe.shard_id, probe.max_tokens) == (shard_id, 0)
        assert probe.request.pooling is not None
        finish(rig, shard_id, probe.choices[0].slot)
    assert submitted(embed(rig, "again", 2))
