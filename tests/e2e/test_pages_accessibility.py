"""People who use a keyboard, a screen reader, little contrast or a phone can use the pages, as axe-core finds it."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, ViewportSize, expect

from tests.fakes.edge_world import edge_world
from tests.fakes.fake_router_link import answer

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser"), pytest.mark.asyncio(loop_scope="session")]


DESKTOP, PHONE = ViewportSize(width=1280, height=720), ViewportSize(width=375, height=667)
ARTIFACTS = Path(__file__).resolve().parents[2] / "test-artifacts"
MAX_LOAD_MS = 60_000  # A busy machine needs seconds to describe the API for the first time.


async def open_page(browser: Browser, url: str, scheme: str, size: ViewportSize = DESKTOP) -> Page:
    page = await browser.new_page(color_scheme=scheme, viewport=size)
    await page.goto(url)
    return page


async def assert_accessible(page: Page) -> None:
    results = await Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    # axe judges what is there, not whether a phone shows it.
    too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert await page.evaluate(too_wide) == 0


async def open_reference(browser: Browser, url: str, scheme: str, size: ViewportSize) -> Page:
    page = await open_page(browser, f"{url}/docs", scheme, size)
    await expect(page.locator("#notice")).to_be_hidden(timeout=MAX_LOAD_MS)
    await expect(page.get_by_text("/v1/chat/completions").first).to_be_visible()
    return page


async def unfold(page: Page, within: str, one_of: int = 1, num_levels: int = 10) -> int:
    """Unfolds one of so many folded parts below the CSS selector, level by level: a part makes its content when it is
    opened. Returns how many parts were unfolded."""
    return await page.evaluate(
        """async ([within, oneOf, numLevels]) => {
          let numOpened = 0;
          for (let level = 0; level < numLevels; level++) {
            const folded = [...document.querySelectorAll(`${within} details:not([open])`)];
            const chosen = folded.filter((_, number) => number % oneOf == 0);
            if (!chosen.length) break;
            const made = chosen.map((each) => new Promise((resolve) => each.addEventListener("toggle", resolve)));
            chosen.forEach((each) => { each.open = true; });
            await Promise.all(made);
            numOpened += chosen.length;
          }
          return numOpened;
        }""",
        [within, one_of, num_levels],
    )


@pytest.mark.parametrize(
    ("scheme", "size"), [("light", DESKTOP), ("dark", PHONE), pytest.param("light", PHONE, marks=pytest.mark.long)]
)
async def test_chat_page(browser: Browser, scheme: str, size: ViewportSize) -> None:
    """With an answer, so that all parts are there."""
    async with edge_world() as world:
        world.link.script = answer(
            "Hello there.\n\n## Parts\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nx = 1\n```\n"
        )
        page = await open_page(browser, world.url, scheme, size)
        await expect(page.get_by_label("Model")).to_have_value("tiny")
        await page.get_by_label("Your message").fill("Hi")
        await page.keyboard.press("Enter")
        await expect(page.locator(".turn.assistant").last).to_contain_text("Hello there.")
        await expect(page.locator(".turn.assistant td").last).to_have_text("2")
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_role("button", name="Edit").click()
        await assert_accessible(page)


@pytest.mark.parametrize(
    ("scheme", "size", "one_of"),
    [
        ("light", PHONE, 12),
        *(
            pytest.param(scheme, size, 1, marks=pytest.mark.long)
            for scheme in ("light", "dark")
            for size in (DESKTOP, PHONE)
        ),
    ],
)
async def test_reference_page(browser: Browser, scheme: str, size: ViewportSize, one_of: int) -> None:
    """The whole reference, with everything unfolded, or one part of so many: they are made alike."""
    async with edge_world() as world:
        page = await open_reference(browser, world.url, scheme, size)
        assert await unfold(page, "#operations", one_of, num_levels=1 if one_of > 1 else 10) > 3
        heights = "[...new Set([...document.querySelectorAll('nav .method')].map((one) => one.offsetHeight))]"
        assert len(await page.evaluate(heights)) == 1  # none is broken into two lines
        await assert_accessible(page)


async def test_words_of_the_reference_are_whole_on_a_phone(browser: Browser) -> None:
    """Names of fields were broken in the middle, where a table can be scrolled. The fields of the largest endpoint."""
    async with edge_world() as world:
        page = await open_reference(browser, world.url, "light", PHONE)
        assert await unfold(page, "#createResponse") > 10
        broken = await page.evaluate(
            """() => [...document.querySelectorAll('td code')].filter((code) => !/\\s|[|.-]/.test(code.textContent)
              && code.getClientRects().length > 1).map((code) => code.textContent)"""
        )
        assert broken == []
        assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        await page.evaluate("document.querySelector('#createChatCompletion').scrollIntoView()")
        ARTIFACTS.mkdir(exist_ok=True)
        await page.screenshot(path=ARTIFACTS / "chat-docs-phone.png")
        await page.close()
