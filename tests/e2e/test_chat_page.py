"""The chat page in a real browser: what a person sees when tokens stream, stop, fail or come from a cache.

Screenshots go to test-artifacts/.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, Route, expect

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.access.api_keys import ApiKey, ApiKeys, digest_of
from kvloom_common.callers import Callers
from kvloom_common.config import EdgeConfig
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


HOSTILE_MARKDOWN = (
    "[click](javascript:alert(1)) [data](data:text/html,<script>alert(1)</script>) [ok](https://example.com)",
    '![x](https://example.com/x.png) ![y](x"onerror="alert(1))',
    "<svg onload=alert(1)><math><mtext></mtext></math>\n\n<iframe src=x></iframe>\n\n<p style='top:0'>over</p>",
    '<https://example.com/"><img src=x onerror=alert(1)>> <mailto:a@example.com>\n\n- [x] <input autofocus>',
    '```"><img src=x onerror=alert(1)>\ncode\n```\n\n[ref]\n\n[ref]: javascript:alert(1) "title"',
)


@pytest_asyncio.fixture(loop_scope="session")
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as started:
        yield started


async def open_page(browser: Browser, world: EdgeWorld, *, phone: bool = False, dark: bool = False) -> Page:
    """A page that fails the test when it logs an error, e.g. a violation of its own security policy."""
    page = await browser.new_page(
        viewport=PHONE if phone else DESKTOP,
        has_touch=phone,
        color_scheme="dark" if dark else "light",
    )
    page.set_default_timeout(5000)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if "Security Policy" in message.text else None)
    page.on("close", lambda _: None)
    page.complaints = complaints
    await page.goto(world.url)
    await expect(page.get_by_label("Model")).to_have_value("tiny")
    return page


async def close_page(page: Page) -> None:
    assert page.complaints == []
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
        await asyncio.sleep(0.02)  # sleep: so that there is a rate to show


async def screenshot(page: Page, name: str) -> None:
    ARTIFACTS.mkdir(exist_ok=True)
    await page.screenshot(path=ARTIFACTS / f"chat-{name}.png")


def messages_of(request: FakeRequest) -> list[str]:
    """Returns the texts of the conversation that the page has sent, as they stand in the rendered prompt."""
    return re.findall(r"<\|im_start\|>\w+\n(.*?)<\|im_end\|>", request.request.submit.prompt_text, re.DOTALL)


async def test_tokens_stream_and_facts_follow(browser: Browser, world: EdgeWorld) -> None:
    """Text appears while it is generated; then time to first token, rate, shard and cached tokens."""
    page = await open_page(browser, world)
    await screenshot(page, "welcome")
    request = await ask(page, world, "What is the capital of France?")
    request.start(shard_id="shard-1", num_cached_tokens=16)
    request.tokens("The capital of France")
    await expect(last_answer(page).locator(".text")).to_have_text("The capital of France")
    await expect(page.get_by_role("button", name="Stop")).to_be_visible()
    await asyncio.sleep(0.05)  # sleep: so that there is a rate to show
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
    assert messages_of(second) == [
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
    assert messages_of(following) == ["Count", "one two", "Go on"]
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
    assert messages_of(third) == ["Other question"]  # the failed exchange is not part of the conversation
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
    for markdown in HOSTILE_MARKDOWN:
        request = await ask(page, world, "More")
        request.tokens(markdown)
        request.finish()
        await expect(last_answer(page).locator(".facts")).to_be_visible()
    unsafe = ":is(script, style, iframe, img, svg, math, form, input, [style], [onclick], [onerror], [src])"
    assert await page.locator(f"#conversation {unsafe}").count() == 0
    for link in await page.locator("#conversation .text a[href]").all():
        assert (await link.get_attribute("href") or "").startswith(("https:", "mailto:"))
        assert await link.get_attribute("rel") == "noopener noreferrer"
    await close_page(page)


async def test_markdown_is_shown_while_it_streams(browser: Browser, world: EdgeWorld) -> None:
    """Models answer in Markdown: a table, a list or a heading that is not finished must not wait for the end."""
    page = await open_page(browser, world)
    request = await ask(page, world, "Compare")
    request.start()
    request.tokens("## Looms\n\nA **hand** loom and a `power` loom:\n\n- slow\n")
    text = last_answer(page).locator(".text")
    await expect(text.locator("h3")).to_have_text("Looms")
    await expect(text.locator("strong")).to_have_text("hand")
    await expect(text.locator("li")).to_have_text(["slow"])
    request.tokens("- fast\n\n| loom | speed |\n|---|--:|\n| hand | 1 |\n")
    await expect(text.locator("li")).to_have_text(["slow", "fast"])
    await expect(text.locator("td")).to_have_text(["hand", "1"])
    request.tokens("\n> quoted\n\n[a loom](https://example.com/loom)\n\n```python\nprint(1)\n")
    await expect(text.locator("pre")).to_have_text("print(1)")
    await expect(text.locator(".code-bar span")).to_have_text("python")
    request.tokens("```\n\n1. one\n2. two\n")
    request.finish()
    await expect(text.locator("ol li")).to_have_text(["one", "two"])
    await expect(text.locator("blockquote")).to_have_text("quoted")
    await expect(text.get_by_role("link", name="a loom")).to_have_attribute("href", "https://example.com/loom")
    await screenshot(page, "markdown")
    await page.emulate_media(color_scheme="dark")
    await screenshot(page, "markdown-dark")
    await page.set_viewport_size(PHONE)
    assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    await screenshot(page, "markdown-phone-dark")
    await close_page(page)


async def test_answers_and_code_are_copied(browser: Browser, world: EdgeWorld) -> None:
    """The Markdown of an answer, and the code of a block without its fences."""
    page = await open_page(browser, world)
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    request = await ask(page, world, "Write a function that adds two numbers.")
    await play(request, CODE_ANSWER)
    request.finish()
    await expect(last_answer(page).locator(".facts")).to_be_visible()
    await last_answer(page).get_by_role("button", name="Copy code").click()
    await expect(last_answer(page).get_by_role("button", name="Copied")).to_be_visible()
    clipboard = "navigator.clipboard.readText()"
    assert await page.evaluate(clipboard) == "def add(a, b):\n    return a + b  # <b>not bold</b>"
    await last_answer(page).get_by_role("button", name="Copy", exact=True).click()
    await expect(last_answer(page).locator(".actions").get_by_role("button", name="Copied")).to_be_visible()
    assert await page.evaluate(clipboard) == "".join(CODE_ANSWER)
    await close_page(page)


async def test_an_answer_is_made_again_and_a_message_is_edited(browser: Browser, world: EdgeWorld) -> None:
    """Both replace what follows: the model is never sent two answers to one question."""
    page = await open_page(browser, world)
    for question, text in (("First", "one"), ("Second", "two")):
        request = await ask(page, world, question)
        request.tokens(text)
        request.finish()
        await expect(last_answer(page).locator(".facts")).to_be_visible()
    await expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
    await page.get_by_role("button", name="Regenerate").click()
    again = await world.link.next_request()
    assert messages_of(again) == ["First", "one", "Second"]
    again.tokens("zwei")
    again.finish()
    await expect(last_answer(page).locator(".facts")).to_be_visible()
    await expect(page.locator(".turn.assistant .text")).to_have_text(["one", "zwei"])

    await page.get_by_role("button", name="Edit").first.click()
    await expect(page.get_by_label("Your message")).to_have_value("First")
    await screenshot(page, "edit")
    await page.keyboard.press("Escape")
    await expect(page.locator(".turn")).to_have_count(4)
    await page.get_by_role("button", name="Edit").first.click()
    edited = await ask(page, world, "Another first")
    assert messages_of(edited) == ["Another first"]
    edited.tokens("eins")
    edited.finish()
    await expect(page.locator(".turn .text")).to_have_text(["Another first", "eins"])
    await expect(last_answer(page).locator(".facts")).to_be_visible()
    await page.reload()
    await expect(page.locator(".turn .text")).to_have_text(["Another first", "eins"])
    await close_page(page)


async def test_settings_are_sent_and_kept(browser: Browser, world: EdgeWorld) -> None:
    """A system prompt and a temperature; empty ones are the model's own."""
    page = await open_page(browser, world)
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_label("System prompt").fill("Be brief.")
    await page.get_by_label("Temperature").fill("0.3")
    await screenshot(page, "settings")
    await page.get_by_role("button", name="Done").click()
    request = await ask(page, world, "Hello")
    assert messages_of(request) == ["Be brief.", "Hello"]
    assert request.request.wanted.sampling.temperature == pytest.approx(0.3)
    request.tokens("Hi")
    request.finish()
    await expect(last_answer(page).locator(".facts")).to_be_visible()
    await page.reload()
    await page.get_by_role("button", name="Settings").click()
    await expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    await page.get_by_label("System prompt").fill("")
    await page.get_by_label("Temperature").fill("")
    second = await ask(page, world, "More")
    assert messages_of(second) == ["Hello", "Hi", "More"]
    await close_page(page)


