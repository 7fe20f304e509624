"""The chat page in a real browser: what a person sees when tokens stream, stop, fail or come from a cache.

Screenshots go to test-artifacts/.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.access.api_keys import ApiKey, ApiKeys, digest_of
from kvloom_common.callers import Callers
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import LENGTH, FakeRequest

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser"), pytest.mark.asyncio(loop_scope="session")]

ARTIFACTS = Path(__file__).resolve().parents[2] / "test-artifacts"
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
CODE_ANSWER = [
    "Here is a function:\n\n",
    "```python\n",
    "def add(a, b):\n",
    "    return a + b  # <b>not bold</b>\n",
    "```\n",
    "\nIt adds two numbers and returns the sum. ",
    "Call it with `add(2, 3)`.",
]


@pytest_asyncio.fixture(loop_scope="session")
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as started:
        yield started


async def open_page(browser: Browser, world: EdgeWorld, *, phone: bool = False, dark: bool = False) -> Page:
    """A page that fails the test when it logs an error, e.g. a violation of its own security policy."""
    page = await browser.new_page(
        viewport=PHONE if phone else DESKTOP,  # pyright: ignore[reportArgumentType]
        has_touch=phone,
        color_scheme="dark" if dark else "light",
    )
    page.set_default_timeout(5000)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if "Security Policy" in message.text else None)
    page.on("close", lambda _: None)
    page.complaints = complaints  # pyright: ignore[reportAttributeAccessIssue]
    await page.goto(world.url)
    await expect(page.get_by_label("Model")).to_have_value("tiny")
    return page


async def close_page(page: Page) -> None:
    assert page.complaints == []  # pyright: ignore[reportAttributeAccessIssue]
    await page.close()


async def ask(page: Page, world: EdgeWorld, text: str) -> FakeRequest:
    await page.get_by_label("Your message").fill(text)
    await page.keyboard.press("Enter")
    return await world.link.next_request()


def last_answer(page: Page) -> Locator:
    return page.locator(".turn.assistant").last


async def play(request: FakeRequest, deltas: list[str]) -> None:
    request.start(shard_id="shard-1", num_cached_tokens=16)
    for delta in deltas:
        request.tokens(delta)
        await asyncio.sleep(0.02)  # so that there is a rate to show


async def screenshot(page: Page, name: str) -> None:
    ARTIFACTS.mkdir(exist_ok=True)
    await page.screenshot(path=ARTIFACTS / f"chat-{name}.png")


async def test_tokens_stream_and_facts_follow(browser: Browser, world: EdgeWorld) -> None:
    """Text appears while it is generated; then time to first token, rate, shard and cached tokens."""
    page = await open_page(browser, world)
    await screenshot(page, "welcome")
    request = await ask(page, world, "What is the capital of France?")
    request.start(shard_id="shard-1", num_cached_tokens=16)
    request.tokens("The capital of France")
    await expect(last_answer(page).locator(".text")).to_have_text("The capital of France")
    await expect(page.get_by_role("button", name="Stop")).to_be_visible()
    await asyncio.sleep(0.05)
    request.tokens(" is Paris.")
    request.finish()
    facts = last_answer(page).locator(".facts")
    await expect(facts).to_contain_text("TTFT")
    await expect(facts).to_contain_text("tokens/s")
    await expect(facts).to_contain_text("2 tokens")
    await expect(facts).to_contain_text("on shard-1")
    num_prompt_tokens = len(request.request.prompt_token_ids)
    await expect(facts).to_contain_text(f"16 of {num_prompt_tokens} prompt tokens cached")
    await expect(page.get_by_role("button", name="Send")).to_be_visible()

    second = await ask(page, world, "Write a function that adds two numbers.")
    assert second.request.prompt_text.split("\n") == [
        "What is the capital of France?",
        "The capital of France is Paris.",
        "Write a function that adds two numbers.",
    ]
    await play(second, CODE_ANSWER)
    second.finish(LENGTH)
    await expect(last_answer(page).locator("pre")).to_have_text(
        "def add(a, b):\n    return a + b  # <b>not bold</b>", use_inner_text=True
    )
    await expect(last_answer(page).locator(".facts")).to_contain_text("cut off at the token limit")
    await screenshot(page, "desktop")
    await page.emulate_media(color_scheme="dark")
    await screenshot(page, "desktop-dark")
    await close_page(page)


async def test_stop_button_cancels(browser: Browser, world: EdgeWorld) -> None:
    """Stop ends the request in the fabric and keeps the text so far; the conversation continues after it."""
    page = await open_page(browser, world)
    request = await ask(page, world, "Count")
    request.start()
    request.tokens("one two")
    await expect(last_answer(page).locator(".text")).to_have_text("one two")
    await page.get_by_role("button", name="Stop").click()
    async with asyncio.timeout(5):
        await request.cancelled.wait()
    await expect(last_answer(page).locator(".facts")).to_contain_text("stopped")
    following = await ask(page, world, "Go on")
    assert following.request.prompt_text == "Count\none two\nGo on"
    await page.keyboard.press("Escape")
    async with asyncio.timeout(5):
        await following.cancelled.wait()
    await close_page(page)


async def test_lost_connection_is_not_noticed(browser: Browser, world: EdgeWorld) -> None:
    """The answer continues where it was when its connection breaks, without a gap, a repetition or an error."""
    page = await open_page(browser, world)
    request = await ask(page, world, "Count")
    request.start()
    request.tokens("one ")
    await expect(last_answer(page).locator(".text")).to_have_text("one")
    (stream,) = world.edge.resume.streams.values()
    for delta in ("two ", "three "):
        runner = world.server._runner.server
        assert runner is not None
        for connection in runner.connections:
            assert connection.transport is not None
            connection.transport.abort()
        request.tokens(delta)
        await expect(last_answer(page).locator(".text")).to_contain_text(delta.strip())
    request.tokens("four")
    request.finish()
    await expect(last_answer(page).locator(".text")).to_have_text("one two three four")
    await expect(last_answer(page).locator(".facts")).to_contain_text("4 tokens")
    await expect(page.get_by_role("alert")).to_have_count(0)
    assert stream.ended
    await close_page(page)


async def test_closing_the_page_cancels(browser: Browser, world: EdgeWorld) -> None:
    """A user who leaves for good does not leave the engine working until the grace period is over."""
    page = await open_page(browser, world)
    request = await ask(page, world, "Count")
    request.start()
    request.tokens("one")
    await expect(last_answer(page).locator(".text")).to_have_text("one")
    await page.reload()
    async with asyncio.timeout(5):
        await request.cancelled.wait()
    await close_page(page)


async def test_errors_are_shown_and_can_be_retried(browser: Browser, world: EdgeWorld) -> None:
    """An error says what is wrong, before the first token or in the middle, and offers to try again."""
    page = await open_page(browser, world)
    request = await ask(page, world, "Hello")
    request.fail(ErrorReason.ERROR_REASON_QUEUE_FULL, "The queue is full.")
    await expect(page.get_by_role("alert")).to_contain_text("The queue is full.")
    await expect(page.get_by_role("alert")).to_contain_text("queue_full")
    await screenshot(page, "error")
    await page.get_by_role("button", name="Try again").click()
    again = await world.link.next_request()
    again.start()
    again.tokens("Hel")
    again.fail(ErrorReason.ERROR_REASON_SHARD_LOST, "The shard is gone.")
    await expect(page.get_by_role("alert")).to_contain_text("The shard is gone.")
    await expect(last_answer(page).locator(".text")).to_have_text("Hel")
    third = await ask(page, world, "Other question")
    assert third.request.prompt_text == "Other question"  # the failed exchange is not part of the conversation
    third.tokens("ok")
    third.finish()
    await expect(last_answer(page).locator(".text")).to_have_text("ok")
    await close_page(page)


async def test_model_output_is_text_never_markup(browser: Browser, world: EdgeWorld) -> None:
    """A model may write anything, also what would run as a script."""
    page = await open_page(browser, world)
    request = await ask(page, world, "<img src=x onerror=alert(1)>")
    hostile = "<script>alert(1)</script><b>bold</b>\n```\n<i>code</i>\n```"
    request.tokens(hostile)
    request.finish()
    await expect(last_answer(page).locator(".text")).to_contain_text("<script>alert(1)</script><b>bold</b>")
    assert await page.locator("#conversation :is(script, b, i, img)").count() == 0
    await close_page(page)


async def test_conversation_survives_a_reload_and_new_chat_clears_it(browser: Browser, world: EdgeWorld) -> None:
    """Closing the lid is no reason to lose a conversation; New chat is."""
    page = await open_page(browser, world)
    request = await ask(page, world, "Hello")
    request.tokens("Hi!")
    request.finish()
    await expect(last_answer(page).locator(".facts")).to_be_visible()
    await page.reload()
    await expect(last_answer(page).locator(".text")).to_have_text("Hi!")
    running = await ask(page, world, "More")
    await page.get_by_role("button", name="New chat").click()
    async with asyncio.timeout(5):
        await running.cancelled.wait()
    await expect(page.locator(".turn")).to_have_count(0)
    await expect(page.get_by_role("heading", name="Ask the model something")).to_be_visible()
    fresh = await ask(page, world, "Fresh")
    assert fresh.request.prompt_text == "Fresh"
    await close_page(page)


async def test_page_waits_for_a_shard(browser: Browser, world: EdgeWorld) -> None:
    """A page that is opened too early says so, and becomes usable by itself."""
    world.link.fleet = FleetState()
    page = await open_page(browser, world)
    await expect(page.get_by_role("status").first).to_contain_text("No model is ready yet")
    world.link.fleet = FleetState(models=[ModelInfo(name="tiny", num_ready_shards=1)])
    await expect(page.locator("#notice")).to_be_hidden()
    await close_page(page)


async def test_phone(browser: Browser, world: EdgeWorld) -> None:
    """On a phone nothing is cut off sideways, targets are large enough for thumbs, and long answers scroll along."""
    page = await open_page(browser, world, phone=True)
    await screenshot(page, "phone-welcome")
    request = await ask(page, world, "Write a function that adds two numbers, please, and explain how it works.")
    await play(request, [*CODE_ANSWER, *["\n\nA long answer needs room to scroll, on a phone even more."] * 12])
    request.finish()
    await expect(last_answer(page).locator(".facts")).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert await page.evaluate("scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight") < 80
    for button in await page.locator("button:visible, select:visible").all():
        box = await button.bounding_box()
        assert box is not None
        assert box["height"] >= 44
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE["width"]
    await screenshot(page, "phone")
    await page.emulate_media(color_scheme="dark")
    await screenshot(page, "phone-dark")
    await close_page(page)


async def test_page_asks_for_the_api_key(browser: Browser) -> None:
    """People who open the page of a protected server need no other tool; the key is gone with the tab."""
    callers = Callers(api_keys=ApiKeys([ApiKey("alice", digest_of("kvl-right"))]))
    async with edge_world(callers=callers) as world:
        page = await browser.new_page(viewport=PHONE)  # pyright: ignore[reportArgumentType]
        await page.goto(world.url)
        field = page.get_by_label("API key")
        await expect(page.locator("#notice")).to_have_text("This server asks for an API key.")
        await screenshot(page, "key")
        await field.fill("kvl-wrong")
        await field.press("Enter")
        await expect(page.locator("#notice")).to_have_text("The server does not accept this API key.")
        await field.fill("kvl-right")
        await page.get_by_role("button", name="Use key").click()
        await expect(field).to_be_hidden()
        await expect(page.get_by_label("Model")).to_be_enabled()
        request = await ask(page, world, "Hello")
        assert request.request.tenant == "key-alice"
        request.start()
        request.tokens("Hi")
        await expect(last_answer(page).locator(".text")).to_have_text("Hi")
        await page.get_by_role("button", name="Stop").click()
        async with asyncio.timeout(5):
            await request.cancelled.wait()  # the cancellation carries the key as well
        await page.close()
