"""Limits of what one tenant may use of a shared deployment. No I/O, no clock: `now` is Unix seconds.

Counts of sessions come from their rows. A rate is a token bucket. It holds the tokens of one minute, refills
evenly, and is stored as one number: the time at which it is full again (GCRA).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pydantic import JsonValue

from turboserve.contracts.control_declarations import value_text
from turboserve.contracts.errors import TenantLimitError, TurboServeError
from turboserve.contracts.requests import CreateSession
from turboserve.contracts.sessions import RateLeft
from turboserve.state_store.core.workers import ModelCapacity
from turboserve.wording import counted

MINUTE_S = 60.0
HOUR_S = 3_600.0
DAY_S = 86_400.0
CLOCK_SKEW_S = 60.0
"""Wall clocks of the store's instances differ by less than this, seconds."""
ROUNDING_S = 1e-3
"""Sums of tokens at a Unix time are exact to less than this, seconds."""
ROW_BYTES = 1_024
"""Approximate bytes of a session's row, its decisions and their indexes, without texts."""
CREATIONS, PROMPTS = "tenant_creations_per_minute", "tenant_prompts_per_minute"
STORED_RETRY_S = 3_600.0
"""Retry time, seconds. It is long, since rows are deleted long after the end of their sessions."""


@dataclass(frozen=True)
class TenantLimits:
    """The limits, which are the same for every tenant. 0: no limit."""

    sessions: int = 0
    """Sessions that have not ended."""
    suspended: int = 0
    """Suspended sessions that are not to be resumed. At this limit only creation is refused."""
    slots: int = 0
    """Sessions that hold a slot or wait for one, over all models."""
    slots_factor: float = 0.0
    """The factor α: while other tenants are known, a tenant gets one more place only if it has fewer than α
    times the places that are left. So one tenant takes at most α / (1 + α) of the places, and each of n
    tenants at most α / (1 + nα). With α = 3, one tenant takes at most three quarters of a model's places, and
    two tenants take at most three sevenths each. Source: dynamic thresholds, Choudhury and Hahne, 1998."""
    creations_per_minute: int = 0
    prompts_per_minute: int = 0
    """Prompts and pauses of all sessions together."""
    stored_bytes: int = 0
    """Maximum of `Tenant.stored_bytes`."""


@dataclass(frozen=True)
class Tenant:
    """A tenant's row: values that cannot be counted from its sessions' rows in constant time."""

    id: str
    creations_full_at: float = 0.0
    """Time at which the bucket of creations is full again, Unix seconds."""
    prompts_full_at: float = 0.0
    """Time at which the bucket of prompts is full again, Unix seconds."""
    stored_bytes: int = 0
    """Bytes of all sessions whose rows exist, including ended ones: `ROW_BYTES` each, and the UTF-8 bytes of
    their prompts, metadata and controls."""


@dataclass(frozen=True)
class TenantUse:
    """What a tenant's sessions use, counted from their rows at one moment."""

    live: int = 0
    """Sessions that have not ended."""
    suspended: int = 0
    """Suspended sessions that are not to be resumed."""
    slots: int = 0
    """Sessions that hold a slot or wait for one."""
    model_slots: int = 0
    """Sessions of the requested model that hold a slot or wait for one."""
    known: bool = False
    """Whether the tenant has a row."""
    others: bool = False
    """Whether another tenant has a row."""


