"""A client drops its buffer with a prompt: its viewers skip to the first chunk that shows it."""

from __future__ import annotations

import pytest

from tests.simulation.simulate_scene import Scene, scene
from tests.simulation.test_simulate_lost_log import LEAD, made, started
from turboserve.gateway.auth.access import DEFAULT_TENANT as TENANT


def drop(one: Scene) -> None:
    one.does(
        one.users.ask(
            lambda g: g.sessions.prompt(TENANT, one.session, "a blue square", "k", drop_buffer=True)
        )
    )


def chunk(one: Scene, index: int) -> tuple[int, bool]:
    header = one.world.checker.log.of(one.session).chunks[index].header
    return header.control_seq, header.drops_buffer


@pytest.mark.parametrize("kills", [False, True])
def test_viewers_skip_once_and_the_log_keeps_every_chunk(kills: bool) -> None:
    with scene() as one:
        started(one)
        viewer = one.users.watch(one.session, from_start=True)
        one.until(lambda: made(one) >= LEAD)
        one.world.loop.advance(0.5)
        before = made(one)
        drop(one)
        if kills:
            # The new owner knows by the log that no chunk shows the prompt.
            one.until(lambda: one.row.drop_buffer_seq == 1)
            service = one.worker(one.row.worker).service
            assert service is not None
            service.kill("killed by the test")
        one.until(lambda: viewer.skips > 0)
        first = next(index for index in range(before - 1, made(one)) if chunk(one, index)[0] == 1)
        assert chunk(one, first) == (1, True)
        # Viewers skip over what they had: the playhead is where the scene begins.
        assert viewer.playhead_s >= one.world.checker.log.of(one.session).chunks[first].header.start_s
        # A lead is generated from there on without a pause for the discarded video.
        one.until(lambda: made(one) >= first + LEAD - 1)
        one.world.loop.advance(3.0)
        assert viewer.skips == 1
        assert [chunk(one, index)[1] for index in range(made(one))].count(True) == 1


def test_a_viewer_that_comes_later_skips_as_the_others_did() -> None:
    with scene() as one:
        started(one)
        viewer = one.users.watch(one.session, from_start=True)
        one.until(lambda: made(one) >= LEAD)
        drop(one)
        one.until(lambda: viewer.skips > 0)
        late = one.users.watch(one.session, from_start=True)
        one.until(lambda: late.seen >= viewer.seen)
        assert late.skips == 1


def test_without_the_wish_no_viewer_skips() -> None:
    with scene() as one:
        started(one)
        viewer = one.users.watch(one.session, from_start=True)
        one.until(lambda: made(one) >= LEAD)
        one.does(one.users.ask(lambda g: g.sessions.prompt(TENANT, one.session, "a blue square", "k")))
        one.until(lambda: chunk(one, made(one) - 1)[0] == 1)
        one.world.loop.advance(2.0)
        assert not viewer.skips
