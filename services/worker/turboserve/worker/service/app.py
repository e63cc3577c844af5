"""Compose a worker: its platform, models, capacity and health checks, for the service runner."""

from __future__ import annotations

import os
from collections.abc import Callable

from turboserve import logs
from turboserve.contracts.errors import InvalidInputError
from turboserve.ids import new_id
from turboserve.service import Runtime
from turboserve.subject_types import Caller, identity_of
from turboserve.telemetry import TRACEPARENT, context_from, set_error, tracer
from turboserve.telemetry_names import START_PART, WORKER
from turboserve.worker import metrics
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.models import Models
from turboserve.worker.sequence_parallel.peers import Identity
from turboserve.worker.sequence_parallel.service import LoanService
from turboserve.worker.service.decode_roles import decode_elsewhere, start_decode_worker
from turboserve.worker.service.heartbeat import announced, starting
from turboserve.worker.service.host_platform import HostPlatform
from turboserve.worker.service.models import load_models
from turboserve.worker.service.ports import Platform
from turboserve.worker.service.quality import beyond_slabs, floor_seconds
from turboserve.worker.service.text_roles import encode_elsewhere, start_text_worker
from turboserve.worker.service.warm_up import sessions_in_real_time
from turboserve.worker.service.weights import PeerWeights, send_weights
from turboserve.worker.service.worker import Worker
from turboserve.worker.settings import Settings

ALLOTMENTS_S = 1.0
"""Longest time for which a worker that starts waits for all allotments of its decode workers, seconds. It
sends no heartbeat meanwhile."""

log = logs.get("worker")
_trace = tracer("worker")


async def start(runtime: Runtime, load: Callable[[Settings], Models] = load_models) -> None:
    """Compose the worker on this machine and export its gauges. `load`: brings the models to the device."""
    settings = runtime.settings
    assert isinstance(settings, Settings)
    if settings.roles == "decode":
        await start_decode_worker(runtime, settings, load, worker_id(settings, runtime.bus.user))
        return
    if settings.roles == "text":
        await start_text_worker(runtime, settings, load, worker_id(settings, runtime.bus.user))
        return
    await start_on(runtime, HostPlatform(settings, runtime.clock, load))


async def start_on(runtime: Runtime, platform: Platform) -> None:
    """Compose the worker on `platform` and export its gauges."""
    settings = runtime.settings
    assert isinstance(settings, Settings)
    # Not the current span: the worker's tasks are no part of its start.
    span = _trace.start_span("start worker", context=context_from(os.environ.get(TRACEPARENT)))
    try:
        worker = await compose(runtime, settings, platform)
        span.set_attribute(WORKER, worker.id)
    except Exception as error:
        set_error(span, error)
        raise
    finally:
        span.end()
    expose(worker)


async def compose(runtime: Runtime, settings: Settings, platform: Platform) -> Worker:
    """Announce the worker, load and warm up the models, and join the cluster.

    Raises InvalidInputError for an id of another identity, any error of `Platform.load`, and `OSError`.
    """
    name = worker_id(settings, runtime.bus.user)
    started_at = runtime.clock.wall()
    report = starting(name, settings, platform.device, platform.pid, started_at)
    async with announced(report, settings, runtime.bus, runtime.clock, platform.leave):
        filler = None
        if settings.weights == "peers":
            filler = PeerWeights(name, settings, runtime.bus, platform)
        loaded = await platform.load(filler)
    engine = loaded.engine
    capacity = capacity_of(engine, loaded.seconds, settings)
    floor = max(capacity, floor_capacity_of(engine, loaded.seconds, settings))
    served = {model: capacity_of(one.engine, one.seconds, settings) for model, one in loaded.classes.items()}
    worker = Worker(
        name, settings, runtime.bus, runtime.clock, platform, loaded, capacity, floor, started_at, served
    )
    runtime.check("engine", lambda: worker.alive)
    runtime.check("state store", lambda: worker.joined)
    runtime.warn("chunks_unpublished", worker.logs.warning)
    runtime.on_stop(worker.stop)
    if loaded.weights is not None:
        # First: the state store sends keys as soon as it knows that the worker is ready.
        await send_weights(worker, loaded.weights, runtime.bus, runtime.clock.monotonic)
    if settings.text_workers:
        encoding = encode_elsewhere(worker.id, engine, settings, platform.role_ports())
        runtime.on_stop(encoding.close)
    if settings.roles == "denoise":
        ports = platform.role_ports()
        decoding = decode_elsewhere(worker.id, engine, settings, capacity, runtime.spawn, ports)
        worker.decoding = decoding
        # Waiting sessions would fill all of K at the first report.
        await decoding.wait_until_known(ALLOTMENTS_S)
    await worker.start(runtime.spawn)
    if settings.sequence_parallel_directory is not None:
        limit_s = settings.sequence_parallel_timeout_s
        identity = Identity(name, engine.fingerprint, engine.device, limit_s)
        network = platform.peers(settings.sequence_parallel_directory, name)
        now, changed = runtime.clock.monotonic, worker.heartbeat.soon
        service = LoanService(identity, worker.runner, network, now, changed)
        worker.loan = lambda: service.loan
        runtime.spawn(service.run(), "loans")
    start = loaded.start
    for part, seconds in (
        ("import", start.import_s),
        ("weights", start.weights_s),
        ("warm_up", start.warm_up_s),
    ):
        metrics.start_duration.set(seconds, {START_PART: part})
    log.info(
        "worker joins",
        worker=worker.id,
        device=str(engine.device),
        capacity=capacity,
        floor_capacity=floor,
        slabs=engine.slabs,
        chunk_latency_s={batch: round(value, 4) for batch, value in loaded.seconds.items()},
        import_s=round(start.import_s, 3),
        weights_s=round(start.weights_s, 3),
        warm_up_s=round(start.warm_up_s, 3),
        weights_from="peers" if start.from_peers else "disk",
        weights=start.weights_digest,
        **({"classes": served} if served else {}),
    )
    return worker


