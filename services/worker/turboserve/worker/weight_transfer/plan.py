"""The plan of weight transfers: which worker sends which shard to which other one next. No I/O.

OServe (Algorithm 2) assigns every shard before the first is sent, by the bytes that a source sends to the
same target. Here the plan is made shard by shard, from what has happened so far:

- A shard comes from a holder on the receiver's host if there is one.
- Among holders, it comes from the one that has sent least in total.
- A receiver is a source for each shard that it has verified.
- The shard that the fewest workers hold goes first, so that receivers have different shards for each other.
- A source whose viewers lack slack sends less, or nothing.
- No worker sends or receives more shards at once than the limits say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from turboserve.worker.weight_transfer.plan_messages import (
    CancelShard,
    PlanCommand,
    PlanEvent,
    PlanLimits,
    ReadFromDisk,
    SendShard,
    ShardFailed,
    ShardVerified,
    SlackChanged,
    TimePassed,
    WeightsComplete,
    WorkerJoined,
    WorkerLost,
)

NO_LIMITS = PlanLimits()


@dataclass(eq=False)
class _Participant:
    """What the plan knows of one worker."""

    name: str
    host: str
    needs_from: float
    """Since when the worker needs shards, seconds."""
    waits_from: float
    """Since when no source has sent the worker anything, seconds. A source that has put it off does not
    count."""
    holds: set[int] = field(default_factory=set)
    receives: bool = False
    sends: int = 0
    """Number of shards that it may send at once."""
    sent_bytes: int = 0
    """Bytes of all shards that it was told to send."""
    sending: int = 0
    coming: dict[int, str] = field(default_factory=dict)
    """Shards on their way to this worker, with their sources."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed transfers by source."""


