"""The invariants by name, and the short form of commands in a trace."""

from __future__ import annotations

INVARIANTS = {
    "one_executor": "1: every accepted chunk is its owner's, under the current epoch; no lease is outlived",
    "epochs_increase": "2: epochs strictly increase, in the rows and in the log",
    "chunks_contiguous": "3: accepted chunks are 0, 1, 2, …, each once, each made from the one before",
    "verified_before_flip": "4: a session migrates only in the state that the log's end was made from",
    "converges_after_faults": "5: once faults stop, every session runs, is suspended or has ended in time",
    "capacity": "6: reserved plus used never exceeds a worker's capacity",
    "memory_returns": "7: device and host memory return to their baseline when sessions end",
    "client_sees_prefix": "8: what a client sees is a prefix of the log",
    "scale_in_harmless": "9: scale-in never removes a worker that holds a session, and ends none",
    "stale_metrics_never_shrink": "10: lost or stale metrics never shrink the pool",
    "bounded_scaling": "11: under constant load the number of scaling actions is bounded",
    "deterministic": "12: same seed, same events, same decisions",
    "one_leader": "at most one scheduler leads at a time",
    "no_core_fails": "no core and no shell raises what its callers do not expect",
    "events_complete": "every committed change of a session is in the event log, in the order of its commits",
}


def brief(command: object) -> str:
    """Return a short form of a command: its name and its main fields."""
    names = ("session", "worker", "migration", "reason")
    told = (f"{name}={getattr(command, name)}" for name in names if getattr(command, name, None) is not None)
    return " ".join((type(command).__name__, *told))