def worker_id(settings: Settings, user: str) -> str:
    """Return the configured worker id, or a new id of the identity that `user` has at the broker.

    Raises InvalidInputError for an id of another identity: the broker would refuse its requests.
    """
    identity = Caller.from_token(user).id
    name = settings.worker_id or new_id(identity or "wrk")
    if identity is not None and identity_of(name) != identity:
        raise InvalidInputError(
            f"worker_id: {name} does not begin with {identity}_, the identity of the broker user {user}",
            field="worker_id",
            limit=identity,
        )
    return name


def capacity_of(engine: Engine, seconds: dict[int, float], settings: Settings) -> int:
    """K: the configured limit, or what the profile keeps in real time; never more than device and host memory
    hold."""
    places = engine.places
    if settings.worker_max_sessions is not None:
        return min(settings.worker_max_sessions, places)
    seconds = beyond_slabs(seconds, engine.slabs, places)
    return sessions_in_real_time(seconds, engine.config.chunk_media_s, settings.real_time_margin, places)


def floor_capacity_of(engine: Engine, seconds: dict[int, float], settings: Settings) -> int:
    """K_floor: what the profile keeps in real time at the floor's configuration; never more than device and
    host memory hold.

    0: the worker lowers no quality.
    """
    floor = floor_seconds(seconds, engine.fidelity.ladder) if engine.fidelity.lowers else {}
    if not floor:
        return 0
    margin, places = settings.real_time_margin, engine.places
    floor = beyond_slabs(floor, engine.slabs, places)
    return sessions_in_real_time(floor, engine.config.chunk_media_s, margin, places)


def expose(worker: Worker) -> None:
    """Export gauges of the table and of the engine's memory."""
    metrics.sessions_resident.add(
        worker, lambda worker: max(0, worker.table.slots_used - worker.engine.offloaded)
    )
    metrics.sessions_offloaded.add(worker, lambda worker: worker.engine.offloaded)
    metrics.offloaded_memory.add(worker, lambda worker: worker.engine.offloaded_bytes)
    metrics.capacity.add(worker, lambda worker: worker.decoding.limited(worker.table.capacity))
    metrics.chunks_unpublished.add(worker, lambda worker: worker.table.unpublished)
    metrics.lead.add(worker, _smallest_lead)
    metrics.kv.add(worker, lambda worker: sum(one.slab_bytes_used for one in worker.classes.engines))
    metrics.host_memory.add(worker, lambda worker: sum(one.host_bytes_used for one in worker.classes.engines))
    metrics.host_states.add(worker, lambda worker: min(one.host_states for one in worker.classes.engines))
    metrics.chunk_latency.add(worker, _chunk_latency)


def _chunk_latency(worker: Worker) -> dict[str, float]:
    return {str(batch): seconds for batch, seconds in worker.classes.profile.to_mapping().items()}


def _smallest_lead(worker: Worker) -> float:
    held = worker.table.held(worker.engine.config.media_start, worker.classes.starts)
    return min((session.lead_s for session in held if session.resident), default=0.0)
