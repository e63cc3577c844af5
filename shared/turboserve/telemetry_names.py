"""Names of metrics, spans and attributes: one scheme, and the declared spans and attributes.

A name of OpenTelemetry's semantic conventions is used where one exists. All other names of metrics and
attributes are `turboserve.…`, in lower case, with dots between the levels and `_` within a word.
"""

from __future__ import annotations

import re

COMPONENTS = {
    "gateway": "gateway",
    "scheduler": "scheduler",
    "autoscaler": "autoscaler",
    "worker": "worker",
    "state_store": "state-store",
    "recorder": "recorder",
    "webhooks": "webhooks",
    "bus": "all",
    "process": "all",
}
"""Second level of a metric's name → the service that has it."""

SESSION = "turboserve.session.id"
WORKER = "turboserve.worker.id"
VIEWER = "turboserve.viewer.id"
CHUNK_INDEX = "turboserve.chunk.index"
CONDITION = "turboserve.condition"
CONTROL_SEQ = "turboserve.control.seq"
EPOCH = "turboserve.epoch"
BATCH_SIZE = "turboserve.batch.size"
BEHAVIOR = "turboserve.behavior"
DECISION = "turboserve.decision.kind"
DECISION_REASON = "turboserve.decision.reason"
DECISION_NUMBERS = "turboserve.decision.numbers."
"""Prefix: the name of the number follows."""
EVENT = "turboserve.event.type"
MIGRATION_BYTES = "turboserve.migration.bytes"
MIGRATION_ON_HOST = "turboserve.migration.on_host"
MIGRATION_ROUND = "turboserve.migration.round"
MIGRATION_ROUNDS = "turboserve.migration.rounds"
MIGRATION_STEP = "turboserve.migration.step"
LOAN_ROLE = "turboserve.loan.role"
MODEL = "turboserve.model"
PERIODIC = "turboserve.periodic"
POOL = "turboserve.pool"
POOL_ACTION = "turboserve.pool.action"
POOL_MEMBER_PHASE = "turboserve.pool.member.phase"
POOL_TARGET = "turboserve.pool.target"
PROMPT_OUTCOME = "turboserve.prompt.outcome"
REASON = "turboserve.reason"
HEADER = "turboserve.request.header"
STREAM = "turboserve.log.stream"
MESSAGE = "turboserve.message.kind"
SCHEDULER_EVENT = "turboserve.scheduler.event"
TENANT = "turboserve.tenant"
START_PART = "turboserve.start.part"
TAKEOVER = "turboserve.takeover.context"
TIER = "turboserve.session.tier"
TRANSFER_BACKEND = "turboserve.transfer.backend"
TRANSFER_ROLE = "turboserve.transfer.role"
WARNING = "turboserve.warning"
WEBHOOK = "turboserve.webhook.id"
WEBHOOK_ATTEMPT = "turboserve.webhook.attempt"
WEBHOOK_OUTCOME = "turboserve.webhook.outcome"

ERROR_TYPE = "error.type"
DESTINATION = "messaging.destination.name"

ATTRIBUTES = {
    SESSION: "The session.",
    WORKER: "A worker.",
    VIEWER: "The viewer.",
    CHUNK_INDEX: "The chunk.",
    CONDITION: "A condition of readiness, as in `/readyz`.",
    CONTROL_SEQ: "The newest prompt that the chunk shows.",
    EPOCH: "The ownership.",
    BATCH_SIZE: "Sessions in the batch.",
    BEHAVIOR: "Class of behavior: 0 for the sessions that are expected to stay shortest.",
    DECISION: "Kind of a decision of the scheduler or the autoscaler.",
    DECISION_REASON: "Its reason.",
    f"{DECISION_NUMBERS}NAME": "Its numbers.",
    EVENT: "Type of an event of the log.",
    MIGRATION_STEP: "Step of a migration: `begin`, `commit`, `abandon`.",
    MIGRATION_ROUND: "Number of a round of copying.",
    MIGRATION_ROUNDS: "Rounds of a copy.",
    MIGRATION_BYTES: "Bytes of a round, or of all rounds of a copy.",
    MIGRATION_ON_HOST: "The state is in the host memory of the source.",
    PERIODIC: "Work that is done at intervals: a heartbeat, a listing, a chunk that follows no request.",
    POOL: "Name of a pool of workers.",
    POOL_ACTION: "Action on the pool.",
    POOL_MEMBER_PHASE: "Phase of a place in the pool, such as `ready`.",
    POOL_TARGET: "Size of the pool that was decided.",
    PROMPT_OUTCOME: "What became of a prompt: `applied` or `superseded`.",
    REASON: "Why something was refused or ignored.",
    HEADER: "Header of an HTTP request, in lower case, that made it refused.",
    STREAM: "A stream of the log.",
    MESSAGE: "First token of a message's subject.",
    SCHEDULER_EVENT: "Input of the scheduler's core, by class.",
    LOAN_ROLE: "Part of this worker in a loan: `home` borrows a device, `donor` lends its own.",
    MODEL: "Model of sessions, with the frame size where it is not the model's own.",
    TENANT: "A tenant.",
    START_PART: "Part of a start: `import`, `weights` or `warm_up`.",
    TAKEOVER: "What was left of a session's state: `whole`, `partial` or `lost`.",
    TIER: "Tier of a session by its service credit: `urgent`, `normal` or `relaxed`.",
    TRANSFER_BACKEND: "Backend of a transfer.",
    TRANSFER_ROLE: "Role of this worker in a transfer: `source` or `target`.",
    WARNING: "A warning of `/readyz`, by name.",
    WEBHOOK: "A webhook.",
    WEBHOOK_ATTEMPT: "Number of an attempt to deliver an event.",
    WEBHOOK_OUTCOME: "Outcome of such an attempt: `delivered`, `refused` (another status), `failed` (no "
    "answer) or `blocked` (the address is not allowed).",
}
"""Every attribute `turboserve.…` of a span or a metric → its meaning."""

