"""The operators' console in a real Chromium: one test per view, on what real services have stored."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from tests.gateway.test_gateway_migrations import MigratingWorkers, migrate, placed
from tests.helpers.browser import NEEDS_CHROMIUM, focus_checked, focus_is, serious_violations, until
from tests.helpers.pool_harness import Pool
from tests.helpers.reporting_autoscaler import SCALING, ReportingAutoscaler
from tests.helpers.waiting import eventually
from turboserve.contracts.cost import Rental
from turboserve.contracts.loans import LoanRole, WorkerLoan
from turboserve.contracts.pool import MemberPlayout, PoolMemberPhase, PoolMemberStatus
from turboserve.contracts.pool_history import PoolDecision, PoolSample

pytestmark = NEEDS_CHROMIUM
POOL = "console_page"
DECISIONS = 130
"""More than a page has."""


class Past:
    """An hour in which two workers were rented and a session migrated. Made once: the rows stay."""

    session = source = target = ""
    ended_at = 0.0

    @classmethod
    def address(cls, url: str, view: str, span: int = 600) -> str:
        to = datetime.fromtimestamp(cls.ended_at, UTC).isoformat().replace("+00:00", "Z")
        return f"{url}/pool#/{view}?pool={POOL}&span={span}&to={to}"


def rentals(began: float, *workers: str) -> list[Rental]:
    age_s = time.time() - began + 60.0
    return [Rental(worker=one, kind="test", age_s=age_s, ready_ago_s=age_s - 1.0) for one in workers]


def reported(number: int, at: float) -> PoolDecision:
    return PoolDecision(
        number=number,
        at=at,
        kind="scaling",
        action="hold",
        target=2,
        previous=2,
        advice=2,
        reason=f"reason {number}",
        numbers={"rho_max": 0.5, "required": float(number)},
    )


@pytest.fixture
async def past(
    pool: Pool, api: httpx.AsyncClient, autoscaler: ReportingAutoscaler, start: Any
) -> AsyncIterator[type[Past]]:
    await autoscaler.publish(POOL)
    if Past.session:
        yield Past
        return
    began, workers = time.time(), MigratingWorkers(pool, api)
    await asyncio.gather(workers.start(), workers.start())
    session = await start("a red circle", model=workers.model)
    row = await placed(api, session)
    Past.source = str(row["worker"])
    [Past.target] = set(await workers.listed()) - {Past.source}
    for first in range(0, DECISIONS, 64):
        some = [reported(number + 1, began) for number in range(first, min(first + 64, DECISIONS))]
        sample = PoolSample(
            ready=2, target=2, capacity=4, required=7, waiting=3, quality_debt=0.25, deficit=2.0
        )
        both = rentals(began, Past.source, Past.target)
        await autoscaler.report(
            POOL, *both, model=workers.model, sample=sample, decisions=some, process="asc_1"
        )
    assert (await migrate(api, session, Past.target)).status_code == 202

    async def read(name: str) -> Any:
        await autoscaler.report(POOL, *rentals(began, Past.source, Past.target), model=workers.model)
        return (await api.get(f"/v1/pools/{POOL}/{name}")).json()

    async def complete() -> bool:
        lanes = (await read("workers"))["workers"]
        there = {lane["worker"] for lane in lanes for one in lane["sessions"] if one["bars"]}
        over = [one["outcome"] for one in (await read("migrations"))["migrations"]]
        tenants = [one["tenant"] for one in (await read("cost"))["tenants"]]
        return over == ["committed"] and Past.source in there and "default" in tenants

    await eventually(complete)
    Past.session, Past.ended_at = session["id"], time.time() + 1.0
    yield Past
    for name in workers.started:
        pool.stop(name)


async def fits(page: Any) -> None:
    """Wait until nothing is wider than a phone. Plots are drawn again when their box has another size."""
    await page.set_viewport_size({"width": 390, "height": 844})
    await until(page, "document.documentElement.scrollWidth <= 390")


async def shows(page: Any, view: str) -> None:
    await page.locator(f"body[data-shows={view}]").wait_for()
    current = page.locator("#views a[aria-current=page]")
    assert await current.get_attribute("data-view") == view


async def test_the_overview_plots_demand_and_capacity(past: type[Past], gateway_url: str, page: Any) -> None:
    await page.goto(past.address(gateway_url, "overview"))
    await shows(page, "overview")
    demand = page.locator("#plot-demand")
    await demand.get_by_text("required 7, capacity 4, waiting 3").wait_for()
    # A point is read with the keyboard, and stays while reports arrive.
    area = demand.get_by_role("img")
    await area.focus()
    await page.keyboard.press("Home")
    read = await demand.locator(".readout").inner_text()
    async with page.expect_response(lambda answer: answer.url.endswith("/v1/pools")):
        pass
    assert await demand.locator(".readout").inner_text() == read
    assert await demand.locator(".cursor").count() == 1
    assert "Arrow keys" in (await area.get_attribute("aria-label") or "")
    # The live hour begins after the reports that this test has made, or with them; it ends now.
    await page.get_by_role("button", name="Later").focus()
    await page.keyboard.press("Enter")
    await until(page, "!location.hash.includes('to=')")
    # There is nothing later, and the button keeps the focus.
    await focus_checked(page)
    await focus_is(page, "later")
    assert await serious_violations(page, "light", "dark") == []
    await fits(page)


async def test_workers_have_lanes_of_chunks_and_arrows_of_migrations(
    past: type[Past], gateway_url: str, page: Any
) -> None:
    await page.goto(past.address(gateway_url, "workers"))
    await shows(page, "workers")
    lane = page.locator(f"[data-worker='{past.source}'] [data-session='{past.session}']")
    await lane.locator("path.chunk").first.wait_for(state="attached")
    assert await page.locator("path.arrow.committed").count() == 1
    rows = page.locator("#worker-rows tr")
    assert await rows.count() == 2
    await page.locator("#lanes svg.lanes-area").focus()
    await page.keyboard.press("Home")
    words = await page.locator("#lanes .readout").inner_text()
    assert past.session in words
    assert "of default on" in words
    assert await serious_violations(page, "light", "dark") == []
    await fits(page)
    # An hour in which there was no worker.
    await page.goto(f"{gateway_url}/pool#/workers?pool={POOL}&span=3600&to=2020-01-01T00:00:00Z")
    empty = page.locator("#workers-empty", has_text="had no worker")
    await empty.wait_for()
    # Times of other days have their date, and midnight is not 24:00.
    assert re.search(r"from .*20(19|20).* to .*20(19|20)", await empty.inner_text())
    assert "24:00" not in await empty.inner_text()


async def test_migrations_have_their_reason_and_numbers(
    past: type[Past], gateway_url: str, page: Any
) -> None:
    await page.goto(past.address(gateway_url, "migrations"))
    await shows(page, "migrations")
    [row] = await page.locator("#migrations-list li").all()
    text = await row.inner_text()
    assert f"{past.session} of default: {past.source} → {past.target}, committed after" in text
    assert "operator" in text
    assert await row.locator("summary").count() == 1
    assert await serious_violations(page, "light", "dark") == []
    await fits(page)


async def test_decisions_stay_open_while_new_ones_arrive(
    past: type[Past], autoscaler: ReportingAutoscaler, gateway_url: str, page: Any
) -> None:
    await page.goto(f"{gateway_url}/pool#/decisions?pool={POOL}")
    await shows(page, "decisions")
    rows = page.locator("#decisions-list li")
    assert await rows.count() == 100
    asked, answer = asyncio.Event(), asyncio.Event()

    async def answer_late(route: Any) -> None:
        asked.set()
        await answer.wait()
        await route.continue_()

    await page.route(re.compile(r"/decisions\?.*after="), answer_late)
    await page.get_by_role("button", name="Show earlier decisions").focus()
    await page.keyboard.press("Enter")
    await asked.wait()
    # The button keeps the focus while the answer is missing.
    await focus_checked(page)
    focused = await page.evaluate("document.activeElement.id")
    answer.set()
    assert focused == "decisions-earlier"
    await until(page, "document.querySelectorAll('#decisions-list li').length === 130")
    opened = rows.filter(has_text="reason 77")
    await opened.locator("summary").click()
    # Each value is beside its name.
    assert await opened.locator("dl > div").all_inner_texts() == ["rho_max\n0.5", "required\n77"]
    await autoscaler.report(POOL, decisions=[reported(1, time.time())], process="asc_2")
    await rows.filter(has_text="reason 1").nth(0).wait_for()
    await until(page, "document.querySelectorAll('#decisions-list li').length === 131")
    assert await opened.locator("details").get_attribute("open") is not None
    assert await serious_violations(page, "light", "dark") == []
    await fits(page)


async def test_the_queue_lists_who_waits(
    autoscaler: ReportingAutoscaler, start: Any, gateway_url: str, page: Any
) -> None:
    pool = "console_queue"
    await autoscaler.publish(pool, model=pool)
    # The pool may start workers, so the session is admitted and waits.
    await autoscaler.report(pool, model=pool, maximum=2, sample=PoolSample(waiting=1))
    session = (await start(model=pool))["id"]
    await page.goto(f"{gateway_url}/pool#/queue?pool={pool}")
    await shows(page, "queue")
    row = page.locator("#queue-rows tr", has_text=session)
    await row.wait_for()
    assert "default" in await row.inner_text()
    await page.locator("#plot-queue", has_text="waiting 1 session").wait_for()
    # There is no half of a session.
    assert await page.locator("#plot-queue .tick.end").all_text_contents() == ["0", "1"]
    assert await serious_violations(page, "light", "dark") == []
    await fits(page)
    await page.goto(f"{gateway_url}/pool#/queue?pool={pool}&to=2020-01-01T00:00:00Z")
    await page.locator("#queue-empty", has_text="not kept").wait_for()


async def test_quality_shows_debt_and_urgency(
    past: type[Past], autoscaler: ReportingAutoscaler, gateway_url: str, page: Any
) -> None:
    await page.goto(past.address(gateway_url, "quality"))
    await shows(page, "quality")
    await page.locator("#plot-debt", has_text="lowered by load 25 %").wait_for()
    await page.locator("#plot-deficit", has_text="expected 2 chunks").wait_for()
    assert await page.locator("#tier-table").is_hidden()
    loan = WorkerLoan(role=LoanRole.HOME, peer="wk_2")
    playout = MemberPlayout(slack_s=1.5, credit_s=1.0, urgent=2, normal=1, relaxed=0, quality=0.97, loan=loan)
    member = PoolMemberStatus(member="local-0", phase=PoolMemberPhase.READY, playout=playout)
    await autoscaler.publish(POOL, members=[member], scaling=SCALING)
    await page.get_by_role("button", name="Live").click()
    row = page.locator("#tier-rows tr")
    await row.wait_for()
    assert await row.locator("td").all_inner_texts() == ["2", "1", "0", "0", "1.50 s", "97.0 %"]
    shown = page.locator("#members")
    assert "quality 97.0 % · borrows the device of wk_2" in await shown.text_content()
    loan = WorkerLoan(role=LoanRole.DONOR, peer="wk_3")
    idle = MemberPlayout(slack_s=None, credit_s=None, urgent=0, normal=0, relaxed=0, quality=None, loan=loan)
    member = PoolMemberStatus(member="local-0", phase=PoolMemberPhase.READY, playout=idle)
    await autoscaler.publish(POOL, members=[member], scaling=SCALING)
    await row.filter(has_not_text="1.50").wait_for()
    assert await row.locator("td").all_inner_texts() == ["0", "0", "0", "0", "–", "–"]
    assert "lends its device to wk_3" in await shown.text_content()
    assert await serious_violations(page, "light", "dark") == []
    await fits(page)


async def test_cost_is_shown_by_tenant(past: type[Past], gateway_url: str, page: Any) -> None:
    await page.goto(past.address(gateway_url, "cost"))
    await shows(page, "cost")
    rows = page.locator("#tenant-rows tr")
    await rows.filter(has_text="default").wait_for()
    await rows.filter(has_text="no session: idle or starting").wait_for()
    # The shares by model are those of the same time.
    assert await page.locator("#model-rows tr").count() == 2
    assert int(await page.locator("#plot-cost svg.plot-area").get_attribute("data-points") or 0) >= 1
    await until(page, "document.getElementById('c-pool').textContent !== '–'")
    assert await serious_violations(page, "light", "dark") == []
    await fits(page)
    # On a phone, the links move until that of the view is there.
    await page.reload()
    await shows(page, "cost")
    link = await page.locator("#views a[aria-current=page]").bounding_box()
    assert link["x"] >= 0
    assert link["x"] + link["width"] <= 390


async def test_the_address_has_the_state_and_a_tenant_sees_only_the_present(
    past: type[Past], pool: Pool, gateway_url: str, page: Any
) -> None:
    await page.goto(past.address(gateway_url, "decisions"))
    await shows(page, "decisions")
    await page.get_by_role("link", name="Cost").click()
    await shows(page, "cost")
    assert "to=" in page.url
    await page.get_by_role("button", name="Earlier").click()
    await page.locator("#cost-empty", has_text="had no worker").wait_for()
    await page.reload()
    await page.locator("#cost-empty", has_text="had no worker").wait_for()
    await page.go_back()
    await page.locator("#tenant-rows tr").first.wait_for()
    assert await page.get_by_label("Show").input_value() == "3600"

    key = "key-of-no-operator-0123456789"
    url = pool.gateway("console_tenant", TURBOSERVE_API_KEYS=f"{key}=viewer", DRAWN_KEY=key)
    await page.goto(f"{url}/pool#/decisions?pool={POOL}")
    await page.get_by_label("API key").wait_for()
    assert await page.locator("#view-decisions").is_hidden()
    await page.get_by_label("API key").fill(key)
    await page.keyboard.press("Enter")
    await page.locator("#view-message", has_text="Only operators").wait_for()
    assert await page.locator("#view-decisions").is_hidden()
    await page.get_by_role("link", name="Overview").click()
    await page.locator("#summary").wait_for()
    # Until the gateway has refused what they show, the plots are there, and empty.
    await page.locator("#overview-plots").wait_for(state="hidden")
    pool.stop("console_tenant")
