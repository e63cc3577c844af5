"""The player page in a real Chromium, with a gateway whose worker draws: faults that its users met."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import FailSessionOf, StartSession
from tests.helpers.browser import NEEDS_CHROMIUM, focus_checked, focus_is, serious_violations, until
from tests.helpers.pool_harness import Pool
from tests.helpers.waiting import eventually
from turboserve.gateway.auth import key_file

pytestmark = NEEDS_CHROMIUM

PROMPT = "What should the video show?"
OVERFLOWS = "document.documentElement.scrollWidth - innerWidth"
SAW_PAUSE = "window.sawPause ||= (document.getElementById('pause')?.getClientRects().length ?? 0) > 0"
ALL = "{subtree: true, childList: true, attributes: true}"
SIZES = {"desktop": (1280, 800), "phone": (390, 844), "landscape": (844, 390)}


@dataclass(frozen=True)
class KeyedGateway:
    """A gateway that needs a key of a file."""

    url: str
    file: Path
    id: str
    key: str


@pytest.fixture
def keyed(pool: Pool, tmp_path: Path) -> Iterator[KeyedGateway]:
    file = tmp_path / "keys.json"
    stored, key = key_file.add(file, "page")
    url = pool.gateway("page_keyed", TURBOSERVE_API_KEYS_FILE=str(file), DRAWN_KEY=key)
    yield KeyedGateway(url, file, stored.id, key)
    pool.stop("page_keyed")


async def begin(page: Any, prompt: str = "a red circle moving left") -> str:
    """Start a session on the open page, wait for its video, and return its id."""
    await page.get_by_label(PROMPT).fill(prompt)
    await page.get_by_role("button", name="Start", exact=True).click()
    await page.locator("body[data-mode=live]").wait_for()
    return str(await page.evaluate("location.hash")).removeprefix("#")


async def test_chips_compose_a_prompt_and_unknown_words_are_named(gateway_url: str, page: Any) -> None:
    # As while the workers start.
    await page.route("**/v1/models*", lambda route: route.fulfill(json={"models": []}))
    await page.goto(gateway_url)
    await page.locator("#veil-text", has_text="No worker is ready yet").wait_for()
    await page.unroute("**/v1/models*")
    await page.locator("#veil-text", has_text="Say what you want to see").wait_for()
    field = page.get_by_label(PROMPT)
    await page.get_by_role("button", name="orange", exact=True).click()
    assert await field.input_value() == "an orange circle"
    await page.get_by_role("button", name="square", exact=True).click()
    await page.get_by_role("button", name="moving left", exact=True).click()
    await page.get_by_role("group", name="scene").get_by_role("button", name="the sea").click()
    assert await field.input_value() == "an orange square moving left over the sea"
    chosen = await page.locator(".chip[aria-pressed=true]").all_inner_texts()
    assert chosen == ["orange", "square", "left", "sea"]
    assert await page.locator("#hint").is_hidden()
    await field.fill("a red circle wearing a hat")
    await page.locator("#hint", has_text="does not know “wearing” and “hat”").wait_for()
    await field.fill(f"a red {'x' * 900}")
    await page.locator("#hint", has_text=f"does not know “{'x' * 30}…” and").wait_for()
    # The pattern has one figure: a chip changes the first one, and never removes the second.
    await field.fill("a red circle and a blue square")
    for chip in ("orange", "orange", "moving left"):
        await page.get_by_role("button", name=chip, exact=True).click()
        assert await field.input_value() == "an orange circle and a blue square"
    await field.fill("a white square")
    await page.locator("#hint", has_text="A white figure is shown in yellow").wait_for()


async def test_a_message_is_where_the_eye_is(gateway_url: str, page: Any) -> None:
    """Incident: on a phone, both messages were below the first screen."""
    width, height = SIZES["phone"]
    await page.set_viewport_size({"width": width, "height": height})
    await page.goto(f"{gateway_url}/#ses_never")
    why = page.locator("#veil-text", has_text="This session does not exist (any more). Start a new one.")
    assert await is_inside(why, height)
    await page.locator("#chips").wait_for()
    await page.get_by_label(PROMPT).fill(f"a red {'x' * 3000}")
    await page.get_by_role("button", name="Start", exact=True).click()
    refusal = page.locator("#message", has_text="at most 2,000 characters")
    assert await is_inside(refusal, height)
    above = await refusal.bounding_box()
    assert above["y"] + above["height"] <= (await page.locator("#chips").bounding_box())["y"]
    # A frame of another page has no way to start one.
    await page.goto(f"{gateway_url}/embed/ses_never")
    await page.locator(
        "#state", has_text=re.compile(r"^This session does not exist \(any more\)\.$")
    ).wait_for()
    words = "async (problem) => (await import('/page/words.js')).inWords(problem)"
    full = {"code": "no_capacity", "retryAfterS": 300}
    assert await page.evaluate(words, full) == "All places are taken at the moment. Try again in 5 minutes."
    revoked = {"code": "unknown", "status": 401, "detail": "the gateway closed the stream", "hadKey": True}
    assert "does not accept this API key" in await page.evaluate(words, revoked)


async def is_inside(text: Any, height: int) -> bool:
    """Wait until the text is on the page. Return whether it is in the window, which has this height."""
    await text.wait_for()
    box = await text.bounding_box()
    return bool(box["y"] >= 0 and box["y"] + box["height"] <= height)


async def test_a_picture_without_a_figure_has_its_reason_on_it(gateway_url: str, page: Any) -> None:
    await page.goto(gateway_url)
    await page.locator("#chips").wait_for()
    await page.get_by_label(PROMPT).fill("a cat playing piano")
    start = page.get_by_role("button", name="Start", exact=True)
    await start.click()
    # It is asked again before it is sent.
    await page.locator("#hint", has_text="It finds nothing to draw").wait_for()
    await page.locator("#hint", has_text="Send it again").wait_for()
    assert await page.evaluate("document.body.dataset.mode") == "empty"
    await start.click()
    await page.locator("#nothing", has_text="Nothing to draw").wait_for()
    await page.get_by_label("What should it show now?").fill("a red circle")
    await page.get_by_role("button", name="Change").click()
    await page.locator("#on-screen", has_text="a red circle").wait_for()
    assert await page.locator("#nothing").is_hidden()
    await page.get_by_role("button", name="End session").click()


async def test_a_session_has_the_lead_that_is_selected(gateway_url: str, page: Any, api: Any) -> None:
    await page.goto(gateway_url)
    await page.get_by_label("Safe").check()
    session = await begin(page)
    assert (await api.get(f"/v1/sessions/{session}")).json()["max_lead_s"] is None
    async with page.expect_response(lambda answer: answer.request.method == "PATCH"):
        await page.get_by_label("Instant").check()
    assert (await api.get(f"/v1/sessions/{session}")).json()["max_lead_s"] == 0.75
    await page.locator("#events", has_text="Limits or recording changed").wait_for()
    await page.get_by_role("button", name="End session").click()


async def test_a_new_session_ends_the_old_one_or_keeps_it_in_the_list(
    gateway_url: str, page: Any, api: Any, start: StartSession
) -> None:
    await page.goto(gateway_url)
    first = await begin(page)
    await page.get_by_role("button", name="New session").click()
    await page.get_by_role("button", name="Cancel").click()
    assert await page.evaluate("location.hash") == f"#{first}"
    await page.get_by_role("button", name="New session").click()
    await page.get_by_role("button", name="Keep it").click()
    await page.locator("body[data-mode=empty]").wait_for()
    await focus_is(page, "prompt")
    kept = page.locator("#sessions li", has_text="a red circle moving left").first
    await kept.wait_for()
    # A session that is suspended is in the list as well, and both can be opened.
    paused = (await start(prompt="a blue square moving up"))["id"]
    assert (await api.post(f"/v1/sessions/{paused}/pause")).status_code == 202
    await page.get_by_role("button", name="Open: a blue square moving up").click()
    await page.locator("#phase", has_text="paused").wait_for()
    await page.locator("#lead [value=safe]:checked").wait_for(state="attached")
    await page.get_by_role("button", name="Open: a red circle moving left").first.click()
    await page.locator("body[data-mode=live]").wait_for()
    await page.locator("#lead [value=balanced]:checked").wait_for(state="attached")
    # An answer for a session that the page has left does not change the next one.
    assert (await api.post(f"/v1/sessions/{paused}/resume")).status_code == 202
    left = asyncio.Event()

    async def answer_late(route: Any) -> None:
        answer = await route.fetch()
        await left.wait()
        await route.fulfill(response=answer)

    await page.route("**/pause", answer_late)
    await page.locator("#pause").click()
    await page.get_by_role("button", name="Open: a blue square moving up").click()
    await page.locator("body[data-mode=live]").wait_for()
    left.set()
    await page.locator("#pause[aria-disabled=false]").wait_for()
    assert await page.evaluate("document.body.dataset.mode") == "live"
    await page.get_by_role("button", name="Open: a red circle moving left").first.click()
    await page.locator("#phase", has_text="paused").wait_for()
    assert await page.evaluate("location.hash") == f"#{first}"
    await page.get_by_role("button", name="New session").click()
    await page.get_by_role("button", name="End it").click()
    await page.locator("body[data-mode=empty]").wait_for()
    assert (await api.get(f"/v1/sessions/{first}")).json()["phase"] == "terminated"
    await page.get_by_role("button", name="End: a blue square moving up").click()
    await page.locator("#sessions li", has_text="a blue square").wait_for(state="detached")
    assert (await api.get(f"/v1/sessions/{paused}")).json()["phase"] == "terminated"


async def test_the_link_of_an_ended_session_replays_it_again_and_again(
    gateway_url: str, page: Any, api: Any, start: StartSession
) -> None:
    """Incidents: a reload showed nothing; Pause and End were there until the gateway had answered."""
    await page.add_init_script(f"new MutationObserver(() => {{ {SAW_PAUSE} }}).observe(document, {ALL});")
    session = (await start())["id"]

    async def made() -> bool:
        return bool((await api.get(f"/v1/sessions/{session}")).json()["next_chunk"] >= 3)

    await eventually(made)
    await api.delete(f"/v1/sessions/{session}")
    await page.goto(f"{gateway_url}/#{session}")
    for reloaded in (False, True):
        if reloaded:
            await page.reload()
        await page.locator("#phase", has_text="terminated").wait_for()
        await until(page, "() => document.getElementById('video').currentTime > 0")
        assert await page.evaluate("document.getElementById('video').buffered.start(0)") == 0
        assert await page.evaluate("location.hash") == f"#{session}"
        assert not await page.evaluate("window.sawPause")
    # The bare address does not.
    await page.goto("about:blank")
    await page.goto(gateway_url)
    await page.locator("#chips").wait_for()
    assert await page.evaluate("document.body.dataset.mode") == "empty"


async def test_a_failed_session_says_why_wherever_it_is_shown(
    gateway_url: str, page: Any, start: StartSession, fail: FailSessionOf
) -> None:
    """Incidents: a failed session left the list without a word, and the page of a frame said it had ended."""
    await page.goto(gateway_url)
    mine = await begin(page)
    frame = await page.context.new_page()
    await frame.goto(f"{gateway_url}/embed/{mine}")
    await frame.locator("#state").wait_for(state="hidden")
    await page.bring_to_front()
    other = (await start(prompt="a yellow square moving up"))["id"]
    row = page.locator("#sessions li", has_text="a yellow square moving up")
    await row.get_by_role("button", name="End").wait_for()
    await fail(other, "out of memory")
    await row.filter(has_text="This session failed: out of memory").wait_for()
    assert await row.get_by_role("button").all_inner_texts() == ["Open"]
    await fail(mine, "poisoned: 3 workers in a row failed with a device error in a step of this session")
    why = "This session failed: its video could not be computed."
    await page.locator("#veil-text", has_text=why).wait_for()
    await page.locator("#events", has_text="poisoned: 3 workers in a row").wait_for()
    await frame.bring_to_front()
    await frame.locator("#state", has_text=why).wait_for()
    await frame.close()


async def test_nothing_is_wider_than_the_window(gateway_url: str, page: Any) -> None:
    await page.goto(gateway_url)
    await page.locator("#chips").wait_for()
    await begin(page)
    for summary in ("Play it elsewhere", "Measurements"):
        await page.get_by_text(summary).click()
    await page.locator("#ffplay").wait_for()
    for size, (width, height) in SIZES.items():
        await page.set_viewport_size({"width": width, "height": height})
        await page.emulate_media(color_scheme="dark" if size == "phone" else "light")
        assert await page.evaluate(OVERFLOWS) <= 0, size
        video = await page.locator("#video").bounding_box()
        prompt = await page.locator("#prompt").bounding_box()
        beside = video["x"] + video["width"] <= prompt["x"]
        assert beside == (size != "phone"), size
        if size == "phone":
            # However far the panel was scrolled, the video is above what changes it.
            pad = page.get_by_role("group", name="Steer")
            for below in (page.locator("#prompt"), pad):
                await below.scroll_into_view_if_needed()
                await below.focus() if below is not pad else await pad.get_by_role("button").first.focus()
                inside = [await each.bounding_box() for each in (page.locator("#video"), below)]
                assert inside[0]["y"] >= 0
                assert inside[0]["y"] + inside[0]["height"] <= inside[1]["y"]
                assert inside[1]["y"] + inside[1]["height"] <= height
            await page.evaluate("scrollTo(0, 0)")
        if size == "landscape":
            assert video["height"] <= height
            # The buttons are beside the panel, however far it was scrolled.
            await page.evaluate("scrollTo(0, 200)")
            assert await is_inside(page.locator("#end"), height)
    await page.get_by_role("button", name="End session").click()


async def test_a_key_opens_the_shared_link_and_leaves_no_trace(keyed: KeyedGateway, page: Any) -> None:
    await page.goto(keyed.url)
    await page.get_by_label("API key").wait_for()
    # Who tries without a key is sent back to its field.
    await page.get_by_label(PROMPT).fill("a red circle")
    await page.keyboard.press("Enter")
    await focus_is(page, "key")
    await page.get_by_label("API key").fill(keyed.key)
    await page.keyboard.press("Enter")
    await page.locator("#chips").wait_for()
    assert keyed.key not in page.url
    assert not await page.locator("#key").is_visible()
    session = await begin(page)
    await page.get_by_text("Play it elsewhere").click()
    await page.locator("#ffplay", has_text="Authorization: Bearer KEY").wait_for()
    # Another visitor opens the link without a key, with a wrong one, then with the right one.
    await page.evaluate("sessionStorage.clear()")
    await page.reload()
    message = page.locator("#key-message")
    await page.get_by_label("API key").wait_for()
    await message.filter(has_text="This server needs an API key").wait_for()
    await focus_is(page, "key")
    await page.get_by_label("API key").fill("wrong-key-of-the-player-page")
    await page.keyboard.press("Enter")
    await message.filter(has_text="does not accept this API key").wait_for()
    await page.get_by_label("API key").fill(keyed.key)
    await page.keyboard.press("Enter")
    await page.locator("#key").wait_for(state="hidden")
    await page.locator("body[data-mode=live]").wait_for()
    assert (await page.evaluate("location.hash")) == f"#{session}"
    assert not await page.locator("#key").is_visible()
    assert await page.locator("#key").input_value() == ""
    # The pool page has the key, in this tab and in another one.
    other = await page.context.new_page()
    await other.goto(f"{keyed.url}/pool")
    # With or without a pool that reports: the server has answered.
    await other.locator("#summary").filter(has_text=re.compile(r"\w")).wait_for()
    assert not await other.get_by_label("API key").is_visible()
    await page.bring_to_front()
    # The key is revoked: the list of sessions stops asking with it, and the page asks for another one.
    asked = []

    async def refuse(route: Any) -> None:
        asked.append(route.request.headers.get("authorization"))
        await route.fulfill(status=401, json={"code": "unauthorized", "status": 401})

    await page.route("**/v1/sessions?*", refuse)
    await message.filter(has_text="does not accept this API key").wait_for()
    assert asked == [f"Bearer {keyed.key}"]
    await page.unroute("**/v1/sessions?*")
    await page.get_by_label("API key").fill(keyed.key)
    await page.keyboard.press("Enter")
    await page.locator("#key").wait_for(state="hidden")
    # The key is revoked while the session plays. It goes on with another key, which is entered in one tab.
    new = key_file.add(keyed.file, "page")[1]
    key_file.revoke(keyed.file, keyed.id)
    await other.locator("#key-message", has_text="does not accept this API key").wait_for()
    await page.locator("#veil-text", has_text="Enter an API key to watch this session.").wait_for()
    await message.filter(has_text="does not accept this API key").wait_for()
    # The list would say that the session plays on this page.
    assert await page.locator("#sessions").is_hidden()
    await page.get_by_label("API key").fill(new)
    await page.keyboard.press("Enter")
    await page.locator("body[data-mode=live]").wait_for()
    await page.locator("#sessions", has_text="on this page").wait_for()
    assert (await page.evaluate("location.hash")) == f"#{session}"
    await other.locator("#key").wait_for(state="hidden")
    await other.close()
    await page.get_by_role("button", name="End session").click()


async def test_the_keyboard_keeps_its_place(gateway_url: str, page: Any) -> None:
    await page.goto(gateway_url)
    await page.locator("#chips").wait_for()
    await page.get_by_label(PROMPT).focus()
    await page.keyboard.type("a red circle moving left")
    await page.keyboard.press("Tab")
    await focus_is(page, "start")
    await page.keyboard.press("Enter")
    await page.locator("body[data-mode=live]").wait_for()
    await focus_is(page, "start")
    await page.locator("#pause").focus()
    await page.keyboard.press("Enter")
    await page.locator("body[data-mode=paused]").wait_for()
    await focus_is(page, "pause")
    await page.locator("#veil-resume").focus()
    await page.keyboard.press("Enter")
    await page.locator("body[data-mode=live]").wait_for()
    await focus_is(page, "pause")
    await page.locator("#end").focus()
    await page.keyboard.press("Enter")
    await page.locator("#phase", has_text="terminated").wait_for()
    await focus_is(page, "new")
    await page.keyboard.press("Enter")
    await focus_is(page, "prompt")


async def test_the_focus_moves_on_when_its_button_goes_away(gateway_url: str, page: Any) -> None:
    """Incident: an example that was started, and the last session of the list, left the focus on the body."""
    # Those of other tests cannot be ended.
    none: dict[str, Any] = {"sessions": [], "next": None}
    await page.route("**/v1/sessions?phase=failed*", lambda route: route.fulfill(json=none))
    await page.goto(gateway_url)
    await page.locator("#examples button").first.focus()
    await page.keyboard.press("Enter")
    await page.locator("body[data-mode=live]").wait_for()
    # The next key press creates no session.
    await focus_is(page, "new")
    pad = page.get_by_role("group", name="Steer").get_by_role("button", name="Up", exact=True)

    async def end_elsewhere() -> None:
        """Let another page end the session, with which the pad goes away."""
        session = str(await page.evaluate("location.hash")).removeprefix("#")
        await page.evaluate("(id) => fetch(`/v1/sessions/${id}`, {method: 'DELETE'})", session)
        await page.locator("#steer").wait_for(state="hidden")

    await pad.focus()
    await end_elsewhere()
    await focus_is(page, "new")
    await page.keyboard.press("Enter")
    await focus_is(page, "prompt")
    await begin(page)
    # A click beside all elements is the user's own, also when the element before goes away later.
    await pad.focus()
    await page.locator("#phase").click()
    await focus_checked(page)
    await focus_is(page, "BODY")
    await end_elsewhere()
    await focus_checked(page)
    await focus_is(page, "BODY")
    await page.get_by_role("button", name="New session").click()
    await focus_is(page, "prompt")
    await begin(page)
    await page.get_by_role("button", name="New session").click()
    await page.get_by_role("button", name="Keep it").click()
    rows = page.locator("#sessions li")
    await rows.first.wait_for()
    while await rows.count():
        left = await rows.count()
        await page.locator("#sessions").get_by_role("button", name="End: ").first.focus()
        await page.keyboard.press("Enter")
        await until(page, f"() => document.querySelectorAll('#sessions li').length < {left}")
    await until(page, "() => document.activeElement !== document.body")


async def test_a_lost_server_is_no_active_session(pool: Pool, page: Any) -> None:
    url = pool.gateway("page_lost")
    await page.goto(url)
    await begin(page)
    await page.locator("#phase", has_text="active").wait_for()
    console = await page.context.new_page()
    await console.goto(f"{url}/pool#/workers?pool=never")
    await console.locator("#view-message", has_text="There is no pool never").wait_for()
    await page.bring_to_front()
    pool.stop("page_lost")
    await page.locator("#phase", has_text="connecting").wait_for()
    await page.locator("#message", has_text="Connection lost").wait_for()
    await page.get_by_role("button", name="New session").click()
    await page.get_by_role("button", name="Keep it").click()
    await page.locator("#phase", has_text="no session").wait_for()
    assert await page.locator("#message").is_hidden()
    # The console says it once.
    await console.locator("#message", has_text="cannot be reached").wait_for()
    await console.locator("#view-message").wait_for(state="hidden")
    await console.close()


async def test_axe_finds_no_serious_violation(gateway_url: str, page: Any) -> None:
    await page.goto(gateway_url)
    await page.locator("#chips").wait_for()
    states = ["empty", "live", "dialog", "pool"]
    for state in states:
        if state == "live":
            await begin(page)
        if state == "dialog":
            await page.get_by_role("button", name="New session").click()
        if state == "pool":
            await page.get_by_role("button", name="End it").click()
            await page.locator("body[data-mode=empty]").wait_for()
            await page.goto(f"{gateway_url}/pool")
            await page.locator("#phase", has_not_text="loading").wait_for()
        assert await serious_violations(page, "light", "dark") == [], state