SPANS = {
    "request {subject}": "A request to another service, until its answer.",
    "process {subject}": "The answer to a request.",
    "process {type}": "A client's message over a WebSocket.",
    "process event": "An event of the log, at the scheduler.",
    "send {family}": "The append of a message to the log.",
    "decide {kind}": "A decision of the scheduler, or of the autoscaler (`size`).",
    "launch worker": "The provider starts a process.",
    "start worker": "A worker loads, warms up and joins.",
    "admit session": "From the assignment to the engine: end of the log, latents, slot.",
    "generate chunk": "From the first step of a chunk to the acknowledgement of its append.",
    "text": "Stage of a chunk: encode the prompt.",
    "recache": "Stage of a chunk: render the context under a new prompt.",
    "denoise": "Stage of a chunk: one denoising step.",
    "decode": "Stage of a chunk: latents to frames.",
    "package": "Stage of a chunk: frames to a video fragment.",
    "fetch state": "The copy of a migration, at the target.",
    "copy round": "One round of the copy.",
    "send state": "The transfer of a migration, at the source.",
    "quiesce session": "The source pauses the session.",
    "append last chunks": "The source waits until its chunks are acknowledged.",
    "deliver chunk": "A chunk is sent to a viewer.",
    "show first frame": "From the sending of the first chunk until the viewer shows it.",
    "deliver event": "One attempt to send an event to a webhook.",
    "TRANSACTION": "A transaction of Postgres.",
}
"""Every name of a span of the services. `{…}` stands for one word: letters, digits, `.`, `-` and `_`."""

_WORD = r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*"
_METRIC = re.compile(rf"turboserve\.(?:{'|'.join(COMPONENTS)})(?:\.{_WORD})+")
_ATTRIBUTE = re.compile(rf"turboserve(?:\.{_WORD})+")
_SPANS = re.compile("|".join(re.sub(r"\\\{\w+\\\}", r"[\\w.-]+", re.escape(name)) for name in SPANS))
_UNIT = re.compile(r"s|By|1|\{[a-z]+\}")
_NOT_IN_NAMES = frozenset({"total", "count", "seconds", "bytes", "ratio", "s", "ms", "by"})
"""Words that a name has no need of: units, and endings that the Prometheus exporter adds."""


class TelemetryNameError(ValueError):
    """A name or a unit outside the scheme."""


def check_metric(name: str, unit: str) -> None:
    """Raise TelemetryNameError for a metric whose name or unit is outside the scheme."""
    if not _METRIC.fullmatch(name):
        raise TelemetryNameError(f"metric {name!r}: not turboserve.COMPONENT.NAME")
    if surplus := _NOT_IN_NAMES & set(re.split(r"[._]", name)):
        raise TelemetryNameError(f"metric {name!r}: {', '.join(surplus)} belongs to the unit")
    if not _UNIT.fullmatch(unit):
        raise TelemetryNameError(f"metric {name!r}: the unit {unit!r} is none of s, By, 1 and {{thing}}")


def is_own_attribute(name: str) -> bool:
    """Whether this attribute is declared in `ATTRIBUTES`."""
    if name.startswith(DECISION_NUMBERS):
        return _ATTRIBUTE.fullmatch(name) is not None
    return name in ATTRIBUTES


def is_span(name: str) -> bool:
    """Whether this name of a span is declared in `SPANS`."""
    return _SPANS.fullmatch(name) is not None
