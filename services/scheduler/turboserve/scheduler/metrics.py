"""Metrics of the scheduler."""

from __future__ import annotations

from turboserve.instruments import Instruments
from turboserve.telemetry_names import DECISION, ERROR_TYPE, MIGRATION_STEP, SCHEDULER_EVENT

_scheduler = Instruments("scheduler")

decision_duration = _scheduler.histogram(
    "turboserve.scheduler.decision.duration",
    "s",
    "Time the core takes for one event.",
    SCHEDULER_EVENT,
    buckets=(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)
decisions = _scheduler.counter(
    "turboserve.scheduler.decisions", "{decision}", "Decisions by kind; `wait` changes nothing.", DECISION
)
idle_suspensions = _scheduler.counter(
    "turboserve.scheduler.idle_suspensions", "{session}", "Sessions found idle."
)
workers_declared_gone = _scheduler.counter(
    "turboserve.scheduler.workers.declared_gone", "{worker}", "Workers that exceeded the time-out."
)
refusals = _scheduler.counter(
    "turboserve.scheduler.refusals", "{request}", "Commands and operator requests refused.", ERROR_TYPE
)
migrations = _scheduler.counter(
    "turboserve.scheduler.migrations", "{migration}", "Migrations committed and abandoned.", MIGRATION_STEP
)
terms = _scheduler.counter("turboserve.scheduler.terms", "{term}", "Times this process became leader.")
leads = _scheduler.observed_gauge(
    "turboserve.scheduler.leads", "{leader}", "1 at the leader, 0 at a standby."
)
term = _scheduler.observed_gauge("turboserve.scheduler.term", "{term}", "Number of the leader's term.")
sessions_waiting = _scheduler.observed_gauge(
    "turboserve.scheduler.sessions.waiting", "{session}", "Sessions that wait for a slot."
)
workers_known = _scheduler.observed_gauge(
    "turboserve.scheduler.workers.known", "{worker}", "Workers in the leader's view."
)
