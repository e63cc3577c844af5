"""One trace per request, over every service on its way, as an OTLP collector receives it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers import patient_stack
from tests.helpers.otlp_receiver import OtlpReceiver, ReceivedSpan, outside_scheme
from tests.helpers.tiny_workers import TINY_WORKERS
from tests.helpers.waiting import eventually
from tests.stack.received_traces import LIMIT_S, SESSION, Client, about, ancestors, connected, named
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack

pytestmark = pytest.mark.stack

EXEMPLARS = {"turboserve.state_store.request.duration", "turboserve.worker.compute.duration"}
SERVICES = ("gateway", "state-store", "scheduler", "worker", "autoscaler")


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver().running() as receiver:
        yield receiver


async def test_a_creation_and_a_prompt_are_one_trace_each(data_dir: Path, receiver: OtlpReceiver) -> None:
    """The pool is empty, so that the creation also starts a worker."""
    environment = {
        **patient_stack.PATIENT,
        **TINY_WORKERS,
        "TURBOSERVE_OTLP_ENDPOINT": receiver.endpoint,
        # Exemplars come with the metrics.
        "OTEL_METRIC_EXPORT_INTERVAL": "2000",
        "TURBOSERVE_SCALE_ZERO_AFTER_S": "2",
        "TURBOSERVE_SCALE_IN_COOLDOWN_S": "2",
        "TURBOSERVE_SCALE_IN_WINDOW_S": "2",
    }
    creation, prompt = Client(), Client()
    with BackgroundStack(data_dir, "--workers", "0..1", environment=environment) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=LIMIT_S) as api:
            await no_workers(api)
            body = {"prompt": "a red circle moving left"}
            created = await creation.post(api, "/v1/sessions", body)
            viewer = Viewer(api, created["id"])
            async with viewer.watching():
                await viewer.more_chunks(3, LIMIT_S)
                body = {"prompt": "a blue square moving up"}
                await prompt.post(api, f"/v1/sessions/{viewer.session}/prompts", body)
                applied = await viewer.event("prompt.applied", LIMIT_S)
                await viewer.until(
                    lambda: viewer.last >= applied["chunk_index"], LIMIT_S, "the prompt's first chunk"
                )
                await story_of_creation(receiver, creation, viewer.session)
                await story_of_prompt(receiver, prompt, viewer.session, applied["chunk_index"])
                await receiver.until_exemplars(EXEMPLARS, LIMIT_S)
            await viewer.delete()
    # The services have exported everything: they have stopped.
    failed = {span.trace for span in receiver.spans if span.failed}
    others = [span for span in receiver.spans if span.trace not in (creation.trace, prompt.trace, *failed)]
    heartbeats = ("state.worker.renew", "state.pool.report", "state.leader.renew", "state.leader.get")
    assert not [span for span in others if any(beat in span.name for beat in heartbeats)]
    steady = [span for span in others if span.name == "generate chunk"]
    assert steady == [], "chunks that follow no request are not sampled by default"
    assert outside_scheme(receiver) == []
    # Of every service, so that the assertion before it is about all of them.
    components = {metric.scope.removeprefix("turboserve.") for metric in receiver.metrics}
    assert components >= {"gateway", "state_store", "scheduler", "worker", "autoscaler"}


async def no_workers(api: httpx.AsyncClient) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            answer = await api.get("/v1/pools/local")
            pool: dict[str, Any] = answer.json()
            if answer.status_code == 200 and pool["target"] == pool["ready"] == 0 and not pool["members"]:
                return
            await asyncio.sleep(0.2)


async def story_of_creation(receiver: OtlpReceiver, client: Client, session: str) -> None:
    def complete(spans: Sequence[ReceivedSpan]) -> bool:
        return (
            connected(spans, client)
            and bool(named(spans, "gateway", "show first frame"))
            and bool(named(spans, "gateway", "deliver chunk"))
            and bool(named(spans, "gateway", "POST /v1/sessions"))
            and bool(named(spans, "worker", "start worker"))
            and bool(named(spans, "autoscaler", "launch worker"))
        )

    spans = await receiver.until(complete, LIMIT_S, client.trace)
    about(spans, session)
    assert {span.service for span in spans} == {f"turboserve-{service}" for service in SERVICES}

    roots = [span for span in spans if span.parent == client.span]
    assert {(span.service, span.name) for span in roots} == {("turboserve-gateway", "POST /v1/sessions")}
    shown = named(spans, "gateway", "show first frame")[0]
    assert ancestors(spans, shown) == [
        "worker: send chunk",
        "worker: generate chunk",
        "state-store: process state.session.place",
        "scheduler: request state.session.place",
        "scheduler: decide place",
        "state-store: process state.session.create",
        "gateway: request state.session.create",
        "gateway: fastapi.endpoint",
        "gateway: POST /v1/sessions",
    ]
    placed = named(spans, "scheduler", "decide place")[-1]
    worker = placed.attributes["turboserve.worker.id"]
    [started] = [
        span
        for span in named(spans, "worker", "start worker")
        if span.attributes["turboserve.worker.id"] == worker
    ]
    assert ancestors(spans, started)[:4] == [
        "autoscaler: launch worker",
        "autoscaler: decide size",
        "state-store: send event",
        "state-store: process state.session.create",
    ]
    waited = named(spans, "scheduler", "decide wait")[0]
    assert waited.begins_ns < started.ends_ns <= placed.ends_ns
    assert placed.attributes["turboserve.decision.numbers.candidates"] == 1.0
    assert placed.attributes["turboserve.decision.numbers.latency_s"] > 0
    sized = named(spans, "autoscaler", "decide size")[0]
    assert sized.attributes["turboserve.decision.numbers.sessions_per_worker"] > 0

    assert named(spans, "worker", "admit session")
    [chunk] = named(spans, "worker", "generate chunk")
    assert chunk.attributes["turboserve.chunk.index"] == 0
    stages = [span.name for span in spans if span.parent == chunk.id]
    assert list(dict.fromkeys(stages)) == ["text", "denoise", "decode", "package", "send chunk"]
    assert stages.count("denoise") == 4
    assert shown.parent in {span.parent for span in named(spans, "gateway", "deliver chunk")}
    for span in spans:
        if span.name in ("send own", "send event", "send chunk"):
            assert span.attributes["messaging.system"] == "nats"


async def story_of_prompt(receiver: OtlpReceiver, client: Client, session: str, applied: int) -> None:
    def complete(spans: Sequence[ReceivedSpan]) -> bool:
        events = [
            span.attributes["turboserve.event.type"] for span in named(spans, "scheduler", "process event")
        ]
        return (
            connected(spans, client)
            and bool(named(spans, "gateway", "deliver chunk"))
            and set(events) == {"prompt.accepted", "prompt.applied"}
        )

    spans = await receiver.until(complete, LIMIT_S, client.trace)
    about(spans, session)
    delivered = named(spans, "gateway", "deliver chunk")[0]
    assert ancestors(spans, delivered) == [
        "worker: send chunk",
        "worker: generate chunk",
        "state-store: process state.session.prompt",
        "gateway: request state.session.prompt",
        "gateway: fastapi.endpoint",
        "gateway: POST /v1/sessions/{session}/prompts",
    ]
    [chunk] = named(spans, "worker", "generate chunk")
    assert chunk.attributes["turboserve.chunk.index"] == applied
    assert chunk.attributes["turboserve.control.seq"] == 1
    assert "text" in [span.name for span in spans if span.parent == chunk.id]
    [link] = chunk.links
    assert link[0] != client.trace, "the chunk is linked to the session's assignment"


async def test_forwards_are_linked_to_the_sessions_batched_with_them(
    data_dir: Path, receiver: OtlpReceiver
) -> None:
    environment = {
        **patient_stack.PATIENT,
        **TINY_WORKERS,
        "TURBOSERVE_OTLP_ENDPOINT": receiver.endpoint,
        "TURBOSERVE_TRACE_PERIODIC_RATIO": "1",
        # Both sessions generate all the time.
        "TURBOSERVE_MAX_LEAD_S": "600",
        "TURBOSERVE_WORKER_MAX_SESSIONS": "2",
    }
    clients = Client(), Client()
    with BackgroundStack(data_dir, "--workers", "1", environment=environment) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=LIMIT_S) as api:
            body = {"prompt": "a red circle moving left"}
            created = [await client.post(api, "/v1/sessions", body) for client in clients]
            first, second = (Viewer(api, each["id"]) for each in created)
            traces = {
                viewer.session: client.trace for viewer, client in zip((first, second), clients, strict=True)
            }
            async with first.watching(), second.watching():
                await eventually(
                    lambda: all(batched(receiver.spans, session, traces) for session in traces), LIMIT_S
                )
            await first.delete()
            await second.delete()


def batched(spans: Sequence[ReceivedSpan], session: str, traces: dict[str, str]) -> bool:
    """Whether a chunk of `session` had a batched forward.

    Such a forward is linked to the other session, unless the step before it had the same batch.
    """
    chunks = [
        span.id for span in named(spans, "worker", "generate chunk") if span.attributes[SESSION] == session
    ]
    others = {trace for name, trace in traces.items() if name != session}
    found = False
    for chunk in chunks:
        forwards = [span for span in named(spans, "worker", "denoise") if span.parent == chunk]
        sessions_before = 1
        for forward in sorted(forwards, key=lambda span: span.begins_ns):
            sessions = forward.attributes["turboserve.batch.size"]
            linked = others if (sessions_before, sessions) == (1, 2) else set()
            assert {trace for trace, _ in forward.links} == linked, forward
            sessions_before = sessions
            found = found or sessions == 2
    return found
