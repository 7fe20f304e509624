"""Tenants in an engine's prefill: none starves, a newcomer waits for one step, and what is kept is bounded."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom_common.class_rank import INTERACTIVE_RANK
from shard_server.engines.prefill_order import PrefillOrder
from tests.examples import num_examples

BUDGET = 64
MAX_PROMPT = 400


@dataclasses.dataclass(eq=False)
class Prompt:
    tenant: str
    num_expected_prefill_tokens: int
    submit_time: float
    class_rank: int = INTERACTIVE_RANK
    turn: int = 0
    num_computed: int = 0

    @property
    def num_left(self) -> int:
        return self.num_expected_prefill_tokens - self.num_computed


class PrefillOnlyEngine:
    """Computes prompts in steps, as the engines do: a sequence ends with its prefill."""

    def __init__(self) -> None:
        self.order = PrefillOrder(BUDGET)
        self.waiting: list[Prompt] = []
        self.begun: list[Prompt] = []
        self.num_begun_tokens: Counter[str] = Counter()
        self._now = 0.0

    def submit(self, tenant: str, num_tokens: int, class_rank: int = INTERACTIVE_RANK) -> Prompt:
        self._now += 0.001
        prompt = Prompt(tenant, num_tokens, self._now, class_rank)
        self.order.add(prompt)
        self.waiting.append(prompt)
        return prompt

    def step(self) -> None:
        self._left = BUDGET
        self.waiting = self.order.sort_waiting(self.waiting)
        for prompt in self.order.sort_begun(self.begun):
            self._admit(before=prompt)
            self._compute(prompt)
        self._admit()
        for prompt in [one for one in self.begun if not one.num_left]:
            self.begun.remove(prompt)
            self.order.remove(prompt)
        self.order.check_integrity((*self.waiting, *self.begun))

    def _admit(self, before: Prompt | None = None) -> None:
        while self.waiting and self._left:
            if before is not None and not self.order.goes_before(self.waiting[0], before):
                return
            prompt = self.waiting.pop(0)
            self.order.begin(prompt, prompt.num_left)
            self.num_begun_tokens[prompt.tenant] += prompt.num_left
            self.begun.append(prompt)
            self._compute(prompt)

    def _compute(self, prompt: Prompt) -> None:
        num_tokens = min(prompt.num_left, self._left)
        prompt.num_computed += num_tokens
        self._left -= num_tokens


arrivals = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, MAX_PROMPT)), max_size=6)


@settings(max_examples=num_examples(150), deadline=None)
@given(st.lists(arrivals, max_size=40))
def test_what_two_waiting_tenants_get_differs_by_a_bound(steps: list[list[tuple[str, int]]]) -> None:
    """However many prompts one of them sends, and however long: so that none starves, and all prompts are computed."""
    engine = PrefillOnlyEngine()
    since: dict[tuple[str, str], int] = {}
    for submitted in (*steps, *([] for _ in range(60 * MAX_PROMPT // BUDGET * 6))):
        for tenant, num_tokens in submitted:
            engine.submit(tenant, num_tokens)
        waited = {prompt.tenant for prompt in engine.waiting}
        before = engine.num_begun_tokens.copy()
        engine.step()
        wait = waited & {prompt.tenant for prompt in engine.waiting}
        for pair in itertools.combinations("abc", 2):
            if not wait.issuperset(pair):
                since.pop(pair, None)
                continue
            start = since.setdefault(pair, before[pair[0]] - before[pair[1]])
            difference = engine.num_begun_tokens[pair[0]] - engine.num_begun_tokens[pair[1]] - start
            assert abs(difference) <= BUDGET + 2 * MAX_PROMPT
        if not (engine.waiting or engine.begun):
            assert not engine.order.is_mixed
    assert not engine.waiting
    assert not engine.begun


@settings(max_examples=num_examples(150), deadline=None)
@given(st.lists(st.integers(1, MAX_PROMPT), min_size=1, max_size=30), st.integers(1, 20), st.integers(1, MAX_PROMPT))
def test_a_newcomer_waits_for_one_step_and_its_own_prefill(flood: list[int], num_steps: int, own: int) -> None:
    """Whatever another tenant has sent before, and sends meanwhile."""
    engine = PrefillOnlyEngine()
    for num_tokens in flood:
        engine.submit("flood", num_tokens)
    for _ in range(num_steps):
        engine.step()
    newcomer = engine.submit("calm", own)
    for _ in range(-(-own // BUDGET)):
        engine.submit("flood", MAX_PROMPT)
        engine.step()
    assert not newcomer.num_left


@settings(max_examples=num_examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(1, MAX_PROMPT), st.integers(0, 3)), min_size=1, max_size=30))
def test_one_tenant_of_one_class_is_served_in_the_order_of_arrival(prompts: list[tuple[int, int]]) -> None:
    """A fabric without tenants sees nothing of all this."""
    engine = PrefillOnlyEngine()
    order: list[Prompt] = []
    for num_tokens, num_steps in prompts:
        order.append(engine.submit("", num_tokens))
        assert not engine.order.is_mixed
        for _ in range(num_steps):
            engine.step()
            left = [prompt.num_left for prompt in order]
            assert all(not before for before, after in itertools.pairwise(left) if before and not after)
