"""An answer that fails over keeps its bits only on a shard of the same variant, so such a shard comes first."""

from __future__ import annotations

from typing import Any

import pytest

from kvloom.v1.generation_pb2 import CONTINUATION_EXACT, CONTINUATION_RESAMPLED, SamplingParams
from router.convert import finish_to_proto
from router.core.actions import AnswerResampled, SubmitAttempt
from router.core.events import ShardDown
from tests.fakes.core_rig import CoreRig, has, only, sent, submitted


def rig_of(**variants: str) -> CoreRig:
    rig = CoreRig()
    for shard_id, variant in variants.items():
        rig.add_shard(shard_id, variant=variant)
    return rig


def start_on_s0(rig: CoreRig) -> int:
    """The slot of a request that has got a token from s0, the only shard so far."""
    shard_id, slots = submitted(rig.submit())
    assert shard_id == "s0"
    rig.start("s0", slots[0])
    return slots[0]


@pytest.mark.parametrize("number", range(4))
def test_an_answer_continues_where_its_bits_are_the_same(number: int):
    """Whatever the order of the shards: of three that could take it, two would continue with other bits."""
    rig = rig_of(s0="a")
    slot = start_on_s0(rig)
    others = ["b", "b", "b"]
    others.insert(number, "a")
    for index, variant in enumerate(others, 1):
        rig.add_shard(f"s{index}", variant=variant)
    actions = rig.fail("s0", slot)
    assert only(actions, SubmitAttempt).shard_id == f"s{number + 1}"
    assert not has(actions, AnswerResampled)


def test_if_no_shard_has_the_same_bits_another_continues_and_it_is_reported():
    """A late answer of other tokens is better than none, but it must not pass for an exact one."""
    rig = rig_of(s0="a")
    start_on_s0(rig)
    rig.add_shard("s1", variant="b")
    actions = rig.handle(ShardDown("s0"))
    assert only(actions, SubmitAttempt).shard_id == "s1"
    assert only(actions, AnswerResampled) == AnswerResampled("r", "s0", "a", "s1", "b")


def test_without_delivered_tokens_any_shard_is_as_good():
    """The answer begins again from its prompt, so nothing is mixed."""
    rig = rig_of(s0="a")
    _, slots = submitted(rig.submit())
    rig.add_shard("s1", variant="b")
    actions = rig.fail("s0", slots[0])
    assert only(actions, SubmitAttempt).shard_id == "s1"
    assert not has(actions, AnswerResampled)


def continuation(rig: CoreRig, capabilities: set[str], **request: Any) -> tuple[bool, int]:
    """Whether an answer that continues on a shard like its first is reported, and what its client hears."""
    for shard_id in ("s0", "s1"):
        rig.add_shard(shard_id, capabilities=frozenset(capabilities))
    first, [slot] = submitted(rig.submit(**request))
    rig.start(first, slot)
    actions = rig.fail(first, slot)
    second, [slot] = submitted(actions)
    (finish,) = sent(rig.finish(second, slot)).finishes
    return has(actions, AnswerResampled), finish_to_proto(finish).moves.continuation


GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.5, seed=7)


@pytest.mark.parametrize(
    ("capabilities", "sampling", "is_exact"),
    [
        ({"seeded_resume"}, SAMPLED, True),
        (set(), SAMPLED, False),
        (set(), GREEDY, False),
        ({"batch_invariant"}, SAMPLED, False),
        ({"batch_invariant"}, SamplingParams(), False),
        ({"batch_invariant"}, GREEDY, True),
    ],
)
def test_a_client_learns_whether_its_answer_continued_exactly(
    capabilities: set[str], sampling: SamplingParams, is_exact: bool
):
    """TensorRT-LLM's sampler draws from one generator, and its kernels depend on the batch: it repeats nothing, and an
    answer that was resampled must not pass for an exact one."""
    is_reported, told = continuation(CoreRig(), capabilities, sampling=sampling)
    assert (is_reported, told) == (not is_exact, CONTINUATION_EXACT if is_exact else CONTINUATION_RESAMPLED)


def test_what_begins_anew_is_exact_whatever_the_engine():
    """Nothing had been computed, so nothing is mixed."""
    rig = CoreRig()
    for shard_id in ("s0", "s1"):
        rig.add_shard(shard_id, capabilities=frozenset())
    first, [slot] = submitted(rig.submit(sampling=SAMPLED))
    second, [slot] = submitted(rig.fail(first, slot))
    (finish,) = sent(rig.finish(second, slot)).finishes
    assert finish_to_proto(finish).moves.continuation == CONTINUATION_EXACT


def test_clients_learn_which_variants_a_model_has():
    """`kvloom status` and SDK clients can tell that failover is not exact."""
    rig = rig_of(s0="a", s1="b", s2="a")
    assert [model.variants for model in rig.core.fleet.models] == [frozenset({"a", "b"})]
