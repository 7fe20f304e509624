"""The admin page in a real browser: what an operator, and an administrator of one organisation, see and do.

Screenshots go to test-artifacts/.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, expect

from kvloom.errors import KvloomError
from kvloom.v1 import generation_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.overview_pb2 import (
    ExplainRequestResponse,
    FleetSample,
    GetOverviewResponse,
    RequestOverview,
    ShardOverview,
)
from kvloom.v1.router_service_pb2 import (
    ExplainResponse,
    JudgedTerm,
    PlacementDecision,
    PlacementRegret,
    PlanResponse,
    RequestOutcome,
    ShardScore,
)
from kvloom_common.trust.fabric_trust import NO_SECRET
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.no_adapters import NoAdapters
from tests.integration.test_edge_admin import admin_world
from tests.waiting import eventually
from tools.supervisor.rollout.state import RolloutState
from tools.supervisor.service.server import SupervisorServicer, serving
from tools.supervisor.state import FabricState

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser"), pytest.mark.asyncio(loop_scope="session")]

ARTIFACTS = Path(__file__).resolve().parents[2] / "test-artifacts"
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
OUTCOME = RequestOutcome(
    reason=generation_pb2.FINISH_REASON_LENGTH,
    shard_id="shard-1",
    num_attempts=1,
    num_prompt_tokens=4000,
    num_cached_tokens=64,
    num_output_tokens=120,
    queue_time_seconds=0.05,
    ttft_seconds=2.4,
    e2e_latency_seconds=4.8,
    end="finished",
    withheld_seconds=0.1,
    predictions=[JudgedTerm(term="prefill", predicted_seconds=1.5, actual_seconds=2.0)],
)


def overview() -> GetOverviewResponse:
    """Two shards, one of which is full, and an hour that had a rush in it."""
    now = time.time()
    shards = [
        ShardOverview(
            shard_id=f"shard-{number}",
            model="tiny",
            health="healthy" if number < 2 else "suspected",
            num_running=number + 3,
            num_waiting=7 * (number == 1),
            num_blocks=1000,
            num_available_blocks=(900, 40, 500)[number],
            max_batch=16,
            decode_step_seconds=0.012,
            adapters=["law"] if number else [],
            num_prompt_tokens=10_000,
            num_cached_tokens=6_200,
            num_output_tokens=5_000,
            output_tokens_per_second=240.0,
        )
        for number in range(3)
    ]
    samples = [
        FleetSample(
            at_seconds=now - 5 * (720 - n),
            num_running=n % 40,
            num_waiting=max(0, n % 120 - 60),
            kv_usage=0.3 + 0.3 * (n % 100) / 100,
            output_tokens_per_second=300 + 4 * (n % 90),
            prompt_tokens_per_second=900 + 9 * (n % 50),
            hit_rate=0.6,
            num_ended=4,
            ttft_counts=[0] * 4 + [2, 1, 1] + [0] * 10,
        )
        for n in range(720)
    ]
    running = RequestOverview(
        request_id="chatcmpl-running", tenant="acme/search", model="tiny", priority_class="interactive",
        arrived_at_seconds=now - 3, state="decoding", outcome=RequestOutcome(shard_id="shard-0", ttft_seconds=0.2),
    )  # fmt: skip
    halted = RequestOutcome(end="halted", error_reason=ErrorReason.ERROR_REASON_CONTENT_FILTERED, shard_id="shard-0")
    ended = [
        RequestOverview(
            request_id=name, tenant="acme/search", model="tiny", arrived_at_seconds=now - 9, state="ended",
            outcome=outcome,
        )
        for name, outcome in (("chatcmpl-slow", OUTCOME), ("chatcmpl-halted", halted))
    ]  # fmt: skip
    return GetOverviewResponse(
        router_id="router-0", at_seconds=now, num_live_requests=12, num_queued_requests=2, shards=shards,
        running=[running], ended=ended, samples=samples,
    )  # fmt: skip


def explanation() -> ExplainRequestResponse:
    scores = [
        ShardScore(
            shard_id=name, num_overlap_tokens=overlap, num_running=3, predicted_ttft_seconds=ttft, cost_seconds=cost,
            cost_terms={"ttft": ttft, "memory": cost - ttft},
        )
        for name, overlap, ttft, cost in (("shard-1", 64, 1.6, 1.7), ("shard-0", 0, 1.4, 1.9))
    ]  # fmt: skip
    plan = PlanResponse(
        num_prompt_tokens=4000, shards=[*scores, ShardScore(shard_id="shard-2", filtered_reason="suspected")],
        picked_shard_id="shard-1", regret=PlacementRegret(ttft_seconds=0.2),
    )  # fmt: skip
    decision = PlacementDecision(attempt_id=1, decided_at_seconds=time.time(), plan=plan)
    return ExplainRequestResponse(
        explanation=ExplainResponse(
            request_id="chatcmpl-slow", decisions=[decision], outcome=OUTCOME, priority_class="interactive"
        )
    )


class Machine:
    """A supervisor whose drains and rollbacks are noted."""

    def __init__(self) -> None:
        self.drained: list[tuple[str, bool]] = []
        self.rolled_back: list[str] = []

    async def drain(self, shard: str, draining: bool, _deadline: float | None) -> tuple[int, int]:
        self.drained.append((shard, draining))
        return 3, 0

    def roll_back(self, name: str) -> None:
        self.rolled_back.append(name)

    async def state(self) -> FabricState:
        return FabricState(
            supervisor_pid=1, supervisor_started=1.0, phase="ready", http_url="", router_address="", model="tiny",
            processes=[], rollouts=[RolloutState("tiny", "tiny@2", "serving", 10.0, 2, 4)],
        )  # fmt: skip


@contextlib.asynccontextmanager
async def supervised(edge: EdgeWorld, folder: Path) -> AsyncIterator[Machine]:
    machine: Any = Machine()
    run_dir = folder / "run"
    run_dir.mkdir()
    servicer = SupervisorServicer(
        machine.state, machine.state, machine.state, machine.state, dict, reload=machine.state,
        preview_reload=machine.state,
        sleep_model=machine.state, wake_model=machine.state, rollouts=machine, adapters=NoAdapters(),
        drain_shard=machine.drain,
    )  # fmt: skip
    edge.edge.run_folder = run_dir
    edge.link.overview = {"GetOverview": overview(), "ExplainRequest": explanation()}
    async with serving(servicer, run_dir, NO_SECRET):
        yield machine


async def open_page(browser: Browser, url: str, *, phone: bool = False, dark: bool = False) -> Page:
    """A page that fails the test when it logs an error, e.g. a violation of its own security policy."""
    page = await browser.new_page(
        viewport=PHONE if phone else DESKTOP,
        color_scheme="dark" if dark else "light",
    )
    page.set_default_timeout(5000)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if "Security Policy" in message.text else None)
    page.complaints = complaints
    await page.goto(f"{url}/admin")
    return page


async def done(page: Page, name: str) -> None:
    ARTIFACTS.mkdir(exist_ok=True)
    await page.screenshot(path=ARTIFACTS / f"admin-{name}.png", full_page=True)
    results = await Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    assert page.complaints == []


@pytest.mark.parametrize(("phone", "dark"), [(False, False), pytest.param(True, True, marks=pytest.mark.long)])
async def test_the_fleet_is_shown_and_a_shard_drained(
    browser: Browser, tmp_path: Path, phone: bool, dark: bool
) -> None:
    """On this machine, without tenants, no key is needed; a drain asks before it begins."""
    async with edge_world() as world, supervised(world, tmp_path) as machine:
        page = await open_page(browser, world.url, phone=phone, dark=dark)
        await expect(page.locator("#figures")).to_contain_text("2 of 3")
        await expect(page.locator(".chart")).to_have_count(4)
        await expect(page.get_by_role("img", name="Tokens per second")).to_be_visible()
        await expect(page.get_by_role("link", name="Keys")).to_be_hidden()
        await done(page, f"fleet{'-phone' if phone else ''}{'-dark' if dark else ''}")
        await page.get_by_role("button", name="Drain shard-1").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog")).to_contain_text("Drain shard-1?")
        await page.get_by_role("dialog").get_by_role("button", name="Drain").click()
        await expect(page.get_by_role("dialog")).to_be_hidden()
        await eventually(lambda: machine.drained == [("shard-1", True)], "the drain")
        await page.close()


@pytest.mark.long
async def test_a_slow_request_is_explained(browser: Browser, tmp_path: Path) -> None:
    """Which part of the time was the largest, and how the request was placed."""
    async with edge_world() as world, supervised(world, tmp_path):
        page = await open_page(browser, world.url)
        await page.get_by_role("link", name="Requests").click()
        await page.get_by_label("Show").select_option("slow")
        await expect(page.locator("#request-list tbody tr")).to_have_count(1)
        await done(page, "requests")
        await page.get_by_role("button", name="chatcmpl-slow").click()
        await expect(page.locator("#why")).to_contain_text("64 of its 4000 prompt tokens were cached")
        await expect(page.get_by_role("dialog")).to_contain_text("picked")
        await done(page, "why-slow")
        await page.keyboard.press("Escape")
        await page.get_by_label("Show").select_option("safety")
        await expect(page.locator("#request-list")).to_contain_text("content_filtered")
        world.link.overview["ExplainRequest"] = KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, "It is not known.")
        await page.get_by_label("Why was this request slow?").fill("gone")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_have_text("It is not known.")
        await page.close()


@pytest.mark.long
async def test_a_rollout_is_taken_back(browser: Browser, tmp_path: Path) -> None:
    """From the page, whoever sees that a version is bad ends it."""
    async with edge_world() as world, supervised(world, tmp_path) as machine:
        page = await open_page(browser, world.url)
        await page.get_by_role("link", name="Rollouts").click()
        await page.get_by_role("button", name="Roll tiny@2 back").click()
        await done(page, "rollback")
        await page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
        await expect(page.get_by_role("dialog")).to_be_hidden()
        await eventually(lambda: machine.rolled_back == ["tiny@2"], "the rollback")
        await page.close()


@pytest.mark.long
async def test_an_administrator_signs_in_and_makes_a_key(browser: Browser, tmp_path: Path) -> None:
    """The key's secret is shown once; the fleet, which is the operator's, is not shown."""
    async with admin_world(tmp_path) as (world, _, secrets), supervised(world, tmp_path):
        page = await open_page(browser, world.url)
        await page.get_by_label("API key").fill("wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#login-why")).to_contain_text("does not accept")
        await page.get_by_label("API key").fill(secrets["admin"])
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("link", name="Requests")).to_be_visible()
        await expect(page.get_by_role("link", name="Fleet")).to_be_hidden()
        await page.get_by_role("link", name="Keys").click()
        await page.get_by_label("Project").fill("acme/search")
        await page.get_by_label("Name").fill("new one")
        await page.get_by_role("button", name="Create a key").click()
        await expect(page.locator("#secret")).to_contain_text("kvl-")
        await done(page, "new-key")
        await page.get_by_role("button", name="Close").click()
        await expect(page.locator("#secret")).to_have_count(0)
        await expect(page.locator("#key-list")).to_contain_text("new one")
        await page.get_by_role("button", name="Revoke new one").click()
        await page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
        await expect(page.locator("#key-list")).not_to_contain_text("new one")
        await page.get_by_role("link", name="Usage").click()
        await expect(page.locator("#usage-table")).to_contain_text("Nothing was used")
        await done(page, "usage")
        await page.close()
