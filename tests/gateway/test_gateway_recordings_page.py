"""Recordings on the player page in a real Chromium, with a recorder: record, replay, download, delete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import av
import httpx
import pytest

from tests.gateway.test_gateway_player_page import OVERFLOWS, SIZES, begin
from tests.helpers.browser import NEEDS_CHROMIUM, focus_is, serious_violations, until
from tests.helpers.pool_harness import Pool

pytestmark = NEEDS_CHROMIUM

KEY = "key-of-the-recordings-page-0123456789"
VIDEO = "document.querySelector('#replay video')"
REPLACED = "shown => document.querySelector('#recordings li').innerText !== shown"
AT_REPLAY = "() => document.activeElement.dataset.focus?.startsWith('Replay')"
"""The keyboard is at the button of a row."""
SOME_SECONDS = re.compile(r"\d:(?:0[2-9]|[1-5]\d).*recording now")
"""The page looks every three seconds. A busy machine may look first when there are more than ten."""
SHOWS = f"() => {VIDEO}.currentTime > 0 && {VIDEO}.videoWidth > 0"


async def test_a_session_is_recorded_replayed_downloaded_and_deleted(
    recorder: Path, gateway_url: str, page: Any, tmp_path: Path
) -> None:
    await page.goto(gateway_url)
    await begin(page, "a green square moving up")
    # With the keyboard alone, which stays at the button.
    await page.locator("#record").focus()
    await page.keyboard.press("Enter")
    await page.locator("#record[aria-pressed=true]", has_text="Stop recording").wait_for()
    await focus_is(page, "record")
    # Without a session, the page lists what other tests recorded as well.
    row = page.locator("#recordings li", has_text="a green square moving up")
    await row.filter(has_text=SOME_SECONDS).wait_for()
    # What is stored so far plays while the recording runs.
    shown = await row.inner_text()
    await row.get_by_role("button", name="Replay").click()
    await until(page, SHOWS)
    # The row is drawn again meanwhile.
    await until(page, REPLACED, shown)
    await page.keyboard.press("Escape")
    await page.locator("#replay").wait_for(state="hidden")
    await until(page, AT_REPLAY)
    await page.locator("#record").focus()
    await page.keyboard.press("Enter")
    await page.locator("#record[aria-pressed=false]", has_text="Record").wait_for()
    await row.filter(has_not_text="recording now").filter(has_not_text="being stored").wait_for()

    # The session has ended, and the list has its recording on the empty page as well.
    await page.locator("#end").click()
    await page.locator("#phase", has_text="terminated").wait_for()
    await page.locator("#record").wait_for(state="hidden")
    await page.locator("#new").click()
    await row.wait_for()
    await row.get_by_role("button", name="Replay").focus()
    await page.keyboard.press("Enter")
    await until(page, SHOWS)
    length_s = float(await page.evaluate(f"{VIDEO}.duration"))
    assert length_s > 2
    await page.evaluate(f"{VIDEO}.currentTime = {length_s - 0.5}")
    await until(page, f"() => {VIDEO}.ended")
    assert await page.locator("#replay .message").is_hidden()
    for width, height in SIZES.values():
        await page.set_viewport_size({"width": width, "height": height})
        assert await page.evaluate(OVERFLOWS) <= 0
        dialog = await page.locator("#replay").bounding_box()
        assert dialog["width"] <= width
        # Nothing of it is hidden: it need not be scrolled.
        close = await page.locator("#replay").get_by_role("button", name="Close").bounding_box()
        assert close["y"] + close["height"] <= dialog["y"] + dialog["height"]
    assert await serious_violations(page, "light") == []
    await page.get_by_role("button", name="Close").click()
    # The keyboard is back at the row.
    await until(page, AT_REPLAY)
    for width, height in SIZES.values():
        await page.set_viewport_size({"width": width, "height": height})
        assert await page.evaluate(OVERFLOWS) <= 0
    assert await serious_violations(page, "light") == []

    async with page.expect_download() as downloaded:
        await row.get_by_role("button", name="Download").click()
    file = await downloaded.value
    assert re.fullmatch(r"rec_\w+\.mp4", file.suggested_filename)
    await file.save_as(tmp_path / "recording.mp4")
    with av.open(str(tmp_path / "recording.mp4")) as container:
        times = [float(frame.time or 0.0) for frame in container.decode(video=0)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(length_s, abs=0.2)

    # What a refused key has listed cannot be played any more. With another key it can.
    refusal = {"code": "unauthorized", "status": 401}
    await page.route("**/v1/sessions?*", lambda route: route.fulfill(status=401, json=refusal))
    await page.get_by_label("API key").wait_for()
    await page.locator("#recordings").wait_for(state="hidden")
    await page.unroute("**/v1/sessions?*")
    await page.get_by_label("API key").fill("any-key-of-a-gateway-without-keys")
    await page.keyboard.press("Enter")
    for answer, state in (("Cancel", "visible"), ("Delete it", "detached")):
        await row.get_by_role("button", name="Delete").click()
        await page.locator("#delete-recording").get_by_role("button", name=answer).click()
        await row.wait_for(state=state)

    failed = {"id": "rec_f", "session": "ses_f", "prompt": "a fall", "state": "complete", "parts": 1}
    failed |= {"duration_s": 3.0, "bytes": 9, "missing_chunks": 0}
    failed |= {"session_failed": True, "reason": "the model gave up"}
    listed = {"recordings": [failed], "next": None}
    await page.route("**/v1/recordings?*", lambda route: route.fulfill(json=listed))
    row = page.locator("#recordings li", has_text="a fall")
    await row.filter(has_text="the session failed: the model gave up").wait_for()


async def test_holders_of_a_link_replay_and_a_controller_records(
    recorder: Path, pool: Pool, page: Any
) -> None:
    url = pool.gateway("page_recordings", TURBOSERVE_API_KEYS=f"{KEY}=page", DRAWN_KEY=KEY)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as api:
        session = (await api.post("/v1/sessions", json={"prompt": "a red circle", "record": True})).json()
        own = session["links"]["self"]
        links = {
            role: (await api.post(f"{own}/links", json={"role": role})).json()
            for role in ("viewer", "controller")
        }
        await page.goto(f"{url}{links['viewer']['url']}")
        row = page.locator("#recordings li")
        await row.filter(has_text=SOME_SECONDS).wait_for()
        for hidden in (page.locator("#record"), row.get_by_role("button", name="Delete")):
            assert not await hidden.is_visible()
        await row.get_by_role("button", name="Replay").click()
        await until(page, SHOWS)
        await page.keyboard.press("Escape")
        # With a key or link, the page fetches the file, since an address has neither.
        async with page.expect_download() as downloaded:
            await row.get_by_role("button", name="Download").click()
        assert (await downloaded.value).suggested_filename == f"{session['recording']}.mp4"
        # What a revoked link has listed cannot be played any more.
        await api.delete(f"{own}/links/{links['viewer']['id']}")
        await page.locator("#recordings").wait_for(state="hidden")
        await page.goto(f"{url}{links['controller']['url']}")
        await page.locator("body[data-role=controller]").wait_for()
        await page.locator("#record[aria-pressed=true]").click()
        await page.locator("#record[aria-pressed=false]").wait_for()
        assert (await api.get(own)).json()["recording"] is None
        await api.delete(own)
    pool.stop("page_recordings")
