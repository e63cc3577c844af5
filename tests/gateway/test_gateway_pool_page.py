"""The operator's page in a real Chromium, with several pools."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.helpers.browser import NEEDS_CHROMIUM
from tests.helpers.pool_harness import Pool
from tests.helpers.reporting_autoscaler import LIMIT_S, SCALING, ReportingAutoscaler
from turboserve.contracts.pool import PoolMemberPhase, PoolMemberStatus, PoolOrders

pytestmark = NEEDS_CHROMIUM


async def orders(autoscaler: ReportingAutoscaler, pool: str, version: int) -> PoolOrders:
    """Wait until the pool's orders have this version."""
    deadline = time.monotonic() + LIMIT_S
    while (found := await autoscaler.report(pool)).version != version:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.1)
    return found


async def test_orders_go_to_the_pool_that_the_page_shows(
    gateway_url: str, autoscaler: ReportingAutoscaler, page: Any
) -> None:
    limits = {"page_a": (1, 4), "page_b": (2, 6)}
    members = [
        PoolMemberStatus(member=f"p-{name}-0", phase=PoolMemberPhase.VACANT, models=models)
        for name, models in (("both", ("one", "two")), ("first", ("one",)))
    ]
    for pool, (least, most) in limits.items():
        await autoscaler.report(pool)
        scaling = SCALING.model_copy(update={"least": least, "most": most})
        await autoscaler.publish(pool, scaling=scaling, members=members)

    await page.goto(f"{gateway_url}/pool#page_b")
    await page.locator("#r-limits", has_text="2–6").wait_for()
    # Models are shown, since the pool has several.
    assert await page.locator("#members p:first-of-type").all_inner_texts() == ["one, two", "one"]
    assert await page.get_by_label("Pool", exact=True).input_value() == "page_b"
    await page.get_by_label("Number of workers").fill("5")
    await page.get_by_role("button", name="Set override").click()
    assert (await orders(autoscaler, "page_b", 1)).override == 5

    await page.get_by_label("Pool", exact=True).select_option("page_a")
    await page.locator("#r-limits", has_text="1–4").wait_for()
    # The number that was typed for the other pool is gone.
    assert await page.get_by_label("Number of workers").input_value() == "1"
    await page.get_by_label("Dry run").click()
    assert (await orders(autoscaler, "page_a", 1)).dry_run is True
    assert (await orders(autoscaler, "page_b", 1)).dry_run is None

    await page.reload()
    await page.locator("#r-limits", has_text="1–4").wait_for()
    await page.get_by_role("button", name="Remove override").click()
    assert (await orders(autoscaler, "page_a", 2)).override is None
    assert (await orders(autoscaler, "page_b", 1)).override == 5


async def test_a_pool_that_reports_later_does_not_take_the_page(
    gateway_url: str, autoscaler: ReportingAutoscaler, page: Any
) -> None:
    await autoscaler.publish("B_first")
    await page.goto(f"{gateway_url}/pool")
    await page.locator("#r-limits", has_text="1–4").wait_for()
    shown = await page.evaluate("document.getElementById('pool').value")
    assert shown == "B_first"
    # It sorts before all others.
    await autoscaler.publish("A_late", scaling=None, target=None)
    options = page.locator("#pool option")
    deadline = time.monotonic() + LIMIT_S
    while "A_late" not in await options.all_inner_texts():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert await page.evaluate("document.getElementById('pool').value") == "B_first"
    assert await page.locator("#r-limits").inner_text() == "1–4"
    # A pool that another system runs takes no orders, and shows no figures of the pool before.
    await page.get_by_label("Pool", exact=True).select_option("A_late")
    await page.locator("#table-of", has_text="Another system").wait_for()
    assert await page.locator("#r-limits").inner_text() == "–"
    assert await page.get_by_label("Number of workers").is_disabled()
    # Nor does an address with a pool that does not exist, and there is no past of it either.
    await page.get_by_label("Pool", exact=True).select_option("B_first")
    await page.locator("#r-limits", has_text="1–4").wait_for()
    await page.locator("#plot-demand [data-points]").wait_for()
    await page.goto(f"{gateway_url}/pool#/overview?pool=never")
    await page.locator("#view-message", has_text="There is no pool never").wait_for()
    await page.locator("#r-limits:text-is('–')").wait_for()
    assert await page.get_by_role("button", name="Set override").is_disabled()
    assert await page.locator("#overview-plots").is_hidden()


async def test_a_refused_order_stays_on_the_page_and_a_laptop_has_no_price(
    pool: Pool, autoscaler: ReportingAutoscaler, page: Any
) -> None:
    key = "key-of-no-operator-0123456789"
    url = pool.gateway("no_operator", TURBOSERVE_API_KEYS=f"{key}=viewer", DRAWN_KEY=key)
    await autoscaler.publish("refusing")
    await page.goto(f"{url}/pool#refusing")
    await page.get_by_label("API key").fill(key)
    await page.keyboard.press("Enter")
    await page.locator("#r-limits", has_text="1–4").wait_for()
    await page.get_by_label("Dry run").click()
    refusal = page.locator("#refusal", has_text="pool:write")
    await refusal.wait_for()
    # Three reports later it is still there.
    for _ in range(3):
        async with page.expect_response(lambda answer: answer.url.endswith("/v1/pools")):
            pass
    assert await refusal.is_visible()
    assert "GPU s" not in await page.locator("body").inner_text()
    assert "0.00/h" not in await page.locator("body").inner_text()
    pool.stop("no_operator")
    # What stays on the page has its time.
    await page.locator(
        "#message", has_text="cannot be reached. Is it running? This is the state of"
    ).wait_for()
