"""The invariants by name, and the short form of commands in a trace."""

from __future__ import annotations

INVARIANTS = {
    "one_executor": "1: every accepted chunk is from the owner, under the current epoch and within its lease",
    "epochs_increase": "2: epochs strictly increase, in the rows and in the log",
    "chunks_contiguous": "3: accepted chunks are 0, 1, 2, …, each once, each generated from the previous one",
    "verified_before_flip": "4: a session migrates only with the state after the last chunk in the log",
    "converges_after_faults": "5: soon after the last fault, every session runs, is suspended or has ended",
    "capacity": "6: reserved plus used never exceeds a worker's capacity. With several classes: "
    "Σ x_j / n_j ≤ 1",
    "serves_class": "a session is assigned only to a worker that serves its class, and runs as this class",
    "memory_returns": "7: device and host memory return to their baseline when sessions end",
    "client_sees_prefix": "8: the chunks that a client receives are a prefix of the log. What it shows is "
    "the log, less what it chose to skip",
    "scale_in_harmless": "9: scale-in never removes a worker that holds a session, and ends none",
    "stale_metrics_never_shrink": "10: lost or stale metrics never shrink the pool",
    "bounded_scaling": "11: under constant load the number of scaling actions is bounded",
    "keeps_places": "where the pool has several offers, one worker at a time leaves, and every live session "
    "with a place has one on the workers that stay",
    "debt_never_shrinks": "where the pool absorbs bursts, it never shrinks while chunks are late or below "
    "their best quality, or a worker borrows another one's device",
    "sessions_rest": "a session that migrated rests before it migrates again for balance or to save chunks",
    "deterministic": "12: same seed, same events, same decisions",
    "loans_harmless": "a worker that lends its device can still make each chunk of its own sessions in time",
    "pinned_is_best": "every chunk of a pinned session is generated at the best configuration",
    "tenant_limits": "no tenant exceeds its limits of sessions, slots, suspended sessions, bytes and rates",
    "tenants_apart": "no tenant reads, watches or changes a session of another",
    "one_leader": "at most one scheduler leads at a time",
    "no_core_fails": "no core and no shell raises an unexpected exception",
    "events_complete": "every committed change of a session is in the event log, in the order of its commits",
    "events_numbered": "the events of a session have the numbers 1, 2, 3, … in the order of the log",
}


def brief(command: object) -> str:
    """Return a short form of a command: its name and its main fields."""
    names = ("session", "worker", "migration", "reason")
    fields = (
        f"{name}={getattr(command, name)}" for name in names if getattr(command, name, None) is not None
    )
    return " ".join((type(command).__name__, *fields))