def day_of(now: float) -> int:
    """Return the day of UTC, in days since 1 January 1970."""
    return int(now // DAY_S)


def hour_of(now: float) -> int:
    """Return the hour of UTC, in hours since 1 January 1970."""
    return int(now // HOUR_S)


def created_bytes(
    prompt: str, metadata: Iterable[tuple[str, str]], controls: Mapping[str, JsonValue] | None = None
) -> int:
    """Return the bytes that a new session stores."""
    texts = sum(text_bytes(key) + text_bytes(value) for key, value in metadata)
    return ROW_BYTES + text_bytes(prompt) + texts + controls_bytes(controls or {})


def controls_bytes(values: Mapping[str, JsonValue]) -> int:
    """Return the bytes of the values with which a session begins."""
    return sum(
        text_bytes(name) + text_bytes(value_text(value))
        for name, value in values.items()
        if value is not None
    )


def text_bytes(text: str) -> int:
    return len(text.encode())


NOT_ENDED = ("session that has not ended", "sessions that have not ended")


def check_slot(use: TenantUse, room: ModelCapacity, limits: TenantLimits, retry_s: float) -> None:
    """Raise TenantLimitError if no further session of the tenant may take or wait for a slot.

    `retry_s`: seconds after which a client should try again.
    """
    if limits.slots and use.slots >= limits.slots:
        raise TenantLimitError(
            counted(use.slots, "session of this tenant runs or waits", "sessions of this tenant run or wait")
            + f" for a slot, the limit is {limits.slots}",
            field="tenant_slots",
            limit=limits.slots,
            retry_after_s=retry_s,
        )
    left = max(room.capacity - room.demand, 0)
    if limits.slots_factor and use.others and use.model_slots >= limits.slots_factor * left:
        raise TenantLimitError(
            f"this tenant has {counted(use.model_slots, 'slot')} for {room.model}, of {room.capacity}; the "
            f"rest ({left}) is reserved for other tenants",
            field="tenant_slots_factor",
            limit=use.model_slots,
            retry_after_s=retry_s,
        )


def check_sessions(use: TenantUse, limits: TenantLimits, retry_s: float) -> None:
    """Raise TenantLimitError if the tenant may not have another session."""
    if limits.sessions and use.live >= limits.sessions:
        raise TenantLimitError(
            f"this tenant has {counted(use.live, *NOT_ENDED)}, the limit is {limits.sessions}",
            field="tenant_sessions",
            limit=limits.sessions,
            retry_after_s=retry_s,
        )
    if limits.suspended and use.suspended >= limits.suspended:
        raise TenantLimitError(
            f"this tenant has {counted(use.suspended, 'suspended session')}, the limit is "
            f"{limits.suspended}: end or resume one",
            field="tenant_suspended",
            limit=limits.suspended,
            retry_after_s=retry_s,
        )


def create(tenant: Tenant, request: CreateSession, limits: TenantLimits, now: float) -> Tenant:
    """Return the tenant's row after this creation. Raises TenantLimitError."""
    per_minute = limits.creations_per_minute
    full_at = take(tenant.creations_full_at, per_minute, now, CREATIONS, "this tenant", "new sessions")
    stored = _stored(
        tenant, created_bytes(request.prompt, request.metadata.items(), request.controls), limits
    )
    return replace(tenant, creations_full_at=full_at, stored_bytes=stored)


def submit_prompt(tenant: Tenant, prompt: str, limits: TenantLimits, now: float) -> Tenant:
    """Return the tenant's row after this prompt. Raises TenantLimitError."""
    stored = _stored(tenant, text_bytes(prompt), limits)
    return replace(pause(tenant, limits, now), stored_bytes=stored)


def pause(tenant: Tenant, limits: TenantLimits, now: float) -> Tenant:
    """Return the tenant's row after a pause, which costs as much as a prompt. Raises TenantLimitError.

    The event of a pause is as long as that of a prompt.
    """
    per_minute = limits.prompts_per_minute
    full_at = take(tenant.prompts_full_at, per_minute, now, PROMPTS, "this tenant", "prompts and pauses")
    return replace(tenant, prompts_full_at=full_at)


def refuse(tenant: Tenant, now: float) -> Tenant:
    """Return the tenant's row after a creation at `now` for which there was no room."""
    return replace(tenant, creations_full_at=max(tenant.creations_full_at, now))


def take(
    full_at: float,
    per_minute: int,
    now: float,
    field: str,
    holder: str,
    what: str,
    error: type[TurboServeError] = TenantLimitError,
) -> float:
    """Take one token. Returns when the bucket is full again. Raises `error` if it is empty."""
    if not per_minute:
        return full_at
    if not now < full_at <= now + MINUTE_S + CLOCK_SKEW_S:
        # The bucket is full, or the wall clock was set back by more than instances differ: assume it is full.
        full_at = now
    token_s = MINUTE_S / per_minute
    wait_s = full_at + token_s - now - MINUTE_S
    if wait_s > ROUNDING_S:
        raise error(
            f"{holder} may have {per_minute} {what} per minute",
            field=field,
            limit=per_minute,
            retry_after_s=wait_s,
        )
    return full_at + token_s


def left(full_at: float, per_minute: int, now: float, field: str) -> tuple[RateLeft, ...]:
    """Return what is left in a bucket that is full at `full_at`; nothing if there is no limit."""
    if not per_minute:
        return ()
    wait_s = max(full_at - now, 0.0)
    tokens = math.floor(per_minute * max(MINUTE_S - wait_s, 0.0) / MINUTE_S + 1e-2)
    return (RateLeft(name=field, limit=per_minute, window_s=MINUTE_S, left=tokens, reset_s=wait_s),)


def _stored(tenant: Tenant, more: int, limits: TenantLimits) -> int:
    stored = tenant.stored_bytes + more
    if limits.stored_bytes and stored > limits.stored_bytes:
        raise TenantLimitError(
            f"this tenant's sessions would take {stored} bytes ({ROW_BYTES} each, prompts and metadata), at "
            f"most {limits.stored_bytes} are kept; an ended session counts until its row is deleted",
            field="tenant_stored_bytes",
            limit=limits.stored_bytes,
            retry_after_s=STORED_RETRY_S,
        )
    return stored
