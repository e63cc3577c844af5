"""Take screenshots of the page's main states, for people: desktop, phone, phone on its side; light and dark.

    python -m tools.screenshots --out screenshots [--url http://127.0.0.1:8080]

Without `--url` the script starts a stack of its own. Needs Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.helpers.browser import CHROMIUM, chromium, new_page
from turboserve.cli.stack.background import BackgroundStack

LOOKS = {
    "desktop-light": ({"width": 1280, "height": 900}, "light"),
    "desktop-dark": ({"width": 1280, "height": 900}, "dark"),
    "phone-light": ({"width": 390, "height": 844}, "light"),
    "phone-dark": ({"width": 390, "height": 844}, "dark"),
    "landscape-dark": ({"width": 844, "height": 390}, "dark"),
}
CONSOLE = ("overview", "workers", "migrations", "decisions", "queue", "quality", "cost")


async def shoot(page: Any, url: str, look: str, out: Path) -> None:
    """Go through the states of the page in one look."""
    size, scheme = LOOKS[look]
    await page.set_viewport_size(size)
    await page.emulate_media(color_scheme=scheme, reduced_motion="no-preference")

    async def save(state: str) -> None:
        await page.screenshot(path=out / f"{look}-{state}.png", full_page=True)

    await page.goto(f"{url}/#ses_never")
    await page.locator("#veil-text", has_text="does not exist").wait_for()
    await save("0-no-such-session")
    await page.goto("about:blank")
    await page.goto(url)
    await page.locator("#chips").wait_for()
    await save("1-empty")
    await page.get_by_label("What should the video show?").fill("a red circle wearing a hat")
    await page.locator("#hint").wait_for()
    await save("2-unknown-words")
    await page.get_by_label("What should the video show?").fill("a red balloon moving left over the sea")
    await page.get_by_role("button", name="Start", exact=True).click()
    await page.locator("body[data-mode=live]").wait_for()
    await page.wait_for_timeout(2_000)
    await save("3-live")
    await page.get_by_role("button", name="Share", exact=True).click()
    await page.locator("#share-dialog[open]").wait_for()
    await save("3-share")
    link = await page.get_by_label("Link", exact=True).input_value()
    await page.keyboard.press("Escape")
    viewer = await page.context.new_page()
    await viewer.set_viewport_size(size)
    await viewer.emulate_media(color_scheme=scheme)
    await viewer.goto(link)
    await viewer.locator("body[data-mode=live]").wait_for()
    await viewer.screenshot(path=out / f"{look}-3-viewer.png", full_page=True)
    await viewer.close()
    await page.get_by_role("button", name="Pause", exact=True).click()
    await page.locator("body[data-mode=paused]").wait_for()
    await save("4-paused")
    await page.get_by_role("button", name="New session").click()
    await save("5-end-or-keep")
    await page.get_by_role("button", name="End it").click()
    await page.locator("body[data-mode=empty]").wait_for()
    await page.goto(f"{url}/pool")
    await page.locator("#phase", has_not_text="loading").wait_for()
    await save("6-pool")
    for view in CONSOLE:
        await page.goto(f"{url}/pool#/{view}")
        await page.locator(f"body[data-shows={view}]").wait_for()
        await save(f"7-{view}")
    await page.goto(f"{url}/docs")
    await page.locator(".opblock").first.wait_for()
    await save("8-docs")


async def run(browser_address: str, url: str, out: Path) -> None:
    for look in LOOKS:
        async with new_page(browser_address) as page:
            await shoot(page, url, look, out)
        print(f"{out}/{look}-*.png", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--url", help="address of a running stack")
    args = parser.parse_args()
    if CHROMIUM is None:
        parser.error("no chromium found")
    args.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = args.url or stack.enter_context(BackgroundStack(folder / "data")).url
        browser = stack.enter_context(chromium(folder))
        asyncio.run(run(browser, url.rstrip("/"), args.out))


if __name__ == "__main__":
    main()
