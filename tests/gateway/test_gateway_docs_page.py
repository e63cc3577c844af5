"""The page `/docs` in a real Chromium."""

from __future__ import annotations

from typing import Any

import httpx

from tests.helpers.browser import NEEDS_CHROMIUM

pytestmark = NEEDS_CHROMIUM


async def test_the_page_shows_every_operation_loads_nothing_from_elsewhere_and_sends_a_request(
    gateway_url: str, page: Any
) -> None:
    loaded: list[str] = []
    refused: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    page.on("response", lambda answer: None if answer.ok else refused.append(answer.url))
    async with httpx.AsyncClient(base_url=gateway_url, timeout=120) as api:
        paths = (await api.get("/openapi.json")).json()["paths"]
    wanted = {operation["operationId"] for verbs in paths.values() for operation in verbs.values()}

    await page.goto(f"{gateway_url}/docs")
    operations = page.locator(".opblock")
    await operations.nth(len(wanted) - 1).wait_for()
    shown = await operations.evaluate_all("(all) => all.map((one) => one.id)")
    assert {found.removeprefix(f"operations-{found.split('-')[1]}-") for found in shown} == wanted
    foreign = [url for url in loaded if not url.startswith((gateway_url, "data:"))]
    assert foreign == []
    assert refused == []

    # To show the page takes seconds of CPU time, so the same one sends a request.
    await page.locator("#operations-health-get_liveness").click()
    await page.get_by_role("button", name="Try it out").click()
    await page.get_by_role("button", name="Execute").click()
    await page.locator(".live-responses-table .response-col_status", has_text="200").wait_for()
