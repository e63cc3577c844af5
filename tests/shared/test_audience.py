"""One session watched through several gateways: their reports taken together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.waiting import eventually
from tests.shared.conftest import Connect
from turboserve.audience import LONGEST_INTERVAL_S, SILENT_S, AggregatedPlayhead, Audience, AudienceFollower
from turboserve.contracts.versions import stamped
from turboserve.contracts.workers import Playhead


def word(
    gateway: str | None, playhead_s: float, viewers: int, *, live: bool = True, age_s: float = 0.0
) -> Playhead:
    return Playhead(
        session="s", gateway=gateway, playhead_s=playhead_s, viewers=viewers, live=live, age_s=age_s
    )


def test_viewers_add_up_and_the_furthest_of_them_counts() -> None:
    audience = Audience()
    assert audience.update(word("a", 4.0, 1), 0.0) == AggregatedPlayhead(4.0, 1, 0.0)
    assert audience.update(word("b", 2.0, 2), 0.1) == AggregatedPlayhead(4.0, 3, 0.0)
    assert audience.update(word("b", 5.0, 2), 0.2) == AggregatedPlayhead(5.0, 3, 0.2)


def test_an_old_playhead_counts_from_when_it_was_observed() -> None:
    audience = Audience()
    assert audience.update(word("a", 4.0, 1, age_s=0.5), 1.0) == AggregatedPlayhead(4.0, 1, 0.5)
    # The viewer at "a" is at 4.6 now.
    assert audience.update(word("b", 4.5, 1), 1.1) == AggregatedPlayhead(4.0, 2, 0.5)
    assert audience.update(word("b", 4.7, 1), 1.1) == AggregatedPlayhead(4.7, 2, 1.1)


def test_a_gateway_that_has_no_viewer_left_does_not_hide_those_of_another() -> None:
    """Incident: without a gateway's name in the message, this was 0 viewers until the other's next report."""
    audience = Audience()
    audience.update(word("a", 4.0, 1), 0.0)
    audience.update(word("b", 6.0, 1), 0.1)
    assert audience.update(word("b", 6.2, 0), 0.2) == AggregatedPlayhead(4.0, 1, 0.0)
    assert audience.update(word("a", 4.3, 0), 0.3) == AggregatedPlayhead(4.3, 0, 0.3)


def test_a_silent_viewer_does_not_change_the_playhead_of_the_others() -> None:
    audience = Audience()
    audience.update(word("a", 100.0, 1, live=False), 0.0)
    assert audience.update(word("b", 20.0, 1), 0.1) == AggregatedPlayhead(20.0, 2, 0.1)
    assert audience.update(word("b", 21.0, 1, live=False), 0.2) == AggregatedPlayhead(100.0, 2, 0.0)


def test_a_gateway_that_fell_silent_is_gone_with_its_viewers() -> None:
    audience = Audience()
    audience.update(word("dead", 9.0, 3), 0.0)
    assert audience.update(word("next", 8.0, 1), SILENT_S) == AggregatedPlayhead(9.0, 4, 0.0)
    later = SILENT_S + 0.1
    assert audience.update(word("next", 8.1, 1), later) == AggregatedPlayhead(8.1, 1, later)


def test_messages_without_a_gateway_count_as_from_one() -> None:
    audience = Audience()
    audience.update(Playhead.from_text(stamped('{"session":"s","playhead_s":3.0,"viewers":2}')), 0.0)
    assert audience.update(word(None, 1.0, 1), 0.1) == AggregatedPlayhead(1.0, 1, 0.1)
    assert audience.update(word("new", 0.5, 1), 0.2) == AggregatedPlayhead(1.0, 2, 0.1)


GATEWAYS = ("a", "b", "c", None)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 4),
            st.sampled_from(GATEWAYS),
            st.floats(0, 1e6),
            st.integers(0, 3),
            st.booleans(),
            st.floats(0, 4),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_it_is_what_those_with_viewers_said_last_whatever_the_order(
    words: list[tuple[float, str | None, float, int, bool, float]],
) -> None:
    audience, now = Audience(), 0.0
    said: dict[str | None, tuple[float, float, int, bool, float]] = {}
    for pause_s, gateway, playhead_s, viewers, live, age_s in words:
        now += pause_s
        together = audience.update(word(gateway, playhead_s, viewers, live=live, age_s=age_s), now)
        said[gateway] = (now, playhead_s, viewers, live, age_s)
        there = [one for one in said.values() if one[2] and now - one[0] <= SILENT_S]
        speaking = [one for one in there if one[3]] or there
        assert together.viewers == sum(one[2] for one in there)
        positions = {
            (one[1], one[0] - one[4]): one[1] + one[4] + min(now - one[0], LONGEST_INTERVAL_S)
            for one in speaking
        }
        found = together.playhead_s, together.observed_at
        if positions:
            assert positions[found] == pytest.approx(max(positions.values()))
        else:
            assert found == (playhead_s, now - age_s)


async def test_sessions_are_followed_in_an_order_that_no_hash_decides(connect: Connect) -> None:
    bus = await connect("admin")
    subscribed: list[str] = []
    subscribe = bus.subscribe

    async def noted(topic: Any, token: str, handler: Any) -> Any:
        subscribed.append(token)
        return await subscribe(topic, token, handler)

    bus.subscribe = noted  # type: ignore[method-assign, assignment]
    follower = AudienceFollower(bus, lambda: 0.0, lambda _session, _together: None)
    sessions = {f"ses_{number:02}" for number in range(30)}
    follower.follow(sessions)
    await eventually(lambda: len(subscribed) == len(sessions))
    assert subscribed == sorted(sessions)
    follower.close()
