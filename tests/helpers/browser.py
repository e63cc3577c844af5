"""A real Chromium, if the machine has one."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from websockets.asyncio.client import ClientConnection, connect

from turboserve.tasks import stop

BROWSERS = "chromium-headless-shell", "chromium", "chromium-browser"
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
"""The shell is the same engine without a browser's windows. Pages take a third less CPU time in it."""
REBOUND = "foe.example"
DISABLED_FEATURES = (
    # Playwright's own: tests/shared/test_browser_options.py compares them. Of this option, the last counts.
    "AvoidUnnecessaryBeforeUnloadCheckSync,DestroyProfileOnBrowserClose,HttpsUpgrades,"
    "HttpsFirstBalancedModeAutoEnable,LensOverlay,MediaRouter,PaintHolding,ThirdPartyStoragePartitioning,"
    "AvoidCorsURLLoaderRestartOnRedirect,TcpPortRandomizationWin,OptimizationHints,"
    "NetworkTimeServiceQuerying,AimEnabled,PreconnectToSearch,"
    # A process for the next page, which would take a fifth of the CPU time of a page, and never gets one.
    "SpareRendererForSitePerProcess"
)
FLAGS = [
    f"--disable-features={DISABLED_FEATURES}",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--autoplay-policy=no-user-gesture-required",
    # The attacker's name server first returned the attacker's address, and now returns this machine's.
    f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1",
]
NEEDS_CHROMIUM = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the browser test did not run"),
]


WAIT_MS = 120_000
"""Longer than anything that a page waits for takes on a busy machine."""
FOCUSED = "document.activeElement.id || document.activeElement.tagName"
FRAME_MS = 100
SLOW_FRAMES = f"""
const frame = requestAnimationFrame, cancel = cancelAnimationFrame, timers = new Set();
const slow = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
globalThis.requestAnimationFrame = (work) => {{
  if (!slow()) return frame(work);
  const timer = -setTimeout(() => timers.delete(timer) && work(performance.now()), {FRAME_MS});
  timers.add(timer);
  return timer;
}};
globalThis.cancelAnimationFrame = (id) => timers.delete(id) ? clearTimeout(-id) : cancel(id);
"""
"""Script for pages that are to look at themselves ten times a second, not sixty. Without the GPU, each look
makes the processor draw a frame. A page whose motion is not reduced keeps its own pace."""
PATIENT_WEBRTC = f"""
const later = setTimeout, after = AbortSignal.timeout.bind(AbortSignal);
globalThis.setTimeout = (work, ms, ...more) => later(work, ms === 5000 ? {WAIT_MS} : ms, ...more);
AbortSignal.timeout = (ms) => after(Math.max(ms, {WAIT_MS}));
"""
"""Script for a page that is to play over WebRTC also on a busy machine.

By itself a page waits 5 s for each step of the connection, and then plays over its WebSocket."""


async def until(page: Any, test: str, arg: object = None) -> Any:
    """Wait until the JavaScript function or expression `test` holds. Return its value."""
    # Playwright's own wait evaluates strings inside the page, which the page's policy forbids.
    deadline_s = asyncio.get_running_loop().time() + WAIT_MS / 1000
    while not (value := await page.evaluate(test, arg)):
        assert asyncio.get_running_loop().time() < deadline_s, f"it never came true: {test} {arg}"
        await asyncio.sleep(0.1)
    return value


async def focus_is(page: Any, place: str) -> None:
    """Wait until the focus is at the element with the id `place`, or at one of this tag that has no id.

    A key press or an event of the session may move the focus a little later.
    """
    await until(page, f"(place) => ({FOCUSED}) === place", place)


async def focus_checked(page: Any) -> None:
    """Wait until the page's `keepFocus` has looked several times where the focus is: every 100 ms."""
    await page.evaluate("() => new Promise((done) => setTimeout(done, 300))")


@contextmanager
def chromium(folder: Path) -> Iterator[str]:
    """Start a Chromium. Yields its address for `new_page`. `folder`: where its options are written."""
    driver = pytest.importorskip("playwright._impl._driver")
    options = {"executablePath": CHROMIUM, "args": FLAGS, "headless": True, "host": "127.0.0.1"}
    config = folder / "launch.json"
    config.write_text(json.dumps(options))
    launch = ["launch-server", "--browser", "chromium", "--config", str(config)]
    command = [*driver.compute_driver_executable(), *launch]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


