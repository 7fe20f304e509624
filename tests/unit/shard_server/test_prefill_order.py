"""Whose prefill is next in an engine, between tenants and classes."""

from __future__ import annotations

from shard_server.engines.prefill_order import MAX_REMEMBERED_TENANTS
from tests.property.test_prefill_order import BUDGET, PrefillOnlyEngine


def test_a_newcomers_prompt_is_not_interleaved_with_what_it_has_passed() -> None:
    """Shared step by step, a long prompt would take twice as long beside any flood."""
    engine = PrefillOnlyEngine()
    engine.submit("flood", 10 * BUDGET)
    engine.step()
    newcomer = engine.submit("calm", 5 * BUDGET)
    for _ in range(5):
        engine.step()
    assert not newcomer.num_left


def test_one_that_sends_prompts_one_by_one_is_no_newcomer_each_time() -> None:
    """It would otherwise keep another tenant's prompt waiting for ever."""
    engine = PrefillOnlyEngine()
    patient = engine.submit("patient", 10 * BUDGET)
    engine.step()
    busy = engine.submit("busy", 3 * BUDGET)
    for _ in range(40):
        if not busy.num_left:
            busy = engine.submit("busy", 3 * BUDGET)
        engine.step()
    assert not patient.num_left


def test_an_urgent_class_goes_before_every_tenant_of_another() -> None:
    """Tenants share what their class gets, and no more."""
    engine = PrefillOnlyEngine()
    engine.submit("flood", 10 * BUDGET)
    engine.step()
    batch = engine.submit("newcomer", BUDGET, class_rank=2)
    urgent = engine.submit("flood", BUDGET, class_rank=0)
    engine.step()
    assert not urgent.num_left
    assert batch.num_left


def test_a_tenant_with_less_prefill_goes_first_within_a_less_urgent_class_too() -> None:
    """The places that a class has stay as they are."""
    engine = PrefillOnlyEngine()
    engine.submit("flood", 3 * BUDGET, class_rank=2)
    engine.step()
    newcomer = engine.submit("calm", BUDGET, class_rank=2)
    engine.submit("urgent", BUDGET)
    engine.step()
    assert newcomer.num_left
    engine.step()
    assert not newcomer.num_left


def test_tenants_that_have_gone_are_forgotten() -> None:
    """Names come and go without end."""
    engine = PrefillOnlyEngine()
    stays = engine.submit("stays", 10**6)
    for number in range(3 * MAX_REMEMBERED_TENANTS):
        engine.submit(f"tenant {number}", 5)
        engine.step()  # checks the bound
    assert stays.num_left
