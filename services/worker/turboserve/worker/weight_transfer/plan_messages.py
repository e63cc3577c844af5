"""Events and commands of a plan of weight transfers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

FailureReason = Literal["broken", "corrupt", "postponed"]


@dataclass(frozen=True)
class PlanLimits:
    """Bounds of a plan."""

    sends: int = 2
    """Largest number of shards that a worker sends at once."""
    receives: int = 2
    """Largest number of shards that a worker receives at once."""
    failures: int = 3
    """Number of failed transfers after which a worker gets no more shards from a source."""
    wait_s: float = 20.0
    """Longest time for which a worker waits for sources that send nothing, seconds. Then it reads its
    disk."""
    least_bytes_per_s: float = 50e6
    """Slowest rate at which sources help a worker. It reads its disk after `wait_s` and the time that all
    shards take at this rate, whatever it still gets: nearly every disk is faster."""

    def whole_s(self, size: int) -> float:
        """Longest time in which a worker gets shards of `size` bytes in all, seconds."""
        return self.wait_s + size / self.least_bytes_per_s


@dataclass(frozen=True)
class WorkerJoined:
    """A worker holds shards or needs them; also when a known worker holds more than the plan knows."""

    worker: str
    host: str
    """The worker's machine; empty: not known, so that no other worker is near."""
    holds: Collection[int] = ()
    """Numbers of the shards that the worker holds and has verified."""
    receives: bool = False
    """Whether the worker needs the shards that it does not hold."""
    sends: bool = True
    """Whether the worker sends what it holds."""
    sent_bytes: int = 0
    """What the worker has sent before, bytes."""


@dataclass(frozen=True)
class WorkerLost:
    """A worker has died, or sends and receives nothing any more."""

    worker: str


@dataclass(frozen=True)
class ShardVerified:
    """A shard has arrived, and its digests are right."""

    receiver: str
    shard: int


@dataclass(frozen=True)
class ShardFailed:
    """A shard's transfer has ended without the shard."""

    receiver: str
    shard: int
    reason: FailureReason = "broken"
    """`corrupt`: bytes arrived that have other digests, so the source does not hold the shard. `postponed`:
    the source sends nothing now, and is not at fault."""


@dataclass(frozen=True)
class SlackChanged:
    """The viewers' slack at a source permits other transfers than before."""

    worker: str
    sends: int
    """Number of shards that the worker may send at once now. 0: its sessions need all of its time."""


@dataclass(frozen=True)
class TimePassed:
    """Nothing else has happened. Send it at least every `PlanLimits.wait_s` while workers wait."""


PlanEvent = WorkerJoined | WorkerLost | ShardVerified | ShardFailed | SlackChanged | TimePassed


@dataclass(frozen=True)
class SendShard:
    """The source sends a shard to the receiver."""

    source: str
    receiver: str
    shard: int


@dataclass(frozen=True)
class CancelShard:
    """The transfer ends: one of the two is lost, or the receiver reads its disk."""

    source: str
    receiver: str
    shard: int


@dataclass(frozen=True)
class ReadFromDisk:
    """No source is left for this shard, none has sent for too long, or all of it takes too long: the receiver
    reads its disk."""

    receiver: str
    shard: int


@dataclass(frozen=True)
class WeightsComplete:
    """The receiver holds every shard."""

    receiver: str


PlanCommand = SendShard | CancelShard | ReadFromDisk | WeightsComplete