@pytest.fixture(scope="session")
def browser_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Chromium that all tests of this process share.

    To start one takes as much processor time as most of these tests.
    """
    with chromium(tmp_path_factory.mktemp("browser")) as address:
        yield address


@asynccontextmanager
async def connected(browser_address: str) -> AsyncIterator[Any]:
    """Connect to the browser as Playwright's `connect` does, but without a Node.js process in between.

    Such a process for each page takes a quarter of the processor time of a short test.
    """
    connections = pytest.importorskip("playwright._impl.connection")
    interface = pytest.importorskip("playwright.async_api")
    connection = connections.Connection(asyncio.get_running_loop())
    connection.mark_as_remote()
    unsent: asyncio.Queue[str] = asyncio.Queue()
    connection.onmessage = lambda message: unsent.put_nowait(json.dumps(message))
    limit_s = WAIT_MS / 1000
    async with connect(
        browser_address, open_timeout=limit_s, max_size=None, ping_interval=None, compression=None
    ) as socket:
        tasks = asyncio.create_task(_send(socket, unsent)), asyncio.create_task(_receive(socket, connection))
        try:
            async with asyncio.timeout(limit_s):
                playwright = await connection.initialize_playwright()
            yield interface.Browser(playwright._pre_launched_browser())
        finally:
            await stop(*tasks)


async def _send(socket: ClientConnection, unsent: asyncio.Queue[str]) -> None:
    while True:
        await socket.send(await unsent.get())


async def _receive(socket: ClientConnection, connection: Any) -> None:
    from playwright._impl.utils.tasks import wait_for_next_task

    try:
        async for message in socket:
            connection.dispatch(json.loads(message))
            # What waited for this message goes on before the next one is dispatched.
            await wait_for_next_task()
    except Exception as error:
        connection.close(repr(error))
        raise
    finally:
        # What still waits for an answer fails.
        connection.close()


@asynccontextmanager
async def new_page(browser_address: str) -> AsyncIterator[Any]:
    """Open a page that may play by itself, with an empty profile of its own."""
    async with connected(browser_address) as browser:
        # Without the GPU, the processor draws each frame of an animation.
        context = await browser.new_context(reduced_motion="reduce")
        context.set_default_timeout(WAIT_MS)
        await context.add_init_script(SLOW_FRAMES)
        yield await context.new_page()
        await context.close()


@pytest.fixture
async def page(browser_address: str) -> AsyncIterator[Any]:
    """The same as `new_page`. An error that the page logs fails the test."""
    errors: list[str] = []

    def logged(line: Any) -> None:
        # Chromium also logs answers of 400 and above and broken connections. A page may expect them.
        if line.type == "error" and not line.text.startswith(("Failed to load", "WebSocket connection")):
            errors.append(line.text)

    async with new_page(browser_address) as page:
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", logged)
        yield page
        # Shown by pytest if the test failed.
        print(await page.locator("body").inner_text())
    assert errors == []


COLOR_RULES = ["color-contrast", "link-in-text-block"]
"""The rules of axe whose result depends on colors."""
SCHEMES: Final[dict[str, dict[str, list[str]]]] = {"light": {}, "dark": {"runOnly": COLOR_RULES}}
"""Color scheme → the options with which axe looks at it."""


async def serious_violations(page: Any, *schemes: str) -> list[str]:
    """Return what axe calls serious or critical on the page as it is, in each color scheme.

    The script of axe is sent to each page once: this takes as long as half of the rules.
    """
    axe = pytest.importorskip("axe_playwright_python.async_playwright").Axe()
    if not await page.evaluate("() => 'axe' in window"):
        await page.evaluate(axe.axe_script)
    found: list[str] = []
    for scheme in schemes:
        await page.emulate_media(color_scheme=scheme)
        options = {"resultTypes": ["violations"], **SCHEMES[scheme]}
        for each in (await page.evaluate("(options) => axe.run(options)", options))["violations"]:
            if each["impact"] in ("serious", "critical"):
                found.append(f"{scheme} {each['id']} {[node['target'] for node in each['nodes']]}")
    return found
