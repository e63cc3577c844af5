"""Feeds the controller with pool, load and session events, and passes its target size to the pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager

from opentelemetry.trace import Span

from turboserve import logs
from turboserve.autoscaler.control import events
from turboserve.autoscaler.control.controller import Controller
from turboserve.autoscaler.control.events import SessionChange
from turboserve.autoscaler.control.learned_state import LearnedStateError
from turboserve.autoscaler.control.workload import WorkloadDetector
from turboserve.autoscaler.pool_members import STARTING, PoolMember
from turboserve.bus import UNREADABLE
from turboserve.contracts.autoscale import ProfileTable
from turboserve.contracts.base import NUMBER_LIMIT
from turboserve.contracts.decoding import DecodeCapacity
from turboserve.contracts.events import (
    SessionCreated,
    SessionEnded,
    SessionResumeRequested,
    SessionSuspended,
    event_from_bytes,
)
from turboserve.contracts.pool import LoadFeedback, PoolMemberPhase, PoolOrders
from turboserve.telemetry import context_from, links_to, tracer
from turboserve.telemetry_names import DECISION, DECISION_NUMBERS, DECISION_REASON, POOL_TARGET

log = logs.get("autoscaler")
_trace = tracer("autoscaler")
ARRIVALS = 16
"""Sessions to which a change of size is linked at most."""
ARRIVAL_S = 30.0
"""Age from which a session is no cause of a change of size any more, seconds."""
_HAPPENINGS = {
    SessionCreated: SessionChange.ARRIVAL,
    SessionEnded: SessionChange.DEPARTURE,
    SessionResumeRequested: SessionChange.ACTIVATION,
    SessionSuspended: SessionChange.IDLING,
}


class ControlLoop:
    """Feeds the controller of the pool that serves `model`, and calls `resize` when the target changes.

    The loop decides nothing before the state store has returned the pool's orders, since orders outlive this
    process.
    """

    def __init__(
        self,
        controller: Controller,
        model: str,
        shipped: ProfileTable,
        override: int | None,
        resize: Callable[[int, str], None],
        others: Collection[str] = (),
    ) -> None:
        """`others`: further models that each worker of the pool serves."""
        self.controller, self.model = controller, model
        self._others = frozenset(others)
        self._shipped, self._override, self._dry_run = shipped, override, controller.dry_run
        self._resize = resize
        self.orders: PoolOrders | None = None
        """The orders in force; None: not known yet."""
        self._last_target = controller.target
        self._own: tuple[LoadFeedback, float] | None = None
        """The last feedback about `model`, and when it came."""
        self._decoding: DecodeCapacity | None = None
        """What the last accepted feedback says of decode workers."""
        self._decodes = False
        """Whether all ready workers of the pool, or the last ones, decode themselves."""
        self._waiting: dict[str, float] = {}
        """Further model → when feedback last said that its sessions wait, and that no worker serves it."""
        self._arrivals: deque[tuple[float, str]] = deque(maxlen=ARRIVALS)
        """When sessions became active since the last change of size, and their trace contexts."""

    @property
    def maximum(self) -> int:
        """Number of workers that the pool starts without another order, at most."""
        control, policy = self.controller, self.controller.policy
        if control.override is not None:
            return control.override
        # A pool that does not grow also starts workers: its first ones, and replacements.
        return control.target if control.dry_run else policy.most

    @property
    def further_models(self) -> dict[str, tuple[str, int]]:
        """Models that some workers of the pool serve instead of `model`, and how many may: by a name of the
        model's row in the state store."""
        return {}

    @property
    def absorbs(self) -> bool:
        """Whether workers may hold more than K sessions. Not before the orders are known."""
        return self.orders is not None and self.controller.absorbs

    @property
    def decode_sessions(self) -> int | None:
        """Sessions that decode workers carry, and that workers which decode may have, by the last feedback.

        Workers that the pool may still start are among the latter, if all its workers decode. None: no worker
        of the model has decode workers.
        """
        known = self._decoding
        if known is None:
            return None
        advisor = self.controller.advisor
        coming = max(self.maximum - advisor.pool.ready, 0) * advisor.capacity if self._decodes else 0
        return min(known.sessions + known.own + coming, NUMBER_LIMIT)

    def tick(self, members: Iterable[PoolMember], now: float) -> None:
        """Feed the pool's members and the time. Called once a second."""
        members = list(members)
        decodes = _decode(members)
        self._decodes = self._decodes if decodes is None else decodes
        phases = [member.phase for member in members if member.wanted]
        seen = events.PoolObserved(
            ready=phases.count(PoolMemberPhase.READY),
            starting=sum(phase in STARTING for phase in phases),
            suspended=sum(member.suspended for member in members),
        )
        self._handle(seen, now)
        self._handle(events.ControlTick(), now)

    def on_orders(self, body: bytes, now: float) -> None:
        """Feed the scheduler's load feedback, as published. Unreadable feedback is counted."""
        try:
            feedback = LoadFeedback.from_bytes(body)
        except UNREADABLE as error:
            # The contract also refuses a load that is not a finite number.
            self.controller.advisor.feedback_monitor.refuse("unreadable_feedback", now)
            log.warning("unreadable load feedback", error=str(error))
            return
        self.on_feedback(feedback, now)

    def on_feedback(self, feedback: LoadFeedback, now: float) -> None:
        """Feed the scheduler's load feedback. Feedback about another model is ignored.

        The load of the pool's first model counts the sessions of all, if a worker runs. If none does, the
        scheduler does not know which models share workers. Then sessions of the others that wait count as
        one, unless sessions of the first model wait, too: these already ask for workers.
        """
        if feedback.model in self._others:
            if not feedback.waiting or feedback.workers:
                self._waiting.pop(feedback.model, None)
                return
            self._waiting[feedback.model] = now
            if self._own is not None and self._is_fresh(self._own[1], now):
                feedback = self._own[0].model_copy(update={"at": feedback.at})
        elif feedback.model == self.model:
            self._own = feedback, now
        else:
            return
        others_wait = any(self._is_fresh(at, now) for at in self._waiting.values())
        if others_wait and not feedback.workers and (feedback.model != self.model or not feedback.required):
            feedback = feedback.model_copy(update={"model": self.model, "required": 1, "waiting": 1})
        decoding = feedback.decoding
        if self._decodes and decoding is not None:
            # Another pool's workers have decode workers. Those of this one need none.
            feedback = feedback.model_copy(update={"decoding": None})
        self._handle(events.FeedbackReceived(feedback), now)
        if self.controller.advisor.feedback_monitor.feedback is feedback:
            # It was accepted: it is plausible, and not older than another one.
            self._decoding = decoding

    def _is_fresh(self, heard_at: float, now: float) -> bool:
        return now - heard_at <= self.controller.policy.stale_s

    def on_event(self, body: bytes, now: float, traceparent: str | None = None) -> None:
        """Feed a session event, as published. Events of other models are ignored.

        `traceparent`: the event's trace context. A launch that the session causes continues it.
        """
        try:
            event = event_from_bytes(body)
        except UNREADABLE as error:
            self.controller.advisor.feedback_monitor.refused["unreadable_event"] += 1
            log.warning("unreadable event", error=str(error))
            return
        kind = _HAPPENINGS.get(type(event))
        if kind is not None and event.record.model in (self.model, *self._others):  # type: ignore[union-attr]
            if traceparent is not None and kind in (SessionChange.ARRIVAL, SessionChange.ACTIVATION):
                self._arrivals.append((now, traceparent))
            self._handle(events.SessionChanged(kind), now)

    def recall(self, learned: str, wall: float) -> None:
        """Continue from what an earlier process learned. A text that cannot be used is ignored, and logged.

        `wall`: Unix seconds.
        """
        try:
            self.controller.recall(learned, wall)
        except LearnedStateError as error:
            log.warning("stored learned headroom ignored; learning anew", error=str(error))
        else:
            log.info("learned headroom restored")

    def ordered(self, orders: PoolOrders, now: float) -> None:
        """Apply the pool's orders from the state store. Orders with a known version change nothing."""
        known = self.orders
        if known is not None and known.version == orders.version:
            return
        self.orders = orders
        control = self.controller
        override = self._override if orders.override is None else orders.override
        if override is not None:
            override = min(max(override, control.policy.least), control.policy.most)
        self._handle(
            events.SizeOverridden(
                override, "an operator" if orders.override is not None else "the configuration"
            ),
            now,
        )
        self._handle(events.DryRunSet(self._dry_run if orders.dry_run is None else orders.dry_run), now)
        table = orders.table or self._shipped
        if table != control.table:
            made = table.provenance
            detector = control.detector
            if (made.epoch_s, made.window) != (detector.epoch_s, detector.window):
                # The table applies only to volatilities measured as in its profiling.
                control.detector = WorkloadDetector(made.epoch_s, made.window)
            self._handle(events.TableReplaced(table), now)

    def _handle(self, event: events.Event, now: float) -> None:
        if self.orders is None:
            return
        decision = self.controller.handle(event, now)
        if decision is not None:
            log.info("scaling", action=decision.action.value, target=decision.target, reason=decision.reason)
        if self.controller.target != self._last_target:
            grown, self._last_target = self.controller.target > self._last_target, self.controller.target
            with self._span(decision, now, grown=grown):
                self._resize(self._last_target, decision.reason if decision is not None else "the controller")

    def _span(
        self, decision: events.Decision | None, now: float, *, grown: bool
    ) -> AbstractContextManager[Span]:
        """Return the span of a change of size. Growth continues the trace of the session that came first."""
        recent = [text for at, text in self._arrivals if now - at <= ARRIVAL_S] if grown else []
        self._arrivals.clear()
        attributes: dict[str, str | float] = {POOL_TARGET: self.controller.target}
        if decision is not None:
            attributes[DECISION] = decision.action.value
            attributes[DECISION_REASON] = decision.reason
            for name, value in decision.numbers.items():
                attributes[DECISION_NUMBERS + name] = value
        return _trace.start_as_current_span(
            "decide size",
            context=context_from(recent[0] if recent else None),
            links=links_to(*recent[1:]),
            attributes=attributes,
        )


def _decode(members: Iterable[PoolMember]) -> bool | None:
    """Whether all ready workers of a pool decode themselves. None if none has reported yet."""
    ready = [one for one in members if one.phase is PoolMemberPhase.READY and one.reported_at is not None]
    return all(one.denoised is None for one in ready) if ready else None
