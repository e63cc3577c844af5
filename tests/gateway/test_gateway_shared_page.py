"""The page of a shared session in a real Chromium: a viewer watches, and has no controls."""

from __future__ import annotations

import re
from typing import Any

import httpx

from tests.gateway.test_gateway_player_page import begin
from tests.helpers.browser import NEEDS_CHROMIUM
from tests.helpers.pool_harness import Pool

pytestmark = NEEDS_CHROMIUM

KEY = "key-of-the-shared-page-0123456789"
CONTROLS = (
    "#form",
    "#pause",
    "#share",
    "#end",
    "#new",
    "#lead",
    "#sessions",
    "#migration",
    "#elsewhere",
    "a[href=pool]",
)


async def test_a_viewer_link_of_the_page_watches_until_it_is_revoked(pool: Pool, page: Any) -> None:
    url = pool.gateway("page_shared", TURBOSERVE_API_KEYS=f"{KEY}=page", DRAWN_KEY=KEY)
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url))
    page.on("websocket", lambda socket: sent.append(socket.url))
    await page.goto(url)
    await page.get_by_label("API key").fill(KEY)
    await page.keyboard.press("Enter")
    await page.locator("#chips").wait_for()
    session = await begin(page)
    # A ticket opens the stream, and no key stands in an address.
    assert any("/stream?" in address and "ticket=tst_" in address for address in sent)
    assert not any(KEY in address for address in sent)
    await page.get_by_role("button", name="Share", exact=True).click()
    await page.locator("#share-dialog[open]").wait_for()
    link = await page.get_by_label("Link", exact=True).input_value()
    assert re.fullmatch(rf"{url}/?#session={session}&link=tsl_[\w.-]+", link), link

    viewer = await page.context.new_page()
    kept = await page.evaluate("JSON.stringify(localStorage)")
    asked: list[str] = []
    viewer.on("request", lambda request: asked.append(request.url))
    await viewer.goto(link)
    await viewer.locator("body[data-mode=live][data-role=viewer]").wait_for()
    for name in CONTROLS:
        assert not await viewer.locator(name).is_visible(), name
    assert await viewer.locator("#events").is_visible()
    # The link stays in the address for a reload, and goes to no server.
    assert viewer.url == link
    assert not any("tsl_" in address for address in asked)
    assert await viewer.evaluate("sessionStorage.length") == 0
    assert await viewer.evaluate("JSON.stringify(localStorage)") == kept
    await viewer.reload()
    await viewer.locator("body[data-mode=live]").wait_for()

    # A controller's link has the prompt, and neither the list of sessions nor the end.
    async with httpx.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120
    ) as api:
        made = (await api.post(f"/v1/sessions/{session}/links", json={"role": "controller"})).json()
        # Only the part after # differs: the page loads again by itself.
        await viewer.goto(f"{url}{made['url']}")
        await viewer.locator("body[data-role=controller]").wait_for()
        await viewer.locator("#prompt").fill("a blue square moving right")
        await viewer.get_by_role("button", name="Change", exact=True).click()
        await viewer.locator("#on-screen", has_text="a blue square").wait_for()
        for name in ("#share", "#end", "#new", "#sessions", "#migration", "#elsewhere"):
            assert not await viewer.locator(name).is_visible(), name
        await viewer.goto(link)
        await viewer.locator("body[data-mode=live][data-role=viewer]").wait_for()
    frame = await page.context.new_page()
    await frame.goto(f"{url}/embed/{session}#link={link.split('link=')[1]}")
    await frame.locator("#state").wait_for(state="hidden")
    await page.bring_to_front()
    await page.get_by_role("button", name="Revoke", exact=True).click()
    await page.locator("[data-part=state]", has_text="Revoked").wait_for()
    await viewer.locator("#veil-text", has_text="was revoked").wait_for()
    # Incident: the video that the frame still had to play took the reason away.
    why = frame.locator("#state.final", has_text="was revoked")
    await why.wait_for()
    await frame.evaluate("document.getElementById('player').dispatchEvent(new CustomEvent('playback'))")
    assert await why.is_visible()
    await frame.close()
    await viewer.close()
    await page.get_by_role("button", name="Close", exact=True).click()
    await page.get_by_role("button", name="End session").click()
    pool.stop("page_shared")