@pytest.mark.parametrize("prefix", [pytest.param("", marks=pytest.mark.long), "/llm"])
async def test_pages_find_one_another_and_the_api_behind_a_prefix(browser: Browser, prefix: str) -> None:
    """A proxy that serves kvloom below a path sends pages whose links pointed at the root of the host."""
    config = EdgeConfig(root_path=prefix)
    async with edge_world(config=config) as world:
        page = await browser.new_page()
        failed: list[str] = []
        page.on("response", lambda response: failed.append(response.url) if response.status >= 400 else None)
        await page.goto(f"{world.url}{prefix}/")
        await expect(page.get_by_label("Model")).to_have_value("tiny")
        request = await ask(page, world, "Hello")
        request.tokens("Hi")
        request.finish()
        await expect(last_answer(page).locator(".text")).to_have_text("Hi")
        await page.get_by_role("link", name="API").click()
        await expect(page.get_by_text("/v1/chat/completions").first).to_be_visible()
        assert page.url == f"{world.url}{prefix}/docs"
        servers = await page.evaluate("fetch('openapi.json').then((r) => r.json()).then((api) => api.servers)")
        assert servers == [{"url": f"{prefix}/"}]
        await page.get_by_role("link", name="Chat", exact=True).click()
        await expect(page.get_by_label("Model")).to_have_value("tiny")
        assert failed == []
        await page.close()


