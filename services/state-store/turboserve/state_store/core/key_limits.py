"""Limits of what may be used through one API key. No I/O, no clock: `now` is Unix seconds.

They hold besides those of the key's tenant (`core.tenants`), and use the same buckets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from turboserve.contracts.errors import InvalidInputError, KeyQuotaError
from turboserve.contracts.keys import LIMIT_NAMES, ChangeKey, KeyLimits, KeyRecord
from turboserve.contracts.sessions import RateLeft
from turboserve.state_store.core import tenants
from turboserve.state_store.core.tenants import DAY_S as DAY_S
from turboserve.state_store.core.tenants import day_of
from turboserve.wording import counted

CREATIONS, PROMPTS = "key_creations_per_minute", "key_prompts_per_minute"
BUDGET = "key_gpu_seconds_per_day"
NO_LIMITS = KeyLimits()


@dataclass(frozen=True)
class KeyUsage:
    """A key's limits, and what its sessions use, at one moment."""

    limits: KeyLimits = NO_LIMITS
    live: int = 0
    """Sessions that have not ended."""
    slots: int = 0
    """Sessions that hold a slot or wait for one."""
    gpu_seconds: float = 0.0
    """GPU-seconds of the key's sessions since the day began."""


@dataclass(frozen=True)
class KeyRates:
    """A key's buckets: the times at which they are full again, Unix seconds."""

    key: str
    creations_full_at: float = 0.0
    prompts_full_at: float = 0.0


def changed(record: KeyRecord, request: ChangeKey) -> KeyRecord:
    """Return the row with the limits that the request names. Raises InvalidInputError."""
    for name in request.changes:
        if name not in LIMIT_NAMES:
            raise InvalidInputError(
                f"limits.{name}: no such limit", field=f"limits.{name}", limit=", ".join(LIMIT_NAMES)
            )
    values = {name: getattr(request.limits, name) for name in request.changes}
    return record.model_copy(update={"limits": record.limits.model_copy(update=values)})


def check_sessions(use: KeyUsage, retry_s: float) -> None:
    """Raise KeyQuotaError if the key may not have another session."""
    most = use.limits.sessions
    if most is not None and use.live >= most:
        raise KeyQuotaError(
            f"this key has {counted(use.live, *tenants.NOT_ENDED)}, the limit is {most}",
            field="key_sessions",
            limit=most,
            retry_after_s=retry_s,
        )


def check_slot(use: KeyUsage, retry_s: float, now: float) -> None:
    """Raise KeyQuotaError if no further session of the key may take or wait for a slot."""
    most = use.limits.slots
    if most is not None and use.slots >= most:
        raise KeyQuotaError(
            counted(use.slots, "session of this key runs or waits", "sessions of this key run or wait")
            + f" for a slot, the limit is {most}",
            field="key_slots",
            limit=most,
            retry_after_s=retry_s,
        )
    budget = use.limits.gpu_seconds_per_day
    if budget is not None and use.gpu_seconds >= budget:
        reset = datetime.fromtimestamp(_tomorrow(now), UTC)
        raise KeyQuotaError(
            f"this key's sessions have used {use.gpu_seconds:.0f} of {budget:g} GPU-seconds today; the "
            f"budget begins anew at {reset:%Y-%m-%dT%H:%M:%SZ}",
            field=BUDGET,
            limit=budget,
            retry_after_s=until_tomorrow_s(now),
        )


def until_tomorrow_s(now: float) -> float:
    """Return the seconds until the next day of UTC begins."""
    return _tomorrow(now) - now


def _tomorrow(now: float) -> float:
    return (day_of(now) + 1) * DAY_S


def budget_left(use: KeyUsage, now: float) -> tuple[RateLeft, ...]:
    """Return what is left of the day's budget; nothing if there is none."""
    budget = use.limits.gpu_seconds_per_day
    if budget is None:
        return ()
    left = max(budget - use.gpu_seconds, 0.0)
    return (RateLeft(name=BUDGET, limit=budget, window_s=DAY_S, left=left, reset_s=until_tomorrow_s(now)),)


def create(rates: KeyRates, limits: KeyLimits, now: float) -> KeyRates:
    """Return the buckets after a creation. Raises KeyQuotaError."""
    return replace(
        rates, creations_full_at=_take(rates.creations_full_at, limits.creations_per_minute, now, CREATIONS)
    )


def submit_prompt(rates: KeyRates, limits: KeyLimits, now: float) -> KeyRates:
    """Return the buckets after a prompt, a pause or a change. Raises KeyQuotaError."""
    return replace(
        rates, prompts_full_at=_take(rates.prompts_full_at, limits.prompts_per_minute, now, PROMPTS)
    )


def creations_left(rates: KeyRates, limits: KeyLimits, now: float) -> tuple[RateLeft, ...]:
    return tenants.left(rates.creations_full_at, limits.creations_per_minute or 0, now, CREATIONS)


def prompts_left(rates: KeyRates, limits: KeyLimits, now: float) -> tuple[RateLeft, ...]:
    return tenants.left(rates.prompts_full_at, limits.prompts_per_minute or 0, now, PROMPTS)


def _take(full_at: float, per_minute: int | None, now: float, field: str) -> float:
    what = "new sessions" if field == CREATIONS else "prompts and pauses"
    return tenants.take(full_at, per_minute or 0, now, field, "this key", what, KeyQuotaError)
