"""The simulator's check of fences: each names a later epoch, except the repair of a fence that was lost."""

from __future__ import annotations

from turboserve.contracts.chunks import Ownership
from turboserve.contracts.events import Event
from turboserve.simulation.log_checks import LogChecks
from turboserve.simulation.runtime.broker.stream import Stream
from turboserve.subjects import CHUNKS, OWN

SESSION = "ses_1"


class Violations:
    """Keeps the names of violations."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def fail(self, name: str, message: str) -> None:
        self.found.append(name)

    def note(self, *what: object) -> None:
        pass

    def result(self, name: str, contents: bytes, number: int = 0) -> None:
        raise AssertionError(name)

    def seed_of(self, session: str) -> int | None:
        raise AssertionError(session)

    def pinned(self, session: str) -> bool:
        raise AssertionError(session)

    def event_logged(self, event: Event) -> None:
        raise AssertionError(event)


class Log:
    """A chunk log that accepts fences of one session and can lose them."""

    def __init__(self) -> None:
        self.violations = Violations()
        self.checks = LogChecks(self.violations)
        self._stream = self._new(1)

    def _new(self, first: int) -> Stream:
        config = {"name": CHUNKS, "subjects": [OWN.of("*")], "first_seq": first}
        return Stream(config, lambda: 0.0)

    def fence(self, epoch: int, worker: str = "wrk_1") -> None:
        own = Ownership(session=SESSION, epoch=epoch, worker=worker)
        sequence = self._stream.append(OWN.of(SESSION), own.to_bytes(), {}).sequence
        stored = self._stream.get(sequence)
        assert stored is not None
        self.checks.appended(self._stream, stored)

    def lose_all(self, first: int = 1) -> None:
        """Go on in a stream whose first sequence is `first`."""
        self.checks.streams_lost()
        self._stream = self._new(first)

    def lose_newest(self) -> None:
        """Restart without the newest fence, whose sequence is given again."""
        kept = [self._stream.get(sequence) for sequence in self._stream.sequences(OWN.of(SESSION))[:-1]]
        self._stream = self._new(1)
        for stored in kept:
            assert stored is not None
            self._stream.append(stored.subject, stored.data, {})
        self.checks.tail_lost(self._stream)


def test_an_epoch_is_named_once() -> None:
    log = Log()
    log.fence(1)
    log.fence(2)
    assert not log.violations.found
    log.fence(2)
    assert log.violations.found == ["epochs_increase"]


def test_a_lost_fence_is_written_again_also_after_a_late_copy_of_it() -> None:
    """The copy has a revision that the lost one had, or a smaller one: the repair needs a greater one."""
    for lose in (Log.lose_all, Log.lose_newest):
        log = Log()
        log.fence(1)
        lose(log)
        log.fence(1)
        log.fence(1)
        assert not log.violations.found
        # The repair has a greater revision than the lost fence: nothing is left to repair.
        log.fence(1)
        assert log.violations.found == ["epochs_increase"]


def test_a_copy_with_a_greater_revision_than_the_lost_fence_is_the_repair() -> None:
    log = Log()
    log.fence(1)
    log.lose_all(first=2)
    log.fence(1)
    assert not log.violations.found
    log.fence(1)
    assert log.violations.found == ["epochs_increase"]


def test_a_repair_names_the_owner_that_was_lost() -> None:
    for epoch, worker in ((2, "wrk_2"), (1, "wrk_1")):
        log = Log()
        log.fence(2)
        log.lose_newest()
        log.fence(2)
        log.fence(epoch, worker)
        assert log.violations.found == ["epochs_increase"]