class TransferPlan:
    """Plans transfers of one manifest's shards between any number of workers. Pure: time is an argument."""

    def __init__(self, shard_bytes: Sequence[int], limits: PlanLimits = NO_LIMITS) -> None:
        """`shard_bytes`: size of each shard, by its number."""
        self._bytes = tuple(shard_bytes)
        self._limits = limits
        self._whole_s = limits.whole_s(sum(shard_bytes))
        self._workers: dict[str, _Participant] = {}

    @property
    def waiting(self) -> bool:
        """Whether a receiver has not got everything yet."""
        return any(one.receives for one in self._workers.values())

    def handle(self, event: PlanEvent, now: float) -> list[PlanCommand]:
        """Take an event into account. Returns what to do next, in order. `now`: monotonic seconds."""
        commands: list[PlanCommand] = []
        match event:
            case WorkerJoined():
                self._join(event, now)
            case WorkerLost(worker=name):
                commands += self._lose(name, now)
            case ShardVerified(receiver=name, shard=shard):
                if (receiver := self._ended(name, shard)) is not None:
                    receiver.holds.add(shard)
                    receiver.waits_from = now
            case ShardFailed():
                self._fail(event, now)
            case SlackChanged(worker=name, sends=sends):
                if name in self._workers:
                    self._workers[name].sends = max(0, min(sends, self._limits.sends))
            case TimePassed():
                pass
            case _:
                assert_never(event)
        commands += self._complete()
        commands += self._assign(now)
        commands += self._give_up(now)
        return commands

    # Events

    def _join(self, event: WorkerJoined, now: float) -> None:
        known = self._workers.get(event.worker)
        if known is None:
            known = self._workers[event.worker] = _Participant(event.worker, event.host, now, now)
        known.host = event.host
        # What is on its way is not held before it is verified.
        known.holds |= set(event.holds) - known.coming.keys()
        if event.receives and not known.receives:
            known.needs_from = known.waits_from = now
        known.receives = event.receives
        known.sends = self._limits.sends if event.sends else 0
        known.sent_bytes = max(known.sent_bytes, event.sent_bytes)

    def _lose(self, name: str, now: float) -> Iterator[PlanCommand]:
        lost = self._workers.pop(name, None)
        if lost is None:
            return
        yield from self._cancel_all(lost)
        for receiver in self._workers.values():
            for shard in [shard for shard, source in receiver.coming.items() if source == name]:
                del receiver.coming[shard]
                receiver.waits_from = now
                yield CancelShard(name, receiver.name, shard)

    def _cancel_all(self, receiver: _Participant) -> Iterator[PlanCommand]:
        """Cancel what is on its way to this worker."""
        for shard, source in receiver.coming.items():
            if source in self._workers:
                self._workers[source].sending -= 1
            yield CancelShard(source, receiver.name, shard)
        receiver.coming.clear()

    def _ended(self, name: str, shard: int) -> _Participant | None:
        """The receiver of a transfer that has ended. None: the plan has no such transfer (any more)."""
        receiver = self._workers.get(name)
        if receiver is None or shard not in receiver.coming:
            return None
        self._workers[receiver.coming.pop(shard)].sending -= 1
        return receiver

    def _fail(self, event: ShardFailed, now: float) -> None:
        receiver = self._workers.get(event.receiver)
        source = None if receiver is None else receiver.coming.get(event.shard)
        if receiver is None or source is None:
            return
        self._ended(event.receiver, event.shard)
        if event.reason != "postponed":
            receiver.failures[source] += 1
            receiver.waits_from = now
        if event.reason == "corrupt":
            self._workers[source].holds.discard(event.shard)

    # Decisions

    def _complete(self) -> Iterator[PlanCommand]:
        for receiver in self._workers.values():
            if receiver.receives and self._has_all(receiver):
                receiver.receives = False
                yield WeightsComplete(receiver.name)

    def _assign(self, now: float) -> Iterator[PlanCommand]:
        """Start every transfer that the limits permit, for the receiver with the fewest shards first."""
        copies = self._copies()
        while True:
            receivers = [
                one
                for one in self._workers.values()
                if one.receives and len(one.coming) < self._limits.receives
            ]
            receivers.sort(key=lambda one: (len(one.holds) + len(one.coming), one.name))
            for receiver in receivers:
                found = self._next(receiver, copies)
                if found is not None:
                    source, shard = found
                    source.sending += 1
                    source.sent_bytes += self._bytes[shard]
                    receiver.coming[shard] = source.name
                    copies[shard] += 1
                    yield SendShard(source.name, receiver.name, shard)
                    break
            else:
                return

    def _copies(self) -> Counter[int]:
        """By shard: the number of workers that hold it, or to which it is on its way. Those that hold all
        shards change no order, and are left out."""
        some = [one for one in self._workers.values() if not self._has_all(one)]
        return Counter(shard for one in some for shard in (*one.holds, *one.coming))

    def _has_all(self, worker: _Participant) -> bool:
        return len(worker.holds) == len(self._bytes)

    def _next(self, receiver: _Participant, copies: Counter[int]) -> tuple[_Participant, int] | None:
        """The shard that this worker should get next, with its source. None: nothing may be sent to it now.

        First what its host has, then the rarest; among shards as rare, each worker begins elsewhere.
        """
        others = [one for one in self._workers.values() if one is not receiver and one.sending < one.sends]
        if not others:
            return None
        near = any(self._near(receiver, one) for one in others)
        count, begin = len(self._bytes), sum(receiver.name.encode())
        missing = [
            (copies[shard], (shard - begin) % count, shard)
            for shard in range(count)
            if shard not in receiver.holds and shard not in receiver.coming
        ]
        missing.sort()
        best: tuple[_Participant, int] | None = None
        for _, _, shard in missing:
            free = [one for one in self._sources(receiver, shard) if one.sending < one.sends]
            if not free:
                continue
            source = min(free, key=lambda one: (one.sent_bytes, one.sending, one.name))
            if not near or self._near(receiver, source):
                return source, shard
            best = best or (source, shard)
        return best

    def _sources(self, receiver: _Participant, shard: int) -> list[_Participant]:
        """Workers from which the receiver may get the shard: those of its host, else all others.

        None of another host while the shard is on its way to a worker of the receiver's host: it comes
        from there next, and the network carries it once.
        """
        near = [one for one in self._workers.values() if self._near(receiver, one) and one.sends]
        holders = [one for one in near if self._may_send(one, receiver, shard)]
        if holders:
            return holders
        if any(shard in one.coming and self._trusts(receiver, one) for one in near):
            return []
        return [one for one in self._workers.values() if self._may_send(one, receiver, shard)]

    def _near(self, receiver: _Participant, other: _Participant) -> bool:
        return other is not receiver and other.host == receiver.host != ""

    def _may_send(self, source: _Participant, receiver: _Participant, shard: int) -> bool:
        return source is not receiver and shard in source.holds and self._trusts(receiver, source)

    def _trusts(self, receiver: _Participant, source: _Participant) -> bool:
        return receiver.failures[source.name] < self._limits.failures

    def _give_up(self, now: float) -> Iterator[PlanCommand]:
        """Let those read their disks that no worker can help, none has helped for too long, or all workers
        help too slowly."""
        helped = True
        while helped:
            helped = False
            for receiver in self._workers.values():
                shard = self._hopeless(receiver, now)
                if shard is not None:
                    yield from self._cancel_all(receiver)
                    receiver.receives = False
                    yield ReadFromDisk(receiver.name, shard)
                    # Other workers may have waited for what was on its way to this one.
                    yield from self._assign(now)
                    helped = True

    def _hopeless(self, receiver: _Participant, now: float) -> int | None:
        """A shard that the receiver cannot get. None: it may still get all of them."""
        if not receiver.receives:
            return None
        missing = (shard for shard in range(len(self._bytes)) if shard not in receiver.holds)
        waited = not receiver.coming and now - receiver.waits_from >= self._limits.wait_s
        if waited or now - receiver.needs_from >= self._whole_s:
            return next(missing)
        helpers = [one for one in self._workers.values() if one is receiver or self._trusts(receiver, one)]
        if any(map(self._has_all, helpers)):
            return None
        return next(
            (
                shard
                for shard in missing
                if not any(shard in one.holds or shard in one.coming for one in helpers)
            ),
            None,
        )
