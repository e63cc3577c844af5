"""The supervisor's decisions, without processes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from turboserve.cli.supervisor.core import (
    AllReady,
    Command,
    Crashed,
    Done,
    GaveUp,
    Hangs,
    Kill,
    Launch,
    Member,
    Policy,
    State,
    Supervision,
    Terminate,
)

SERVER = Member("server", wave=0, rank=2)
STORE = Member("store", wave=1, rank=1)
EDGE = Member("edge", wave=2, rank=0)
WORKERS = Member("workers", rank=0, launched=False)
POLICY = Policy()


def up(*members: Member) -> Supervision:
    supervision = Supervision(members)
    commands = supervision.start(0.0)
    while launched := [c.name for c in commands if isinstance(c, Launch)]:
        commands = [c for name in launched for c in supervision.ready(name, 1.0)]
    assert commands == [AllReady()]
    return supervision


def test_waves_start_one_after_the_other() -> None:
    supervision = Supervision([SERVER, STORE, EDGE])
    assert supervision.start(0.0) == [Launch("server")]
    assert supervision.ready("server", 1.0) == [Launch("store")]
    assert supervision.ready("store", 2.0) == [Launch("edge")]
    assert supervision.ready("edge", 3.0) == [AllReady()]


def test_a_first_crash_is_restarted_almost_at_once_and_later_ones_ever_later() -> None:
    supervision = up(SERVER)
    now, delays = 2.0, []
    for _ in range(10):
        [crashed] = supervision.exited("server", now)
        assert isinstance(crashed, Crashed)
        delays.append(crashed.delay_s)
        due = supervision.next_deadline()
        assert due == now + crashed.delay_s
        assert supervision.tick(due - 0.01) == []
        assert supervision.tick(due) == [Launch("server")]
        assert supervision.ready("server", due) == []
        now = due + 1.0
    assert delays[:4] == [0.1, 0.2, 0.4, 0.8]
    assert delays[-1] == POLICY.longest_delay_s


def test_a_crash_after_a_long_life_counts_as_the_first() -> None:
    supervision = up(SERVER)
    supervision.exited("server", 2.0)
    supervision.tick(3.0)
    supervision.ready("server", 3.0)
    assert supervision.exited("server", 3.0 + POLICY.settled_after_s) == [Crashed("server", 0.1)]


def test_what_never_comes_up_ends_the_stack() -> None:
    supervision = Supervision([SERVER, STORE])
    supervision.start(0.0)
    supervision.ready("server", 0.0)
    now = 0.0
    for attempt in range(1, POLICY.attempts_to_start + 1):
        commands = supervision.exited("store", now)
        if attempt < POLICY.attempts_to_start:
            now = supervision.next_deadline() or 0.0
            supervision.tick(now)
    assert commands == [GaveUp("store", POLICY.attempts_to_start), Terminate("server")]
    assert supervision.exited("server", now) == [Done()]


def test_what_hangs_at_the_start_is_killed_and_restarted() -> None:
    supervision = Supervision([SERVER])
    supervision.start(0.0)
    assert supervision.tick(SERVER.start_limit_s) == [Kill("server")]
    assert supervision.exited("server", SERVER.start_limit_s) == [Crashed("server", 0.1)]


def test_what_falls_silent_is_killed_and_restarted() -> None:
    supervision = up(Member("edge", silent_limit=3), SERVER)
    assert [supervision.asked("edge", lives) for lives in (False, False, True, False, False)] == [[]] * 5
    assert supervision.asked("edge", False) == [Hangs("edge", 3), Kill("edge")]
    # Its silence is over with it: neither while it waits for its restart nor after is anything counted.
    assert supervision.exited("edge", 5.0) == [Crashed("edge", 0.1)]
    assert supervision.asked("edge", False) == []
    assert supervision.tick(5.1) == [Launch("edge")]
    supervision.ready("edge", 6.0)
    assert [supervision.asked("edge", False) for _ in range(2)] == [[]] * 2
    assert [supervision.asked("server", False) for _ in range(9)] == [[]] * 9


def test_stop_goes_rank_by_rank_and_kills_what_lingers() -> None:
    supervision = up(SERVER, STORE, EDGE, WORKERS)
    assert supervision.stop(10.0) == [Terminate("edge"), Terminate("workers")]
    assert supervision.exited("edge", 11.0) == []
    assert supervision.tick(10.0 + WORKERS.grace_s) == [Kill("workers")]
    assert supervision.exited("workers", 16.0) == [Terminate("store")]
    assert supervision.exited("store", 16.0) == [Terminate("server")]
    assert supervision.exited("server", 16.0) == [Done()]


def test_a_second_stop_ends_everything_at_once() -> None:
    supervision = up(SERVER, STORE, EDGE)
    supervision.stop(10.0)
    assert supervision.stop(10.5) == [Terminate("server"), Terminate("store")]
    assert supervision.tick(11.5) == [Kill("server"), Kill("store"), Kill("edge")]


def test_a_late_answer_of_a_dead_process_changes_nothing() -> None:
    supervision = up(SERVER)
    supervision.exited("server", 2.0)
    assert supervision.ready("server", 2.0) == []
    assert supervision.state("server") is State.BACKOFF


@given(st.lists(st.floats(0.0, 60.0), min_size=1, max_size=40))
@settings(max_examples=50)
def test_delays_stay_within_bounds_and_never_shrink_between_quick_crashes(lives_s: Sequence[float]) -> None:
    supervision = up(SERVER)
    now, previous = 1.0, 0.0
    for life_s in lives_s:
        ready_at = now
        now += life_s
        [crashed] = supervision.exited("server", now)
        assert isinstance(crashed, Crashed)
        assert POLICY.first_delay_s <= crashed.delay_s <= POLICY.longest_delay_s
        # Not `life_s`, which is not quite what the clock's sums make of it.
        if now - ready_at < POLICY.settled_after_s:
            assert crashed.delay_s >= previous
        else:
            assert crashed.delay_s == POLICY.first_delay_s
        previous = crashed.delay_s
        now += crashed.delay_s
        supervision.tick(now)
        supervision.ready("server", now)


MEMBERS = (
    Member("nats", wave=0, rank=3),
    Member("redis", wave=0, rank=3),
    Member("store", wave=1, rank=2),
    Member("gateway", wave=2, rank=0, silent_limit=2),
    Member("autoscaler", wave=2, rank=1),
    WORKERS,
)


class SupervisionMachine(RuleBasedStateMachine):
    """Any order of events: at most one process per member, none after the stop, and an end that comes."""

    names: Bundle[str] = Bundle("names")

    @initialize(target=names)
    def begin(self) -> str:
        self.now = 0.0
        self.supervision = Supervision(MEMBERS)
        self.rank = {member.name: member.rank for member in MEMBERS}
        self.alive: set[str] = set()
        self.terminated: set[str] = set()
        self.done = False
        self.hurried = False
        self.obey(self.supervision.start(self.now))
        return "workers"

    def obey(self, commands: Sequence[Command]) -> None:
        for command in commands:
            assert not self.done, "nothing follows Done"
            match command:
                case Launch(name):
                    assert name not in self.alive
                    assert not self.supervision.stopping
                    self.alive.add(name)
                case Terminate(name):
                    assert self.supervision.stopping
                    if not self.hurried:
                        lower = {n for n in self.alive if self.rank[n] < self.rank[name]}
                        assert not lower
                    self.terminated.add(name)
                    if name == "workers":
                        self.alive.add(name)
                case Done():
                    assert not self.alive
                    self.done = True
                case _:
                    pass

    @rule(which=st.sampled_from([m.name for m in MEMBERS]))
    def ready(self, which: str) -> None:
        if which in self.alive:
            self.obey(self.supervision.ready(which, self.now))

    @rule(which=st.sampled_from([m.name for m in MEMBERS]), lives=st.booleans())
    def asked(self, which: str, lives: bool) -> None:
        commands = self.supervision.asked(which, lives)
        assert not commands or which in self.alive
        self.obey(commands)

    @rule(which=st.sampled_from([m.name for m in MEMBERS]))
    def exit(self, which: str) -> None:
        if which in self.alive:
            self.alive.discard(which)
            self.obey(self.supervision.exited(which, self.now))

    @rule(seconds=st.floats(0.01, 30.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.supervision.tick(self.now))

    @rule()
    def stop(self) -> None:
        if not self.done:
            self.hurried = self.supervision.stopping
            self.obey(self.supervision.stop(self.now))

    @invariant()
    def somebody_acts_next(self) -> None:
        """Never stuck: a process is alive, a deadline is pending, or all is over."""
        assert self.alive or self.done or self.supervision.next_deadline() is not None

    def teardown(self) -> None:
        if not hasattr(self, "supervision"):
            return
        if not self.supervision.stopping:
            self.obey(self.supervision.stop(self.now))
        for _ in range(2 * len(MEMBERS)):
            for name in sorted(self.alive & self.terminated):
                self.alive.discard(name)
                self.obey(self.supervision.exited(name, self.now))
        assert self.done


TestSupervision = pytest.mark.filterwarnings("ignore")(SupervisionMachine.TestCase)
