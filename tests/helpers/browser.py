"""A real Chromium, if the machine has one."""

from __future__ import annotations

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
