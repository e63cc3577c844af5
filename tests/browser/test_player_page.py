"""The player page in a real Chromium, with a real stack: a user's first minute."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from tests.helpers.browser import NEEDS_CHROMIUM, WAIT_MS, until
from turboserve.cli.stack.background import BackgroundStack

# Share of the video's pixels that are clearly red, and clearly blue, in the current frame.
COLOURS = """
() => {
  const video = document.getElementById("video");
  if (!video.videoWidth) return {red: 0, blue: 0};
  const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
  const pen = canvas.getContext("2d");
  pen.drawImage(video, 0, 0);
  const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
  let red = 0, blue = 0;
  for (let n = 0; n < data.length; n += 4) {
    const [r, g, b] = [data[n], data[n + 1], data[n + 2]];
    if (r > 140 && g < 100 && b < 100) red += 1;
    if (b > 140 && r < 110 && g < 150) blue += 1;
  }
  return {red: red / (data.length / 4), blue: blue / (data.length / 4)};
}
"""
ENOUGH = 0.02
SEES = f"(colour) => (({COLOURS})())[colour] > {ENOUGH}"

pytestmark = NEEDS_CHROMIUM


async def playhead(page: Any) -> float:
    return float(await page.evaluate("document.getElementById('video').currentTime"))


async def plays_on(page: Any, beyond_s: float) -> None:
    """Wait until playback has passed `beyond_s` seconds of media."""
    await until(page, "(s) => document.getElementById('video').currentTime > s", arg=beyond_s)


async def migrate(page: Any) -> None:
    """Press "Migrate" until the session migrates: the row may just have changed."""
    button = page.get_by_role("button", name="Migrate", exact=True)
    begun = page.get_by_text("Migrating to another worker")
    async with asyncio.timeout(WAIT_MS / 1000):
        while not await begun.count():
            if await button.is_enabled():
                await button.click()
            for _ in range(100):
                if await begun.count():
                    break
                await asyncio.sleep(0.1)


async def test_prompt_switch_pause_resume_reload(stack: BackgroundStack, page: Any) -> None:
    # The other tests save the processor time of animations.
    await page.emulate_media(reduced_motion="no-preference")
    await page.goto(stack.url)
    await page.get_by_label("What should the video show?").fill("a red circle moving left")
    await page.get_by_role("button", name="Start").click()
    await until(page, SEES, arg="red")
    colours = await page.evaluate(COLOURS)
    assert colours["blue"] < ENOUGH
    assert re.fullmatch(r"\d+\.\d\d s", await page.locator("#r-first").text_content())
    session = (await page.evaluate("location.hash")).removeprefix("#")
    assert session

    await page.get_by_label("What should it show now?").fill("a blue square moving up")
    await page.get_by_role("button", name="Change").click()
    applied = page.get_by_text(re.compile(r"applied at chunk \d+")).first
    await applied.wait_for()
    await until(page, SEES, arg="blue")
    # The last frames of the red circle may still appear beside the first of the square, and then end.
    await until(page, f"() => (({COLOURS})()).red < {ENOUGH}")
    # The event states when the prompt was on screen, beside when it was applied.
    await page.get_by_text(re.compile(r"on screen \d+\.\d s after it was sent")).first.wait_for()
    await page.locator("#on-screen", has_text="On screen: “a blue square moving up”").wait_for()

    await page.get_by_role("button", name="Pause").click()
    await until(page, "document.body.dataset.mode === 'paused'")
    await page.locator("#phase", has_text="paused").wait_for()
    stopped_s = await playhead(page)
    await page.wait_for_timeout(1_500)
    assert await playhead(page) == stopped_s

    await page.locator("#pause", has_text="Resume").click()
    await plays_on(page, stopped_s + 2)
    before_s = await playhead(page)

    await page.reload()
    await until(page, "document.body.dataset.mode === 'live'")
    assert (await page.evaluate("location.hash")).removeprefix("#") == session
    await plays_on(page, before_s + 1)
    await until(page, SEES, arg="blue")
    # The history is back, and the session was the same all the time.
    await page.get_by_text(re.compile(r"applied at chunk \d+")).first.wait_for()
    await page.get_by_role("button", name="End session").click()
    await page.locator("#phase", has_text="terminated").wait_for()


async def test_a_prompt_that_drops_the_buffer_is_shown_at_once(stack: BackgroundStack, page: Any) -> None:
    # A browser without WebRTC plays from a buffer at the shortest lead, too.
    await page.add_init_script("delete globalThis.RTCPeerConnection")
    await page.goto(stack.url)
    await page.get_by_label("What should the video show?").fill("a red circle moving left")
    await page.get_by_role("button", name="Start").click()
    await until(page, SEES, arg="red")
    # The page shows how urgent its session is.
    await until(page, "document.getElementById('r-tier').textContent !== '–'")
    assert re.fullmatch(r"-?\d+\.\d\d s", await page.locator("#r-slack").text_content())

    await page.get_by_label("What should it show now?").fill("a blue square moving up")
    await page.get_by_label("Instant").check()
    await page.get_by_role("button", name="Change").click()
    await until(page, "document.body.dataset.skipped !== undefined")
    skipped = int(await page.evaluate("document.body.dataset.skipped"))
    # Chunk n starts at 0.75 n - 0.1875 s. The page seeks there, and shows nothing of before.
    start_s = 0.75 * skipped - 0.1875
    await plays_on(page, start_s)
    await until(page, SEES, arg="blue")
    first_s = await page.evaluate("document.getElementById('video').buffered.start(0)")
    assert first_s >= start_s - 0.1
    await plays_on(page, start_s + 2)
    await page.get_by_role("button", name="End session").click()
    await page.locator("#phase", has_text="terminated").wait_for()


async def test_a_prompt_without_words_is_refused_in_plain_words(stack: BackgroundStack, page: Any) -> None:
    await page.goto(stack.url)
    await page.get_by_role("button", name="Start").click()
    await page.get_by_role("alert").filter(has_text="The prompt is empty").wait_for()


async def test_it_fits_a_phone_and_a_broken_address_harms_nothing(stack: BackgroundStack, page: Any) -> None:
    await page.set_viewport_size({"width": 320, "height": 640})
    await page.goto(f"{stack.url}#%zz")
    await page.get_by_label("What should the video show?").fill("a red circle " + "W" * 80)
    await page.get_by_role("button", name="Start").click()
    await page.get_by_text("Placed on a worker").first.wait_for()
    fits = "() => [document.documentElement, %s].every(e => e.scrollWidth <= e.clientWidth)"
    assert await page.evaluate(fits % "...document.querySelectorAll('#events li')")
    await page.get_by_role("button", name="End session").click()
    await page.locator("#phase", has_text="terminated").wait_for()


async def test_an_operator_migrates_the_session_and_it_plays_on(stack: BackgroundStack, page: Any) -> None:
    await page.goto(stack.url)
    await page.get_by_label("What should the video show?").fill("a red circle moving left")
    await page.get_by_role("button", name="Start").click()
    await until(page, SEES, arg="red")
    before = await page.evaluate("document.body.dataset.worker")
    # A chunk names its worker, and so does the event of the placement. Either may come first.
    await until(page, "(worker) => document.getElementById('r-worker').textContent === worker", arg=before)
    await page.get_by_label("Migrate to").wait_for()
    places = await page.locator("#migration-target option").all_inner_texts()
    assert places[0] == "the best worker"
    assert len(places) == 2
    assert before not in places[1]
    await migrate(page)
    await page.get_by_text("Migrated to another worker").first.wait_for()
    # The new worker may be slow. Then the session migrates back, perhaps before the page is read again.
    other = "(before) => document.body.dataset.worker !== before && document.body.dataset.worker"
    assert await until(page, other, arg=before) in places[1]
    # Each message of the stream has a worker. An earlier one may still be on its way.
    await until(
        page, "() => document.getElementById('r-worker').textContent === document.body.dataset.worker"
    )
    await plays_on(page, await playhead(page) + 2)
    await page.get_by_role("button", name="End session").click()
    await page.locator("#phase", has_text="terminated").wait_for()
    await page.locator("#migration").wait_for(state="hidden")
