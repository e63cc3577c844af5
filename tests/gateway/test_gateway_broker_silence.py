"""A gateway that does not hear its broker sends its viewers on, and a process that was stopped does not."""

from __future__ import annotations

import pytest

from turboserve.contracts.errors import UnavailableError
from turboserve.gateway.broker_silence import CUT_OFF_S, LOOK_S, BrokerSilence
from turboserve.gateway.context import Streams


def test_two_seconds_without_an_answer_cut_a_gateway_off_until_the_next_answer() -> None:
    silence = BrokerSilence(0.0)
    looks = [(n * LOOK_S, silence.look(max(0.0, n * LOOK_S - 1.0), n * LOOK_S)) for n in range(1, 20)]
    assert {cut for at, cut in looks if at < 1.0 + CUT_OFF_S} == {False}
    assert {cut for at, cut in looks if at >= 1.0 + CUT_OFF_S} == {True}
    assert silence.warning() == "no answer of the broker for 3.8 s: viewers go to another gateway"
    assert not silence.look(0.0, 5.0)
    assert silence.warning() is None


def test_a_gateway_that_was_stopped_itself_is_not_cut_off() -> None:
    silence = BrokerSilence(0.0)
    assert not silence.look(0.0, 1.0)
    # Stopped for 20 s: the answer is in its socket, but not read yet.
    assert not silence.look(19.0, 21.0)
    assert not silence.look(19.25, 21.25)
    assert not silence.look(0.0, 21.5)


def test_no_stream_begins_while_viewers_are_sent_on() -> None:
    streams = Streams(4)
    with streams.place("t"):
        streams.send_on()
        assert streams.leaving.is_set()
        assert streams.count == 1
        with pytest.raises(UnavailableError, match="use another one") as refused, streams.place("t"):
            pass
        # Without a time, a client's request is not repeated, at no gateway.
        assert refused.value.retry_after_s is not None
    streams.admit_again()
    with streams.place("t"):
        assert not streams.leaving.is_set()


async def test_a_gateway_that_stops_admits_no_stream_again() -> None:
    streams = Streams(4)
    await streams.close()
    streams.admit_again()
    with pytest.raises(UnavailableError), streams.place("t"):
        pass
