"""Stored conversations on the chat page, in a real browser, on a phone and in the dark."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, expect

from tests.fakes.fake_control import SEARCH_KEY
from tests.fakes.fake_router_link import answer
from tests.fakes.state_world import StateWorld, state_world

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser"), pytest.mark.asyncio(loop_scope="session")]

ARTIFACTS = Path(__file__).resolve().parents[2] / "test-artifacts"
WIDTH = 375


async def ask(page: Page, world: StateWorld, text: str, reply: str) -> None:
    world.edge.link.script = answer(reply)
    await page.get_by_label("Your message").fill(text)
    async with page.expect_response(lambda response: response.url.endswith("/items") and response.ok):
        await page.keyboard.press("Enter")
    await expect(page.locator(".turn.assistant").last).to_contain_text(reply)
    await expect(page.locator(".turn.running")).to_have_count(0)


async def test_conversations_are_stored_opened_named_and_deleted(browser: Browser, tmp_path: Path) -> None:
    """What is said is stored as a conversation of OpenAI's API; what is edited replaces it. Without an orchestrator the
    page has none of this (tests/e2e/test_chat_page.py)."""
    async with state_world(f"sqlite:///{tmp_path}/state.db", tmp_path) as world:
        page = await browser.new_page(color_scheme="dark", viewport={"width": WIDTH, "height": 667})
        page.set_default_timeout(5000)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        await page.goto(world.edge.url)
        await page.get_by_label("API key").fill(SEARCH_KEY)
        await page.keyboard.press("Enter")
        await expect(page.get_by_label("Model")).to_have_value("tiny")
        chats = page.get_by_role("button", name="Chats")

        await ask(page, world, "How do looms work?", "With a shuttle.")
        await ask(page, world, "And mills?", "With wind.")
        await page.reload()
        await ask(page, world, "Thanks", "You are welcome.")
        await chats.click()
        panel = page.get_by_label("Chats", exact=True)
        title = panel.get_by_role("button", name="How do looms work?", exact=True)
        await expect(title).to_have_attribute("aria-current", "true")
        page.once("dialog", lambda dialog: dialog.accept("Looms"))
        await panel.get_by_role("button", name="Rename").click()
        await expect(panel.get_by_role("button", name="Looms", exact=True)).to_be_visible()
        results = await Axe().run(page)
        assert results.violations_count == 0, results.generate_report()
        assert await page.evaluate("document.documentElement.scrollWidth") <= WIDTH
        for button in await panel.locator("button:visible").all():
            box = await button.bounding_box()
            assert box is not None
            assert box["height"] >= 44
        ARTIFACTS.mkdir(exist_ok=True)
        await page.screenshot(path=ARTIFACTS / "chat-conversations-phone-dark.png")
        await chats.click()

        await page.get_by_role("button", name="New chat").click()
        await ask(page, world, "Second talk", "Yes.")
        await page.get_by_role("button", name="Edit").click()
        await ask(page, world, "Second talk, edited", "Yes, indeed.")
        await chats.click()
        await expect(panel.get_by_role("listitem")).to_have_count(2)
        await panel.get_by_role("button", name="Looms", exact=True).click()
        await expect(page.locator(".turn .text")).to_have_text(
            ["How do looms work?", "With a shuttle.", "And mills?", "With wind.", "Thanks", "You are welcome."]
        )
        await chats.click()
        await panel.get_by_role("button", name="Delete Looms").click()
        await expect(panel.get_by_role("listitem")).to_have_count(1)
        await expect(panel.get_by_role("button", name="Second talk, edited", exact=True)).to_be_visible()
        await expect(page.locator(".turn")).to_have_count(0)
        assert problems == []
        await page.close()
