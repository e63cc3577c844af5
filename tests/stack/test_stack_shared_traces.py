"""Traces of a migration and of the player page, as an OTLP collector receives them from the shared stack."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.helpers.browser import NEEDS_CHROMIUM
from tests.helpers.otlp_receiver import OtlpReceiver, ReceivedSpan, outside_scheme
from tests.helpers.waiting import eventually
from tests.stack.received_traces import LIMIT_S, SESSION, Client, about, ancestors, connected, named
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack

pytestmark = pytest.mark.stack


async def test_a_migration_is_one_trace_with_its_rounds(
    stack: BackgroundStack, stack_receiver: OtlpReceiver
) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=LIMIT_S) as api:
        viewer = await Viewer.create(api, "a red circle moving left")
        async with viewer.watching():
            await viewer.more_chunks(3, LIMIT_S)
            client, begun = await migrate(api, viewer.session)
            await viewer.event("session.migrated", LIMIT_S, worker=begun["target"])
            await story_of_migration(stack_receiver, client, viewer.session, begun["target"])
        await viewer.delete()
    assert outside_scheme(stack_receiver) == []


async def migrate(api: httpx.AsyncClient, session: str) -> tuple[Client, dict[str, Any]]:
    """Request a migration to the other worker until it begins. Each attempt is a trace of its own."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            client = Client()
            answer = await api.post(f"/v1/sessions/{session}/migrate", json={}, headers=client.headers)
            if answer.status_code == 202:
                return client, answer.json()
            await asyncio.sleep(0.5)


async def story_of_migration(receiver: OtlpReceiver, client: Client, session: str, target: str) -> None:
    def complete(spans: Sequence[ReceivedSpan]) -> bool:
        return (
            connected(spans, client)
            and bool(named(spans, "gateway", "deliver chunk"))
            and bool(named(spans, "worker", "send state"))
            and bool(named(spans, "scheduler", "decide commit"))
        )

    spans = await receiver.until(complete, LIMIT_S, client.trace)
    about(spans, session)
    [begun] = named(spans, "scheduler", "decide migrate")
    assert begun.attributes["turboserve.worker.id"] == target
    assert len(begun.links) == 1, "linked to the session's assignment"
    fetched = named(spans, "worker", "fetch state")[-1]
    begin = "state-store: process state.session.migration.begin"
    assert ancestors(spans, fetched)[:3] == [
        begin,
        "scheduler: request state.session.migration.begin",
        "scheduler: decide migrate",
    ]
    # Rounds of attempts that failed come before those of the last attempt.
    count = fetched.attributes["turboserve.migration.rounds"]
    rounds = named(spans, "worker", "copy round")[-count:]
    assert count >= 2
    assert [span.parent for span in rounds] == [fetched.id] * count
    assert [span.attributes["turboserve.migration.round"] for span in rounds] == list(range(count))
    assert fetched.attributes["turboserve.migration.bytes"] == sum(
        span.attributes["turboserve.migration.bytes"] for span in rounds
    )
    sent = named(spans, "worker", "send state")[-1]
    assert ancestors(spans, sent)[0] == begin
    assert {span.name for span in spans if span.parent == sent.id} == {
        "quiesce session",
        "append last chunks",
    }
    commit = named(spans, "scheduler", "decide commit")[-1]
    assert ancestors(spans, commit)[0] == begin
    assert commit.attributes["turboserve.worker.id"] == target
    assert commit.attributes["turboserve.decision.numbers.bytes_copied"] > 0
    delivered = named(spans, "gateway", "deliver chunk")[0]
    assert ancestors(spans, delivered)[:5] == [
        "worker: send chunk",
        "worker: generate chunk",
        "state-store: process state.session.migration.commit",
        "scheduler: request state.session.migration.commit",
        "scheduler: decide commit",
    ]


@NEEDS_CHROMIUM[0]
@NEEDS_CHROMIUM[1]
async def test_the_first_frame_that_the_page_shows_is_in_the_trace_of_the_creation(
    stack: BackgroundStack, stack_receiver: OtlpReceiver, page: Any
) -> None:
    await page.goto(stack.url)
    await page.get_by_label("What should the video show?").fill("a red circle moving left")
    await page.get_by_role("button", name="Start").click()
    # `wait_for_function` evaluates its text in the page, which the Content-Security-Policy
    # refuses unless the first poll is already true.
    await page.wait_for_url(re.compile("#ses_"))
    session = page.url.partition("#")[2]

    def of_session() -> list[ReceivedSpan]:
        shown = named(stack_receiver.spans, "gateway", "show first frame")
        return [span for span in shown if span.attributes[SESSION] == session]

    await eventually(of_session, LIMIT_S)
    [shown] = of_session()

    def complete(spans: Sequence[ReceivedSpan]) -> bool:
        return ancestors(spans, shown)[-1:] == ["gateway: POST /v1/sessions"]

    spans = await stack_receiver.until(complete, LIMIT_S, shown.trace)
    about(spans, session)
    above = ancestors(spans, shown)
    assert above[:3] == [
        "worker: send chunk",
        "worker: generate chunk",
        "state-store: process state.session.place",
    ]
    assert "scheduler: decide place" in above
    [root] = named(spans, "gateway", "POST /v1/sessions")
    assert root.parent == ""
    assert root.begins_ns < shown.begins_ns < shown.ends_ns
    await page.get_by_role("button", name="End session").click()
    assert outside_scheme(stack_receiver) == []
