"""Records of one run of `turboserve bench stream`, also of its broker's own reader, and their figures."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from turboserve.bench.report import percentile
from turboserve.bench.streaming.received import PromptSwitch, Received
from turboserve.bench.streaming.viewer import Viewer
from turboserve.contracts.chunks import ChunkHeader
from turboserve.subjects import CHUNK


def summary(values: Iterable[float], *, largest: bool = False) -> dict[str, float | None]:
    """Return `{p50, p95}`, and `max` on request, rounded to a hundredth of a millisecond."""
    kept = list(values)
    figures = {"p50": percentile(kept, 0.50), "p95": percentile(kept, 0.95)}
    if largest:
        figures["max"] = max(kept, default=None)
    return {name: None if value is None else round(value, 5) + 0.0 for name, value in figures.items()}


@dataclass
class SessionMeasurement:
    """One session of the run and its records. Times are monotonic seconds."""

    viewer: Viewer
    asked_s: float
    switch: PromptSwitch | None = None
    applied_s: float | None = None
    applied_chunk: int | None = None
    visible_s: float | None = None
    """Time at which the playhead reached the first chunk made under the new prompt."""


@dataclass
class Measurement:
    """All records of one run."""

    seconds: float
    watched: list[SessionMeasurement] = field(default_factory=list)
    broker_at: dict[tuple[str, int], float] | None = None
    """(session, chunk index) → wall time at which it came from the broker itself."""

    def report(self) -> dict[str, Any]:
        """Return the JSON object: seconds unless a key names another unit; null if nothing was measured."""
        players = [one.viewer.player for one in self.watched]
        chunks = sum(player.chunks for player in players)
        return {
            "sessions": len(self.watched),
            "seconds": self.seconds,
            "ttfc_s": summary(
                one.viewer.player.arrivals_s[0] - one.asked_s
                for one in self.watched
                if one.viewer.player.arrivals_s
            ),
            "interarrival_s": summary(
                (
                    later - earlier
                    for player in players
                    for earlier, later in zip(player.arrivals_s, player.arrivals_s[1:], strict=False)
                ),
                largest=True,
            ),
            "gateway_overhead_s": summary(late for late, _ in self._delays()),
            "prompt_applied_s": summary(
                one.applied_s - one.switch.submitted_s
                for one in self.watched
                if one.switch is not None and one.applied_s is not None
            ),
            "prompt_applied_chunks": summary(
                one.applied_chunk - one.switch.next_chunk
                for one in self.watched
                if one.switch is not None and one.applied_chunk is not None
            ),
            "prompt_visible_s": summary(
                one.visible_s - one.switch.submitted_s
                for one in self.watched
                if one.switch is not None and one.visible_s is not None
            ),
            "prompts_submitted": sum(one.switch is not None for one in self.watched),
            "prompts_applied": sum(one.applied_s is not None for one in self.watched),
            "stalls": sum(player.stalls for player in players),
            "stall_s": round(sum(player.stall_s for player in players), 3),
            "chunks": chunks,
            "chunks_lost": sum(player.lost for player in players),
            "chunks_repeated": sum(player.repeated for player in players),
            "connections": sum(one.viewer.connections for one in self.watched),
            "baseline": self._baseline(),
        }

    def _live(self) -> list[tuple[SessionMeasurement, Received]]:
        """Return the chunks made while their viewer was connected: earlier chunks waited for the viewer."""
        return [
            (one, chunk)
            for one in self.watched
            for chunk in one.viewer.chunks
            if chunk.published_at >= one.viewer.greeted_at
        ]

    def _delays(self) -> list[tuple[float, float | None]]:
        """Return each live chunk's delays from worker to viewer, and from worker to a broker's reader."""
        known = self.broker_at or {}
        delays = []
        for one, chunk in self._live():
            broker_at = known.get((one.viewer.session, chunk.index))
            delays.append(
                (
                    chunk.received_at - chunk.published_at,
                    None if broker_at is None else broker_at - chunk.published_at,
                )
            )
        return delays

    def _baseline(self) -> dict[str, Any] | None:
        """Return what the gateway adds to the broker's own delay; the ratio also holds on a busy machine."""
        pairs = [(viewer_s, broker_s) for viewer_s, broker_s in self._delays() if broker_s is not None]
        if not pairs:
            return None
        viewer_p50 = percentile([viewer_s for viewer_s, _ in pairs], 0.5) or 0.0
        broker_p50 = percentile([broker_s for _, broker_s in pairs], 0.5) or 0.0
        return {
            "broker_s": summary(broker_s for _, broker_s in pairs),
            "gateway_share_s": summary(viewer_s - broker_s for viewer_s, broker_s in pairs),
            "ratio_p50": round(viewer_p50 / broker_p50, 3) if broker_p50 > 0 else None,
            "chunks": len(pairs),
        }


class BrokerTap:
    """Records when each accepted chunk reached this process, without a gateway in between."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: Client | None = None
        self.received_at: dict[tuple[str, int], float] = {}
        """(session, chunk index) → wall time."""

    async def __aenter__(self) -> Self:
        self._client = await nats.connect(self._url, connect_timeout=5)
        await self._client.subscribe(CHUNK.live("*"), cb=self._receive)
        await self._client.flush()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()

    async def _receive(self, message: Msg) -> None:
        now = time.time()
        header = ChunkHeader.from_headers(message.headers or {})
        self.received_at.setdefault((header.session, header.index), now)
