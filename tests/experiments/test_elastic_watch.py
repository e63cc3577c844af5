"""The elastic benchmark's use of a pool's status and of viewers' chunks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import httpx

from turboserve.bench.streaming.received import Received
from turboserve.experiments.elastic.watch import PoolWatch


def time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def pool(target: int, ready: int, at: float, decisions: list[Any], actions: list[Any]) -> dict[str, Any]:
    return {
        "target": target,
        "ready": ready,
        "reported_at": time(at),
        "scaling": {"decisions": decisions},
        "actions": actions,
    }


def decision(at: float, action: str, previous: int, target: int) -> dict[str, Any]:
    reason = f"{action} {at}"
    return {"at": time(at), "action": action, "previous": previous, "target": target, "reason": reason}


def action(at: float, kind: str, worker: str) -> dict[str, Any]:
    return {"at": time(at), "action": kind, "worker": worker, "reason": kind}


def chunk(worker: str, received_at: float) -> Received:
    return Received(0, 1, worker, 0, 0.0, 0.75, received_at, received_at, 1, b"", b"")


def test_a_scale_out_is_measured_from_its_decision_and_the_first_worker_is_none() -> None:
    watch = PoolWatch(httpx.AsyncClient())
    first = [action(1.0, "launch", "a"), action(4.0, "ready", "a")]
    watch._note(pool(1, 1, 5.0, [decision(0.5, "hold", 1, 1)], first))
    out = [decision(10.0, "out", 1, 2)]
    watch._note(pool(2, 1, 11.0, out, [*first, action(10.2, "launch", "b")]))
    # The same entries in a later status: their times differ in the last digits.
    out[0]["at"] = time(10.001)
    more = [action(10.201, "launch", "b"), action(14.2, "ready", "b"), action(40.0, "drain", "b")]
    watch._note(pool(2, 2, 15.0, [*out, decision(40.0, "in", 2, 1)], more))
    [found] = watch.scale_outs([chunk("a", 12.0), chunk("b", 16.0), chunk("b", 15.5)])
    assert found["worker"] == "b"
    assert (found["launch_s"], found["start_up_s"], found["ready_s"], found["first_chunk_s"]) == (
        0.2,
        4.0,
        4.2,
        5.5,
    )
    assert (watch.count("out"), watch.count("in")) == (1, 1)
    assert watch.drains()["drain"] == 1
    assert [size[1:] for size in watch.sizes] == [(1, 1), (2, 1), (2, 2)]
