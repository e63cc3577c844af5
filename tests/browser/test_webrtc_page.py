"""WebRTC in a real Chromium, with a real stack: at the shortest lead the page plays without a buffer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.test_player_page import SEES
from tests.helpers.browser import NEEDS_CHROMIUM, PATIENT_WEBRTC, until
from turboserve.cli.stack.background import BackgroundStack

pytestmark = NEEDS_CHROMIUM

TRANSPORT = "(wanted) => document.body.dataset.transport === wanted"
DECODED = """
async () => {
  const {videoWidth, srcObject} = document.getElementById("video");
  return srcObject !== null && videoWidth > 0;
}
"""


async def start_at_once(page: Any, prompt: str) -> None:
    """Choose the shortest lead, and start a session."""
    await page.get_by_label("Instant").check()
    await page.get_by_label("What should the video show?").fill(prompt)
    await page.get_by_role("button", name="Start").click()
    await until(page, SEES, arg="red")


async def test_the_shortest_lead_plays_over_webrtc(stack: BackgroundStack, page: Any) -> None:
    await page.add_init_script(PATIENT_WEBRTC)
    await page.goto(stack.url)
    await start_at_once(page, "a red circle moving left")
    assert await page.evaluate(TRANSPORT, "webrtc")
    assert await page.evaluate(DECODED)

    await page.get_by_label("What should it show now?").fill("a blue square moving up")
    await page.get_by_role("button", name="Change").click()
    await until(page, SEES, arg="blue")
    await page.locator("#on-screen", has_text="On screen: “a blue square moving up”").wait_for()

    chunk = int(await page.evaluate("document.body.dataset.chunk"))
    await until(page, "(before) => Number(document.body.dataset.chunk) > before + 3", arg=chunk)
    await until(page, SEES, arg="blue")

    # A longer lead goes on over a WebSocket, with the player's buffer.
    await page.get_by_label("Balanced").check()
    await until(page, TRANSPORT, arg="websocket")
    await until(page, "() => document.getElementById('video').buffered.length > 0")
    await until(page, SEES, arg="blue")
    # And back.
    await page.get_by_label("Instant").check()
    await until(page, TRANSPORT, arg="webrtc")
    await until(page, DECODED)
    await until(page, SEES, arg="blue")
    await page.get_by_role("button", name="End session").click()
    await page.locator("#phase", has_text="terminated").wait_for()


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param("delete globalThis.RTCPeerConnection", id="no WebRTC in the browser"),
        pytest.param(
            "const ask = fetch; globalThis.fetch = (to, how) => ask(`${to}`.replace('/whep', ''), how)",
            id="no WHEP at the gateway",
        ),
        pytest.param(
            "RTCPeerConnection.prototype.setRemoteDescription = async () => {}",
            id="media does not come through",
        ),
    ],
)
async def test_without_webrtc_the_page_plays_over_its_websocket(
    stack: BackgroundStack, page: Any, broken: str
) -> None:
    await page.add_init_script(broken)
    await page.goto(stack.url)
    await start_at_once(page, "a red circle moving left")
    assert await page.evaluate(TRANSPORT, "websocket")
    assert await page.evaluate("document.getElementById('video').srcObject === null")
    await page.get_by_role("button", name="End session").click()
    await page.locator("#phase", has_text="terminated").wait_for()
