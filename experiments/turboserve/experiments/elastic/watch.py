"""Observes a pool: decisions and actions, each once, and the durations of scale-outs."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import httpx

from turboserve.bench.streaming.problems import ProblemError
from turboserve.bench.streaming.received import Received
from turboserve.bench.streaming.rest import request

POOL = "local"
"""Default id of a stack's pool."""
LOOK_S = 0.4


def unix_seconds(time: str) -> float:
    """Return an RFC 3339 time as Unix seconds."""
    return datetime.fromisoformat(time).timestamp()


def _with_seconds(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "at": unix_seconds(item["at"])}


@dataclass
class PoolWatch:
    """Polls `/v1/pools/local`; the pool itself keeps only the last few decisions and actions."""

    api: httpx.AsyncClient
    decisions: dict[tuple[float, str], dict[str, Any]] = field(default_factory=dict)
    actions: dict[tuple[float, str, str], dict[str, Any]] = field(default_factory=dict)
    sizes: list[tuple[float, int, int]] = field(default_factory=list)
    """(wall time, target, ready) whenever target or ready changed."""
    last: dict[str, Any] = field(default_factory=dict)

    async def run(self) -> None:
        """Poll until cancelled. A poll that fails is repeated."""
        while True:
            with suppress(httpx.HTTPError, ProblemError):
                self._note(await request(self.api, "GET", f"/v1/pools/{POOL}"))
            await asyncio.sleep(LOOK_S)

    def _note(self, pool: dict[str, Any]) -> None:
        self.last = pool
        # The pool computes times for every status, so they differ in the last digits.
        for decision in map(_with_seconds, (pool["scaling"] or {}).get("decisions", ())):
            self.decisions.setdefault((round(decision["at"], 1), decision["reason"]), decision)
        for action in map(_with_seconds, pool["actions"]):
            key = (round(action["at"], 1), action["action"], action["worker"] or action["reason"])
            self.actions.setdefault(key, action)
        size = (pool["target"], pool["ready"])
        if not self.sizes or self.sizes[-1][1:] != size:
            self.sizes.append((unix_seconds(pool["reported_at"]), *size))

    def scale_outs(self, chunks: list[Received]) -> list[dict[str, Any]]:
        """Return every worker of a scale-out, with the seconds from the decision to ready and to first chunk.

        `chunks` are those of all viewers. Workers from before the first decision are left out.
        """
        outs = sorted(d["at"] for d in self.decisions.values() if d["action"] in ("out", "wake"))
        launched = {a["worker"]: a["at"] for a in self.actions.values() if a["action"] == "launch"}
        ready = {a["worker"]: a["at"] for a in self.actions.values() if a["action"] == "ready"}
        found = []
        for worker, launched_at in sorted(launched.items(), key=lambda item: item[1]):
            decided = max((at for at in outs if at <= launched_at + 0.1), default=None)
            if decided is None or worker not in ready:
                continue
            first = min((c.received_at for c in chunks if c.worker == worker), default=None)
            found.append(
                {
                    "worker": worker,
                    "launch_s": round(max(launched_at - decided, 0.0), 3),
                    "start_up_s": round(ready[worker] - launched_at, 3),
                    "ready_s": round(ready[worker] - decided, 3),
                    "first_chunk_s": None if first is None else round(first - decided, 3),
                }
            )
        return found

    def count(self, action: str) -> int:
        """Count the decisions of this kind that changed the target."""
        return sum(d["action"] == action and d["target"] != d["previous"] for d in self.decisions.values())

    def drains(self) -> dict[str, int]:
        """Count drained, released, lost and failed workers, and extended deadlines."""
        kinds = [action["action"] for action in self.actions.values()]
        return {kind: kinds.count(kind) for kind in ("drain", "release", "extend", "gone", "fail")}
