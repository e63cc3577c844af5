"""Builds placement demands from sessions that need a worker, and decisions from the placement's choices."""

from __future__ import annotations

from collections.abc import Collection

from turboserve.contracts.sessions import Decision, Phase
from turboserve.scheduler.placement import Choice, Demand
from turboserve.scheduler.session_view import SessionView


def weights_needed(
    session: SessionView, served: Collection[tuple[str, str | None]], limit_s: float, now: float
) -> str | None:
    """Return the weights that made the session's chunks, or None if a worker with any weights will do.

    Any weights will do if:

    - the session has no chunks;
    - no worker in `served`, the pairs of model and weights of ready workers, has its weights;
    - the session has waited for `limit_s`.

    On other weights the session continues from its latents: its video may change its look, but it plays.
    """
    digest = session.record.weights_digest
    return digest if (session.record.model, digest) in served and session.waited_s(now) < limit_s else None


def demand_of(session: SessionView, kind: str, weights_digest: str | None, now: float) -> Demand:
    """Build the placement demand of a session. `weights_digest` comes from `weights_needed`."""
    record = session.record
    excluded = {worker for worker, (_, until) in session.refusals.items() if until > now}
    return Demand(
        session=session.id,
        model=record.model,
        kind=kind,
        holder=record.worker if record.phase is Phase.SUSPENDED else None,
        counted_on=record.worker if record.phase.holds_slot else None,
        excluded=frozenset(excluded),
        weights_digest=weights_digest,
    )


def _cause(session: SessionView, kind: str) -> str:
    if kind == "recover":
        return f"its worker {session.record.worker} is gone"
    if kind == "resume":
        return "its viewer has returned"
    if kind == "rebuild":
        return f"its worker {session.record.worker} is draining"
    if session.record.phase.holds_slot:
        return f"its worker {session.record.worker} refused it"
    return "new session"


def decision_of(session: SessionView, kind: str, choice: Choice, other_weights: bool, now: float) -> Decision:
    """Build the decision record of a choice.

    `other_weights`: the worker's weights differ from those that made the session's chunks.
    """
    return Decision(
        session=session.id,
        epoch=session.record.epoch + (choice.worker is not None),
        worker=choice.worker,
        kind="wait" if choice.worker is None else kind,
        reason=f"{_cause(session, kind)}: {choice.reason}"
        + (f"; no worker has its weights {session.record.weights_digest}" if other_weights else ""),
        numbers={**choice.numbers, "waited_s": session.waited_s(now)},
    )
