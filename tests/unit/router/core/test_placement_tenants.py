"""Tenants in placement: what waits and runs for one of them must not decide where the requests of another go."""

from __future__ import annotations

import pytest

from router.core.events import ChoiceSpec, Request
from router.core.placement.plan import ShardPlan
from tests.fakes.core_rig import CoreRig
from tests.unit.router.core.test_placement_policies import CANDIDATE, cost, other

LONG = 4000


class TwoShards(CoreRig):
    """s1 is there from the beginning, s0 from `add_second`. Prompts share no prefix."""

    def __init__(self) -> None:
        super().__init__(policy="ect", prefill_chunks=None)
        self._shard = {"num_blocks": 100_000, "max_batch": 128, "max_model_len": 20_000}
        self._num_requests = 0
        self.add_shard("s1", **self._shard)

    def add_second(self) -> None:
        self.add_shard("s0", **self._shard)

    def _request(self, tenant: str, num_tokens: int) -> Request:
        self._num_requests += 1
        prompt = [self._num_requests * 10_000 + token for token in range(num_tokens)]
        choices = [ChoiceSpec(self._num_requests, 0)]
        return Request(f"r{self._num_requests}", "c", "m", prompt, "", choices, tenant=tenant)

    def ask(self, tenant: str, num_tokens: int = LONG) -> None:
        request = self._request(tenant, num_tokens)
        fields = {name: getattr(request, name) for name in ("prompt_token_ids", "tenant")}
        self.submit(request.request_id, slots=(self._num_requests,), **fields)

    def plan(self, tenant: str) -> dict[str, ShardPlan]:
        """By shard; the first one is picked."""
        shards = self.core.plan(self._request(tenant, LONG), self.now).shards
        return {shard.shard_id: shard for shard in shards}

    def run_many(self, tenant: str, num_requests: int) -> None:
        """Answers on s1, all of which have begun."""
        for slot in range(1, num_requests + 1):
            self.ask(tenant, 8)
            self.start("s1", slot)


@pytest.mark.parametrize(("tenant", "expected"), [("flood", "s0"), ("calm", "s1")])
def test_a_tenants_requests_do_not_queue_where_it_has_one_because_another_runs_many_elsewhere(
    tenant: str, expected: str
) -> None:
    """A tenant's many answers, which are delayed by its own load, would keep another one off whole shards."""
    rig = TwoShards()
    rig.run_many("flood", 60)
    rig.add_second()
    rig.ask(tenant)  # it goes to s0, which is idle, and is not started
    assert next(iter(rig.plan(tenant))) == expected


def test_what_waits_of_another_tenant_is_no_wait_but_for_its_turns() -> None:
    """Tenants take turns: of a thousand requests of a flood, as much goes before a newcomer as it has itself."""
    rig = TwoShards()
    for _ in range(20):
        rig.ask("flood")
    flood, calm = rig.plan("flood")["s1"], rig.plan("calm")["s1"]
    own_seconds = calm.cost_terms["own_prefill"]
    assert flood.predicted_ttft_seconds > 19 * own_seconds
    assert calm.predicted_ttft_seconds < 4 * own_seconds
    assert calm.cost_terms["delay_of_others"] < flood.cost_terms["delay_of_others"] + own_seconds


@pytest.mark.parametrize("policy", ["ect", "least_requests"])
def test_sequences_of_another_tenant_beyond_equal_parts_make_a_shard_no_dearer(policy: str) -> None:
    """Its own load has made them many."""
    few, many = cost(policy, CANDIDATE, other(num_running=104, num_beyond_parts=100))
    assert many == pytest.approx(few)
