"""A lag counts from when the process fell behind."""

from __future__ import annotations

from turboserve.bus import LAG_WARN_S, Lag


def test_a_lag_begins_with_the_first_note_and_ends_with_the_last_message() -> None:
    lag = Lag()
    assert (lag.seconds(5.0), lag.warning(5.0)) == (0.0, None)
    lag.note(True, 10.0)
    lag.note(True, 12.0)
    assert lag.seconds(13.0) == 3.0
    assert lag.warning(13.0) is None
    assert lag.warning(10.0 + LAG_WARN_S) == "behind for 5 s"
    lag.note(False, 20.0)
    assert (lag.seconds(90.0), lag.warning(90.0)) == (0.0, None)
