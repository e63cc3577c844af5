"""From a session that needs a worker to the placement's question, and from its answer to a decision."""

from __future__ import annotations

from collections.abc import Collection

from turboserve.contracts.sessions import Decision, Phase
from turboserve.scheduler.placement import Choice, Demand
from turboserve.scheduler.view_models import SessionView


def weights_needed(
    session: SessionView, served: Collection[tuple[str, str | None]], limit_s: float, now: float
) -> str | None:
    """The weights that made the session's chunks, while a worker that has them may still take it.

    None: any weights will do. It has no chunks; or no worker in `served` (model and weights) has them; or it
    has waited for `limit_s`. Then it goes on from its latents: it may look different, but it plays.
    """
    digest = session.record.weights_digest
    waited_s = 0.0 if session.waiting_since is None else now - session.waiting_since
    return digest if (session.record.model, digest) in served and waited_s < limit_s else None


def demand_of(session: SessionView, kind: str, weights_digest: str | None, now: float) -> Demand:
    """`weights_digest`: see `weights_needed`."""
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
        return "its user is back"
    if kind == "rebuild":
        return f"its worker {session.record.worker} is to be emptied"
    if session.record.phase.holds_slot:
        return f"its worker {session.record.worker} refused it"
    return "it is new"


def decision_of(session: SessionView, kind: str, choice: Choice, other_weights: bool, now: float) -> Decision:
    """The choice with its reason and its numbers, as it is kept. `other_weights`: the worker does not have
    those that made the session's chunks."""
    waited_s = 0.0 if session.waiting_since is None else now - session.waiting_since
    return Decision(
        session=session.id,
        epoch=session.record.epoch + (choice.worker is not None),
        worker=choice.worker,
        kind="wait" if choice.worker is None else kind,
        reason=f"{_cause(session, kind)}: {choice.reason}"
        + (f"; its weights {session.record.weights_digest} are nowhere to be had" if other_weights else ""),
        numbers={**choice.numbers, "waited_s": waited_s},
    )
