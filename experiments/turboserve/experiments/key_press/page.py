"""Plays a session on the player page in a headless Chromium, presses arrow keys, and captures the screen."""

from __future__ import annotations

import asyncio
import base64
import importlib
import random
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from turboserve.bench.report import BenchError
from turboserve.experiments.key_press.motion import Frame
from turboserve.experiments.toyworld.world import PIXELS

LIMIT_S = 60.0
SETTLE_S = 3.0
BEFORE_S, AFTER_S = 0.4, 1.6
"""What is captured around a press at least, seconds."""
ANSWER_S, ANSWER_FRAMES = 20.0, 18
"""A machine that cannot keep up has this long to show so many frames since the chunk under the direction."""
PAUSE_S = 0.4
PROMPT = "a red square moving left"
NO_WEBRTC = "delete globalThis.RTCPeerConnection"
TRANSPORTS = {"websocket": NO_WEBRTC, "webrtc": ""}
"""Transport of the page → what happens in the browser before the page is loaded."""
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--autoplay-policy=no-user-gesture-required",
)
KEYS = {"up": "ArrowUp", "down": "ArrowDown", "left": "ArrowLeft", "right": "ArrowRight"}
_ACROSS = ("left", "right")

# Each frame that is shown, as pixels of the world, each press, and what the gateway says of chunks and
# controls. All times are Unix milliseconds.
CAPTURE = """
(size) => {
  const [player, video] = [document.getElementById("player"), document.getElementById("video")];
  const seen = (globalThis.keyPress = { frames: [], presses: [], chunks: {}, controls: {} });
  const pen = new OffscreenCanvas(size, size).getContext("2d", { willReadFrequently: true });
  pen.imageSmoothingQuality = "high";
  const unix = (ms) => performance.timeOrigin + ms;
  const shown = (now, { expectedDisplayTime }) => {
    video.requestVideoFrameCallback(shown);
    pen.drawImage(video, 0, 0, size, size);
    const pixels = pen.getImageData(0, 0, size, size).data;
    // Of a frame that follows a seek, Chromium gives the time at which it was due.
    seen.frames.push([unix(Math.max(expectedDisplayTime, performance.now())), pixels]);
    while (seen.frames.length > 400) seen.frames.shift();
  };
  video.requestVideoFrameCallback(shown);
  addEventListener("keydown", ({ timeStamp }) => seen.presses.push(unix(timeStamp)), true);
  player.addEventListener("chunk", ({ detail }) => {
    const { published_at, compute_s } = detail;
    seen.chunks[detail.index] = { published_at, compute_s, received: unix(performance.now()) };
  });
  player.addEventListener("sessionevent", ({ detail: { event } }) => {
    if (event.type === "control.accepted") seen.controls.accepted = event;
    if (event.type === "control.applied") seen.controls.applied = event;
  });
}
"""
ANSWERED = """
([direction, count]) => {
  const { frames, chunks, controls: { accepted, applied } } = globalThis.keyPress;
  if (accepted?.value !== direction || applied?.control_id !== accepted.control_id) return false;
  const chunk = chunks[applied.chunk_index];
  return chunk !== undefined && frames.filter(([at]) => at > chunk.received).length >= count;
}
"""
TAKE = """
() => {
  const { frames, presses, chunks, controls } = globalThis.keyPress;
  const text = (pixels) => {
    let bytes = "";
    for (let n = 0; n < pixels.length; n += 1) if (n % 4 !== 3) bytes += String.fromCharCode(pixels[n]);
    return btoa(bytes);
  };
  const chunk = chunks[controls.applied?.chunk_index] ?? null;
  const texts = frames.map(([at, pixels]) => [at, text(pixels)]);
  // The next press must not have the time of this one.
  return { frames: texts, pressed: presses.splice(0).at(-1) ?? null, ...controls, chunk };
}
"""


@dataclass(frozen=True)
class Press:
    """A press of an arrow key, and what followed. Times are Unix seconds; None: it was not observed."""

    direction: str
    pressed_s: float | None
    accepted_s: float | None
    """When the gateway had stored the direction."""
    begun_s: float | None
    """When the worker began the first chunk under the direction."""
    published_s: float | None
    """When that chunk was in the log."""
    received_s: float | None
    """When the page had that chunk, or over WebRTC its announcement."""
    frames: tuple[Frame, ...]


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    """Start a headless Chromium. Raises BenchError if there is none, and if the page does not do its part."""
    try:
        playwright = importlib.import_module("playwright.async_api")
    except ImportError:
        raise BenchError("this benchmark needs a browser: install the Python package playwright") from None
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    async with playwright.async_playwright() as driver:
        try:
            started = await driver.chromium.launch(executable_path=path, args=[*FLAGS], headless=True)
        except playwright.Error as error:
            raise BenchError(f"Chromium did not start: install chromium ({str(error)[:200]})") from None
        try:
            yield started
        except playwright.Error as error:
            raise BenchError(f"the page: {str(error)[:400]}") from None
        finally:
            await started.close()


