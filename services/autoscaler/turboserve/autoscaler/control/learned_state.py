"""What the learner knows, as a short text that the state store keeps over a restart of the autoscaler.

The text is JSON: the fading sums of every candidate, the choice, and the measured start-ups. It holds no
virtual pools: these begin anew, as after a long silence. A text of another version, of other candidates or of
another policy is refused, since its sums would mean something else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turboserve.autoscaler.control.headroom import Headroom
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.contracts.pool import LEARNED_LIMIT

Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class LearnedStateError(ValueError):
    """A stored state that cannot be used, and why."""


class CandidateSums(BaseModel):
    """The fading sums of one candidate."""

    model_config = ConfigDict(frozen=True)

    cost_s: Amount
    """Worker-seconds."""
    late: Amount
    """Late sessions."""


class LearnedState(BaseModel):
    """What the learner and the start-up meter know."""

    model_config = ConfigDict(frozen=True)

    version: Literal[1] = 1
    conditions: str = Field(max_length=64)
    """Digest of what the sums depend on: `conditions_of`."""
    at: Amount
    """When the sums were read, Unix seconds."""
    seen_s: Amount
    """Time that was learned from, seconds."""
    chosen: int = Field(ge=0)
    """Index of the candidate in force."""
    sums: tuple[CandidateSums, ...] = Field(max_length=64)
    start_ups_s: tuple[Amount, ...] = Field(default=(), max_length=64)
    """The last measured start-ups, oldest first, seconds."""


def conditions_of(policy: ControlPolicy, candidates: Sequence[Headroom]) -> str:
    """Return a digest of all that decides what a candidate costs and delays, prices excepted."""
    values = {
        **policy.dynamics,
        "least": policy.least,
        "most": policy.most,
        "late_after_s": policy.late_after_s,
        "candidates": [str(each) for each in candidates],
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def parse(text: str, conditions: str, candidates: int) -> LearnedState:
    """Parse a stored state. Raises LearnedStateError if it is broken, old, or of other settings."""
    if len(text) > LEARNED_LIMIT:
        raise LearnedStateError(f"{len(text)} characters, at most {LEARNED_LIMIT}")
    try:
        state = LearnedState.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "text"
        raise LearnedStateError(f"{place}: {first['msg']}") from None
    if state.conditions != conditions:
        raise LearnedStateError("it was learned under other settings of the pool")
    if len(state.sums) != candidates or state.chosen >= candidates:
        raise LearnedStateError(f"it has {len(state.sums)} candidates, not {candidates}")
    return state
