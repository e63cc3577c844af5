"""With redundancy and short times, a frozen process costs a viewer no more than a killed one."""

from __future__ import annotations

import pytest

from tests.simulation.simulate_scene import Scene, scene
from turboserve.simulation.settings import Scale

FREEZE_S = 20.0
BUFFER_S = 3.0
"""What the viewer has received and not shown, as on the page."""
CHUNK_S = 0.75
ONE_S, TWO_S = 3.0, 6.0
"""Longest stall that one and two frozen processes may cause, seconds."""


def stall_s(one: Scene, victims: tuple[str, ...]) -> float:
    """Freeze the processes at once, and return the viewer's stall: the longest gap beyond the buffer."""
    world = one.world
    log = world.checker.log.sessions[one.session]
    for victim in victims:
        name = str(one.row.worker) if victim == "owner" else victim
        service = world.workers[name].service if name in world.workers else world.service(name)
        assert service is not None
        service.freeze(FREEZE_S)
    began = last_at = world.loop.time()
    longest, index = 0.0, -1
    while world.loop.time() < began + FREEZE_S:
        world.loop.advance(0.05)
        assert log.last is not None
        if log.last.header.index != index:
            longest, last_at = max(longest, world.loop.time() - last_at), world.loop.time()
            index = log.last.header.index
    return max(longest, world.loop.time() - last_at) - CHUNK_S - BUFFER_S


@pytest.mark.parametrize(
    ("workers", "victims", "limit_s"),
    [
        (2, ("owner",), ONE_S),
        (2, ("state-store-1",), ONE_S),
        (2, ("owner", "leader"), TWO_S),
        (2, ("owner", "state-store-2"), TWO_S),
        # No other worker: the pool starts one, which loads its model.
        (1, ("owner",), TWO_S),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_viewer_stalls_for_seconds_at_most(workers: int, victims: tuple[str, ...], limit_s: float) -> None:
    scale = Scale(workers=workers, most_workers=workers, slots=2, gateways=1).with_failover()
    with scene(scale=scale) as one:
        one.session_runs()
        named = tuple(one.leader().name if victim == "leader" else victim for victim in victims)
        assert stall_s(one, named) <= limit_s
        one.rests()
