"""A real Chromium, if the machine has one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NEEDS_CHROMIUM = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the browser test did not run"),
]


WAIT_MS = 120_000
"""Longer than anything that a page waits for takes on a busy machine."""


async def until(page: Any, test: str, arg: object = None) -> None:
    """Wait until the JavaScript function or expression `test` holds."""
    # Playwright's own wait evaluates strings inside the page, which the page's policy forbids.
    deadline_s = asyncio.get_running_loop().time() + WAIT_MS / 1000
    while not await page.evaluate(test, arg):
        assert asyncio.get_running_loop().time() < deadline_s, f"it never came true: {test} {arg}"
        await asyncio.sleep(0.1)


@asynccontextmanager
async def chromium(profile: Path, *flags: str, wait_ms: float) -> AsyncIterator[Any]:
    """Open a browser with a new profile.

    Yields Playwright's context, whose timeout for everything is `wait_ms`.
    """
    playwright = pytest.importorskip("playwright.async_api")
    async with playwright.async_playwright() as driver:
        context = await driver.chromium.launch_persistent_context(
            str(profile), executable_path=CHROMIUM, args=[*FLAGS, *flags], headless=True, timeout=wait_ms
        )
        context.set_default_timeout(wait_ms)
        yield context
        await context.close()


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Any]:
    """A page in a new Chromium that may play by itself. An error that the page logs fails the test."""
    errors: list[str] = []

    def logged(line: Any) -> None:
        # Chromium also logs answers of 400 and above and broken connections. A page may expect them.
        if line.type == "error" and not line.text.startswith(("Failed to load", "WebSocket connection")):
            errors.append(line.text)

    autoplay = "--autoplay-policy=no-user-gesture-required"
    async with chromium(tmp_path / "profile", autoplay, wait_ms=WAIT_MS) as context:
        page = await context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", logged)
        yield page
        # Shown by pytest if the test failed.
        print(await page.locator("body").inner_text())
    assert errors == []
