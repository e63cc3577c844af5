"""One run: a stack of its own, clients that watch, the plan's faults, and then the checks."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import httpx
import nats

from turboserve.cli.stack.background import BackgroundStack
from turboserve.experiments.chaos import chunklog
from turboserve.experiments.chaos.invariants import (
    Owned,
    Violations,
    check_capacity,
    check_log,
    check_oldest,
    check_skips,
    takeovers,
)
from turboserve.experiments.chaos.plan import Fault, FaultKind, Plan
from turboserve.experiments.chaos.process_faults import ProcessFaults
from turboserve.experiments.chaos.readiness import ReadinessWatch
from turboserve.experiments.chaos.results import InjectedFault, Run
from turboserve.experiments.chaos.simulated_clients import TRANSIENT_ERRORS, SimulatedClient, with_retry
from turboserve.experiments.chaos.surroundings import Surroundings
from turboserve.tasks import stop

UP = (sys.executable, "-m", "turboserve.experiments.chaos.up")
FIRST_CHUNK_S = 120.0
SETTLE_S = 90.0
"""Time after the last fault within which every session must play on."""
SETTLED_CHUNKS = 3
LOOK_S = 1.0
REDUNDANCY = ("--gateways", "2", "--state-stores", "2", "--autoscalers", "2", "--nats", "3")
ROOM_S = 6.0
"""Time after which the store has noticed that the disk has room; less than the time to the next fault."""
SILENCE_S = 8.0
"""Silence of a log before its owner changes, by which the former owner had died (12 s) or was stopped."""
STALLED_S = 8.0
"""Time after a freeze in which a stall still counts; less than the time to the next fault, seconds."""
DECODED = "turboserve_worker_decode_duration_seconds_count"
"""A decode worker's metric of the chunks that it has decoded."""
SLOTS = 4
"""Sessions per worker: the others must hold the sessions of a worker that dies."""


async def run_scenario(
    plan: Plan,
    seconds: float,
    surroundings: Surroundings,
    workers: int,
    schedulers: int,
    sessions: int,
    decoders: Sequence[str] = (),
    *,
    redundancy: bool = False,
) -> Run:
    """Start a stack in `surroundings`, carry out the plan, check. Raises StackStartError.

    With `redundancy`, the stack has two or more of each service, and clients know all gateways. Leaves
    nothing running.
    """
    stack = BackgroundStack(
        surroundings.data,
        *("--workers", str(workers), "--schedulers", str(schedulers)),
        *(REDUNDANCY if redundancy else ()),
        *(("--decode-workers", str(len(decoders))) if decoders else ()),
        environment={
            "TURBOSERVE_WORKER_MAX_SESSIONS": str(SLOTS),
            "TURBOSERVE_CHUNKS_KEPT": "100000",
            **surroundings.environment,
        },
        command=UP,
    )
    await asyncio.to_thread(stack.start)
    try:
        network = surroundings.network
        gateways: Sequence[str] = stack.record.gateway_urls
        if network is not None:
            gateways = network.serve_viewers_of(gateways)
        async with httpx.AsyncClient(base_url=gateways[0]) as api:
            faults = ProcessFaults(stack, surroundings)
            return await _run_faults(plan, seconds, stack, faults, api, gateways, sessions, decoders)
    finally:
        await asyncio.to_thread(stack.stop)


async def _run_faults(
    plan: Plan,
    seconds: float,
    stack: BackgroundStack,
    process_faults: ProcessFaults,
    api: httpx.AsyncClient,
    gateways: Sequence[str],
    sessions: int,
    decoders: Sequence[str],
) -> Run:
    run = Run()
    watches: list[asyncio.Task[None]] = []
    try:
        for number in range(sessions):
            client = await SimulatedClient.begin(number, api, gateways)
            run.clients.append(client)
            watches.append(asyncio.create_task(client.watch()))
        for client in run.clients:
            await client.viewer.until(lambda client=client: bool(client.seen), FIRST_CHUNK_S, "first chunk")  # type: ignore[misc]
        watches.append(asyncio.create_task(_watch_capacity(api, run.violations)))
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for client in run.clients:
                actions = [action for action in plan.actions if action.session == client.number]
                group.create_task(client.live(actions, began_s))
            for fault in plan.faults:
                group.create_task(_inject(run, stack, process_faults, fault, began_s))
            group.create_task(asyncio.sleep(seconds))
        await _settle(run, api)
        if decoders:
            run.decoded_apart = await _decoded(stack, decoders)
        await _check(run, stack)
        for client in run.clients:
            await client.end()
        return run
    finally:
        process_faults.wake_all()
        await stop(*watches)


