"""Putting a worker together: models, warm-up, capacity, and its place in the service runner."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from turboserve import logs
from turboserve.ids import new_id
from turboserve.service import Runtime
from turboserve.worker.engine.engine import Engine, Models
from turboserve.worker.engine.profile import LatencyProfile
from turboserve.worker.service import metrics
from turboserve.worker.service.announcement import announced, starting
from turboserve.worker.service.models import choose_device, host_states, load_models, make_engine
from turboserve.worker.service.warm_up import measure, sessions_in_real_time, switch_prompts
from turboserve.worker.service.worker import Worker
from turboserve.worker.settings import Settings
from turboserve.worker.transfer.interface import find_interface

GONE_STATUS = 3
"""Exit status of a worker that was declared gone; it is started again under a new id."""

log = logs.get("worker")


async def start(runtime: Runtime, load: Callable[[Settings], Models] = load_models) -> None:
    """Say that it starts; load, warm up, join."""
    settings = runtime.settings
    assert isinstance(settings, Settings)
    # Before minutes go into loading: a wrong one is known now.
    find_interface(settings.transfer_host)
    name = settings.worker_id or new_id("wrk")
    started_at = runtime.clock.wall()
    report = starting(name, settings, str(choose_device(settings)), started_at)
    async with announced(report, settings, runtime.bus, runtime.clock, leave_at_once):
        engine, seconds = await asyncio.to_thread(_load, settings, load)
    capacity = capacity_of(engine, seconds, settings)
    worker = Worker(
        name,
        settings,
        runtime.bus,
        runtime.clock,
        engine,
        LatencyProfile(seconds),
        capacity,
        leave_at_once,
        started_at,
    )
    runtime.check("engine", lambda: worker.alive)
    runtime.check("state store", lambda: worker.joined)
    runtime.on_stop(worker.stop)
    expose(worker, engine)
    await worker.start(runtime.spawn)
    log.info(
        "worker joins",
        worker=worker.id,
        device=str(engine.table.device),
        capacity=capacity,
        slabs=engine.table.pool.slots,
        chunk_latency_s={batch: round(value, 4) for batch, value in seconds.items()},
    )


def capacity_of(engine: Engine, seconds: dict[int, float], settings: Settings) -> int:
    """K: the configured limit, or what the profile keeps in real time; never more than there are slabs."""
    slots = engine.table.pool.slots
    if settings.worker_max_sessions is not None:
        return min(settings.worker_max_sessions, slots)
    config = engine.config
    chunk_s = config.frames_per_chunk * config.frames_per_latent / config.fps
    return sessions_in_real_time(seconds, chunk_s, settings.real_time_margin, slots)


def leave_at_once(reason: str) -> None:
    """The store has given this worker's sessions away: there is nothing to finish."""
    log.error("declared gone", reason=reason)
    logging.shutdown()
    os._exit(GONE_STATUS)


def expose(worker: Worker, engine: Engine) -> None:
    """Gauges over the table and the engine's memory."""
    table, pool = worker.table, engine.table.pool
    media_start = engine.config.media_start
    metrics.observe("resident_sessions", "Sessions in a slab.", lambda: table.slots_used)
    metrics.observe("capacity", "Sessions that may hold a slot.", lambda: table.capacity)
    metrics.observe("unpublished_chunks", "Chunks made and not acknowledged.", lambda: table.unpublished)
    metrics.observe(
        "lead_seconds",
        "Smallest lead of a resident session over its playhead.",
        lambda: min((held.lead_s for held in table.held(media_start) if held.resident), default=0.0),
        "s",
    )
    metrics.observe(
        "kv_bytes", "Slabs in use.", lambda: (pool.slots - pool.free) * pool.layout.total_bytes, "By"
    )
    metrics.observe("host_bytes", "Suspended sessions.", lambda: engine.table.host_bytes_used, "By")
    states = host_states(engine)
    metrics.observe("host_states", "Suspended sessions that fit there, of the largest.", lambda: states)


def _load(settings: Settings, load: Callable[[Settings], Models]) -> tuple[Engine, dict[int, float]]:
    engine = make_engine(load(settings), settings)
    switch_prompts(engine)
    return engine, measure(engine)
