"""A device that hangs: the thread lives, and makes no chunk."""

from turboserve.worker.service.watchdog import Watchdog


def test_only_a_number_that_stays_the_same_for_long_means_stuck() -> None:
    watchdog = Watchdog(looks=3)
    assert [watchdog.stuck(turns) for turns in (0, 0, 0, 1, 1, 1, 1, 1, 2)] == [False] * 6 + [
        True,
        True,
        False,
    ]