async def test_a_key_that_may_not_chat_is_told_so(browser: Browser) -> None:
    """The page said for ever that the server cannot be reached."""
    async with edge_world() as world:
        page = await browser.new_page()
        error = {"error": {"message": "This key has only the scope usage.", "code": "permission_denied"}}
        asked: list[str] = []

        async def refuse(route: Route) -> None:
            asked.append(route.request.url)
            await route.fulfill(status=403, json=error)

        await page.route("**/v1/models", refuse)
        await page.goto(world.url)
        notice = page.locator("#notice")
        await expect(notice).to_have_text("This key may not chat: This key has only the scope usage.")
        await expect(page.get_by_label("API key")).to_be_visible()
        assert len(asked) == 1
        await page.unroute("**/v1/models")
        busy = {"error": {"message": "Too many requests."}}
        await page.route("**/v1/models", lambda route: route.fulfill(status=429, json=busy))
        await page.reload()
        await expect(notice).to_have_text("Too many requests. Trying again…")
        await page.close()


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
    assert messages_of(fresh) == ["Fresh"]
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
        page = await browser.new_page(viewport=PHONE)
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
        assert request.request.submit.tenant == "key-alice"
        request.start()
        request.tokens("Hi")
        await expect(last_answer(page).locator(".text")).to_have_text("Hi")
        await page.get_by_role("button", name="Stop").click()
        async with asyncio.timeout(5):
            await request.cancelled.wait()  # the cancellation carries the key as well
        await page.close()
