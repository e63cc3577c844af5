"""The pad that steers a figure, on the player page in a real Chromium."""

from __future__ import annotations

from typing import Any

from tests.gateway.test_gateway_player_page import begin
from tests.helpers.browser import NEEDS_CHROMIUM, until

pytestmark = NEEDS_CHROMIUM

PRESSED = """[...document.querySelectorAll('#steer .pad [aria-pressed=true]')]
    .map((each) => each.ariaLabel).join()"""
IS_PRESSED = f"(wanted) => ({PRESSED}) === wanted"


async def test_buttons_and_keys_steer(gateway_url: str, page: Any, api: Any) -> None:
    await page.goto(gateway_url)
    assert await page.locator("#steer").is_hidden()
    session = await begin(page)
    pad = page.get_by_role("group", name="Steer")
    await pad.wait_for()
    names = await pad.get_by_role("button").evaluate_all("all => all.map((each) => each.ariaLabel)")
    rows = (
        ["Up and left", "Up", "Up and right"],
        ["Left", "Stop", "Right"],
        ["Down and left", "Down", "Down and right"],
    )
    assert names == [name for row in rows for name in row], "in the order of the grid"
    await pad.get_by_role("button", name="Left", exact=True).click()
    await page.locator("body[data-steered=left]").wait_for()
    # The event that the value was accepted may come after its first frame.
    await until(page, IS_PRESSED, "Left")
    assert "Left" in await page.locator("#steer [role=status]").inner_text()
    assert (await api.get(f"/v1/sessions/{session}")).json()["controls"] == {"steer": "left"}

    # In the prompt's field, keys write and move the caret.
    await page.locator("#prompt").focus()
    await page.keyboard.press("ArrowUp")
    await page.keyboard.type("wasd")
    assert (await page.locator("#prompt").input_value()).count("wasd") == 1
    assert await page.evaluate(PRESSED) == "Left"

    await page.evaluate("document.activeElement.blur()")
    await page.keyboard.press("ArrowDown")
    await page.locator("body[data-steered=down]").wait_for()
    await page.keyboard.press("d")
    await page.locator("body[data-steered=right]").wait_for()
    await page.keyboard.press("x")
    await page.locator("body[data-steered=stop]").wait_for()
    # Two keys at once are a diagonal.
    for key in ("ArrowDown", "ArrowRight"):
        await page.keyboard.down(key)
    await page.locator("body[data-steered=down-right]").wait_for()
    for key in ("ArrowDown", "ArrowRight"):
        await page.keyboard.up(key)

    # With the keyboard alone: the button keeps the focus.
    await pad.get_by_role("button", name="Up", exact=True).focus()
    await page.keyboard.press("Enter")
    await page.locator("body[data-steered=up]").wait_for()
    assert await page.evaluate("document.activeElement.ariaLabel") == "Up"

    await page.get_by_role("button", name="As the prompt says").click()
    await page.locator("body[data-steered='']").wait_for()
    await until(page, IS_PRESSED, "")
    await page.get_by_role("button", name="End session").click()
    await page.locator("#steer").wait_for(state="hidden")


async def test_a_model_without_the_control_has_no_pad(gateway_url: str, page: Any) -> None:
    async def without(route: Any) -> None:
        answer = await route.fetch()
        body = await answer.json()
        for model in body["models"]:
            model["controls"] = []
        await route.fulfill(response=answer, json=body)

    await page.route("**/v1/models", without)
    await page.goto(gateway_url)
    await begin(page)
    assert await page.locator("#steer").is_hidden()
