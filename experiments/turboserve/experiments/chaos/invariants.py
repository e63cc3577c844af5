"""Invariants that must hold after any faults, checked against the whole chunk log.

Their names are those of the simulation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

INVARIANTS = {
    "one_executor": "every chunk in the log is from the owner at that place, under the current epoch",
    "epochs_increase": "epochs strictly increase in the log",
    "chunks_contiguous": "chunks in the log are 0, 1, 2, …, each once; a full disk may remove the oldest",
    "converges_after_faults": "every session plays again within the bound after the last fault",
    "capacity": "reserved plus used never exceeds a worker's capacity",
    "client_sees_prefix": "the chunks that a client received are a prefix of the log, byte for byte",
}


@dataclass(frozen=True)
class Owned:
    """A message of `own.<session>` in the log."""

    sequence: int
    epoch: int
    worker: str | None
    at: float = 0.0
    """Time at which the broker accepted it, by the broker's clock, in seconds."""


@dataclass(frozen=True)
class Logged:
    """A message of `chunk.<session>` in the log."""

    sequence: int
    index: int
    epoch: int
    worker: str
    digest: str
    """Digest of the fragment."""
    at: float = 0.0


@dataclass
class Violations:
    """Counts by invariant, and messages of the first violations."""

    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(INVARIANTS, 0)))
    messages: list[str] = field(default_factory=list)

    def add(self, name: str, message: str) -> None:
        assert name in INVARIANTS, name
        self.counts[name] += 1
        if len(self.messages) < 20:
            self.messages.append(f"{name}: {message}")


def check_log(
    session: str,
    entries: Sequence[Owned | Logged],
    seen: Sequence[tuple[int, str]],
    found: Violations,
    *,
    first: int = 0,
) -> None:
    """Check one session's log in its order, and against (index, digest) of the chunks that its client saw.

    `first` is the index of the oldest chunk that is left. Earlier chunks made room while a disk was full, and
    the client must have seen them.
    """
    own: Owned | None = None
    chunks: list[Logged] = []
    for entry in entries:
        if isinstance(entry, Owned):
            if own is not None and entry.epoch <= own.epoch:
                found.add("epochs_increase", f"{session}: {own.epoch}, then {entry.epoch}")
            own = entry
            continue
        if own is None or (own.epoch, own.worker) != (entry.epoch, entry.worker):
            owner = "no worker" if own is None else f"{own.worker} in {own.epoch}"
            writer = f"{entry.worker} in {entry.epoch}"
            found.add("one_executor", f"{session}: {writer} wrote {entry.index}, its owner is {owner}")
        if entry.index != first + len(chunks):
            found.add(
                "chunks_contiguous", f"{session}: chunk {entry.index} in place of {first + len(chunks)}"
            )
        chunks.append(entry)
    kept = list(seen)[first:]
    in_order = [index for index, _ in seen] == list(range(len(seen)))
    if (
        len(seen) < first
        or not in_order
        or kept != [(chunk.index, chunk.digest) for chunk in chunks[: len(kept)]]
    ):
        found.add(
            "client_sees_prefix", f"{session}: {len(seen)} received chunks are not the log's first ones"
        )


def check_skips(session: str, skips: Sequence[tuple[int, int]], found: Violations) -> None:
    """Check that each `skip` named the chunk that came after it, and that none came twice.

    `skips` has both indexes of each.
    """
    for named, came in skips:
        if named != came:
            found.add("client_sees_prefix", f"{session}: a skip to {named}, and {came} came")
    if len({named for named, _ in skips}) < len(skips):
        found.add("client_sees_prefix", f"{session}: skips to {[named for named, _ in skips]}")


def check_oldest(oldest: Mapping[str, int], allowed: Mapping[str, int], when: str, found: Violations) -> None:
    """Check that each session's oldest chunk in the log is the `allowed` one, or 0 if none is named.

    `when` states the time of the check. A chunk may be removed only while a disk is full.
    """
    for session, index in oldest.items():
        if index != allowed.get(session, 0):
            found.add(
                "chunks_contiguous",
                f"{session}: {when} its log begins at {index}, not at {allowed.get(session, 0)}",
            )


def takeovers(entries: Sequence[Owned | Logged], silence_s: float) -> list[float]:
    """Return the seconds from each new owner's entry to its first chunk, after `silence_s` of silence.

    The silence distinguishes a dead worker from one that hands over a session: the log of a dead worker has
    been silent for the worker's timeout.
    """
    found: list[float] = []
    waiting: Owned | None = None
    own: Owned | None = None
    last_at: float | None = None
    for entry in entries:
        if isinstance(entry, Owned):
            other = own is not None and own.worker not in (None, entry.worker)
            died = other and last_at is not None and entry.at - last_at >= silence_s
            waiting = entry if died and entry.worker is not None else None
            own = entry
        else:
            if waiting is not None:
                found.append(entry.at - waiting.at)
            waiting, last_at = None, entry.at
    return found


def check_capacity(workers: Sequence[Mapping[str, object]], found: Violations) -> None:
    """Check one answer of `GET /v1/workers`, which the store counts in one statement."""
    for worker in workers:
        used = int(str(worker.get("sessions", 0))) + int(str(worker.get("incoming", 0)))
        capacity = int(str(worker.get("floor_capacity", worker.get("capacity", 0))))
        # A worker that starts or is gone reports no room, even if rows still name it.
        if worker.get("phase") in ("ready", "draining") and used > capacity:
            found.add("capacity", f"{worker.get('id')} has {used} of {capacity}")
