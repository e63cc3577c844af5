"""The choice of a model on the player page, in a real Chromium."""

from __future__ import annotations

from typing import Any

import httpx

from tests.gateway.test_gateway_models import Serve, model, serve
from tests.gateway.test_gateway_player_page import begin
from tests.helpers.browser import NEEDS_CHROMIUM

pytestmark = NEEDS_CHROMIUM
__all__ = ["model", "serve"]


async def test_the_page_offers_a_choice_where_there_is_one(
    gateway_url: str, page: Any, api: httpx.AsyncClient, serve: Serve, model: str
) -> None:
    await serve(model)
    await serve(f"{model}_96x96")
    await page.goto(gateway_url)
    choice = page.get_by_label("Model")
    await choice.wait_for()
    assert await choice.input_value() == "toyworld, 64 × 64", "sessions get the gateway's model unless asked"
    assert await page.locator("#chips button").count() > 0
    await choice.select_option(f"{model}, 96 × 96")
    await page.locator("#chips").wait_for(state="hidden")
    async with page.expect_response(lambda answer: answer.url.endswith("/v1/workers")) as listed:
        session = await begin(page, "anything at all")
    # The other worker of the model has frames of another size, so the session cannot migrate to it.
    workers = (await (await listed.value).json())["workers"]
    assert sum(worker["model"] == model for worker in workers) == 2
    assert await page.locator("#migration").count() == 1
    assert await page.locator("#migration").is_hidden()
    assert await choice.is_hidden(), "a session keeps its model"
    row = (await api.get(f"/v1/sessions/{session}")).json()
    assert (row["model"], row["width"], row["height"]) == (model, 96, 96)
    await page.get_by_role("button", name="End session").click()
    await choice.wait_for()
    assert await choice.input_value() == f"{model}, 96 × 96"