async def _inject(
    run: Run, stack: BackgroundStack, process_faults: ProcessFaults, fault: Fault, began_s: float
) -> None:
    await asyncio.sleep(max(began_s + fault.at_s - time.monotonic(), 0.0))
    fills = fault.kind is FaultKind.DISK_FULL
    if fills:
        before = f"before the disk is full at {fault.at_s:.0f} s"
        check_oldest(await _oldest(run, stack), run.oldest, before, run.violations)
    watch = ReadinessWatch(stack.record) if fault.degrades else None
    at_s = time.monotonic()
    stalls = [client.stall_s(at_s) for client in run.clients]
    watching = None if watch is None else asyncio.create_task(watch.run())
    try:
        if await process_faults.hit(fault):
            await _observe(run, fault, at_s, stalls, watch)
        else:
            run.missed += 1
    finally:
        if watching is not None:
            await stop(watching)
    if fills:
        await asyncio.sleep(ROOM_S)
        run.oldest = await _oldest(run, stack)


async def _observe(
    run: Run, fault: Fault, at_s: float, stalls: Sequence[float], watch: ReadinessWatch | None
) -> None:
    """Note the results of a fault that began at `at_s` and is over. `stalls`: of each client before it."""
    ended_s, stall_s = time.monotonic(), None
    if fault.freezes or fault.degrades:
        await asyncio.sleep(STALLED_S)
        now_s = time.monotonic()
        stall_s = max(
            client.stall_s(now_s) - before for client, before in zip(run.clients, stalls, strict=True)
        )
    hit = InjectedFault(fault, at_s, ended_s, stall_s)
    if watch is not None:
        again_s = await watch.ready_since(ended_s)
        hit = replace(hit, states=watch.states, ready_again_s=again_s)
    run.hits.append(hit)
    run.hits.sort(key=lambda hit: hit.began_s)


async def _oldest(run: Run, stack: BackgroundStack) -> dict[str, int]:
    """Return `chunklog.oldest` of all sessions; retries until the broker answers. Raises TimeoutError."""
    sessions = [client.viewer.session for client in run.clients]
    async with asyncio.timeout(SETTLE_S):
        while True:
            with suppress(nats.errors.Error, OSError):
                return await chunklog.oldest(stack.record.nats_url, sessions)
            await asyncio.sleep(LOOK_S)


async def _settle(run: Run, api: httpx.AsyncClient) -> None:
    """Check, after the faults, that every session plays again."""
    began_s = time.monotonic()

    async def one(client: SimulatedClient) -> None:
        name = client.viewer.session
        wanted = client.viewer.player.chunks + SETTLED_CHUNKS
        try:
            await client.resume()
            left_s = max(began_s + SETTLE_S - time.monotonic(), 1.0)
            await client.viewer.until(lambda: client.viewer.player.chunks >= wanted, left_s, "chunks")
            row = await with_retry(client.viewer.get)
            if row["phase"] not in ("active", "migrating"):
                run.violations.add("converges_after_faults", f"{name} is {row['phase']}: {row.get('reason')}")
        except TRANSIENT_ERRORS as error:
            run.violations.add("converges_after_faults", f"{name}: {error}")

    await asyncio.gather(*(one(client) for client in run.clients))
    run.settle_s = time.monotonic() - began_s


async def _decoded(stack: BackgroundStack, decoders: Sequence[str]) -> int:
    """Return the chunks that decode workers have decoded since their last start."""
    counted = 0.0
    async with httpx.AsyncClient(trust_env=False) as http:
        for name in decoders:
            with suppress(LookupError, *TRANSIENT_ERRORS):
                port = stack.record.processes[name]["port"]
                page = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
                lines = (line for line in page.splitlines() if line.startswith(DECODED))
                counted += sum(float(line.rsplit(" ", 1)[1]) for line in lines)
    return round(counted)


async def _check(run: Run, stack: BackgroundStack) -> None:
    seen = {client.viewer.session: list(client.seen) for client in run.clients}
    log = await chunklog.read(stack.record.nats_url)
    for client in run.clients:
        check_skips(client.viewer.session, client.viewer.skips, run.violations)
    for session, chunks in seen.items():
        entries = log.get(session, [])
        check_log(session, entries, chunks, run.violations, first=run.oldest.get(session, 0))
        run.takeovers += takeovers(entries, SILENCE_S)
        owners = sum(isinstance(entry, Owned) for entry in entries)
        run.chunks += len(entries) - owners
        run.owners += max(owners - 1, 0)


async def _watch_capacity(api: httpx.AsyncClient, found: Violations) -> None:
    while True:
        with suppress(*TRANSIENT_ERRORS):
            answer = await api.get("/v1/workers", timeout=2.0)
            if answer.is_success:
                check_capacity(answer.json()["workers"], found)
        await asyncio.sleep(LOOK_S)