async def press_keys(chromium: Any, url: str, transport: str, presses: int, seed: int) -> list[Press]:
    """Steer a new session on the page of the gateway at `url`. Raises BenchError if no video plays."""
    context = await chromium.new_context()
    try:
        page = await context.new_page()
        page.set_default_timeout(LIMIT_S * 1000)
        if TRANSPORTS[transport]:
            await page.add_init_script(TRANSPORTS[transport])
        await page.goto(url)
        await page.get_by_label("Instant").check()
        await page.get_by_label("What should the video show?").fill(PROMPT)
        await page.get_by_role("button", name="Start").click()
        try:
            await _until(page, "() => document.getElementById('video').videoWidth > 0")
            await page.get_by_role("group", name="Steer").wait_for()
            await page.evaluate(CAPTURE, PIXELS)
            await asyncio.sleep(SETTLE_S)
            used = await page.evaluate("document.body.dataset.transport")
            if used != transport:
                raise BenchError(f"the page plays over {used} instead of {transport}")
            await page.evaluate("document.activeElement.blur()")
            return [await _press(page, direction) for direction in directions(presses, seed)]
        finally:
            await page.get_by_role("button", name="End session").click()
            await page.locator("#phase", has_text="terminated").wait_for()
    finally:
        await context.close()


def directions(presses: int, seed: int) -> list[str]:
    """Draw directions, each at a right angle to the one before it. The figure first moves left."""
    rng = random.Random(seed)
    return [rng.choice(("up", "down") if number % 2 == 0 else _ACROSS) for number in range(presses)]


async def _press(page: Any, direction: str) -> Press:
    # No fixed phase between presses and chunks.
    await asyncio.sleep(PAUSE_S * (1 + random.random()))
    await page.keyboard.press(KEYS[direction])
    await asyncio.sleep(AFTER_S)
    deadline_s = asyncio.get_running_loop().time() + ANSWER_S
    while not await page.evaluate(ANSWERED, [direction, ANSWER_FRAMES]):
        if asyncio.get_running_loop().time() > deadline_s:
            break
        await asyncio.sleep(PAUSE_S)
    return read(direction, await page.evaluate(TAKE))


def read(direction: str, found: dict[str, Any]) -> Press:
    """Return the press that `TAKE` has found."""
    pressed_s = None if found["pressed"] is None else found["pressed"] / 1000
    accepted, applied, chunk = found.get("accepted"), found.get("applied"), found.get("chunk")
    # Those of an earlier press are no answer to this one.
    if accepted is not None and accepted.get("value") != direction:
        accepted = None
    if accepted is None or applied is None or applied.get("control_id") != accepted.get("control_id"):
        chunk = None
    published_s = None if chunk is None else _unix_s(chunk["published_at"])
    return Press(
        direction,
        pressed_s,
        None if accepted is None else _unix_s(accepted["at"]),
        None if published_s is None or chunk is None else published_s - chunk["compute_s"],
        published_s,
        None if chunk is None else chunk["received"] / 1000,
        () if pressed_s is None else tuple(_frames(found["frames"], pressed_s)),
    )


def _frames(captured: Sequence[tuple[float, str]], pressed_s: float) -> list[Frame]:
    frames = []
    for shown_ms, text in captured:
        if shown_ms / 1000 >= pressed_s - BEFORE_S:
            pixels = np.frombuffer(base64.b64decode(text), dtype=np.uint8).reshape(PIXELS, PIXELS, 3)
            frames.append(Frame(shown_ms / 1000, pixels))
    return frames


def _unix_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


async def _until(page: Any, condition: str) -> None:
    # Playwright's own wait evaluates strings inside the page, which the page's policy forbids.
    deadline_s = asyncio.get_running_loop().time() + LIMIT_S
    while not await page.evaluate(condition):
        if asyncio.get_running_loop().time() > deadline_s:
            raise BenchError(f"the page shows no video within {LIMIT_S:.0f} s")
        await asyncio.sleep(0.1)
