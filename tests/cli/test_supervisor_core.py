"""The supervisor's decisions, without processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from turboserve.cli.supervisor.core import (
    Alarm,
    AlarmOver,
    AllReady,
    Command,
    Crashed,
    Done,
    Failing,
    GaveUp,
    Hangs,
    HealthAnswer,
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


def test_what_refuses_its_settings_is_not_tried_again_unless_it_has_run_before() -> None:
    supervision = Supervision([SERVER, STORE])
    supervision.start(0.0)
    supervision.ready("server", 1.0)
    assert supervision.exited("store", 2.0, refused=True) == [
        GaveUp("store", 1, refused=True),
        Terminate("server"),
    ]
    # The file of keys may be damaged while sessions play. That must not stop the rest.
    assert up(SERVER, STORE).exited("store", 5.0, refused=True) == [Crashed("store", 0.1)]


def test_the_next_deadline_is_the_earliest() -> None:
    supervision = up(SERVER, EDGE)
    supervision.exited("edge", 7.0)
    supervision.exited("server", 5.0)
    assert supervision.next_deadline() == 5.1
    assert supervision.tick(5.1) == [Launch("server")]
    assert supervision.next_deadline() == 7.1


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


def answers(supervision: Supervision, name: str, *given: HealthAnswer, room: bool = True) -> list[Command]:
    """Give several answers. Returns the commands after the last; the others must lead to none."""
    for answer in given[:-1]:
        assert supervision.asked(name, answer, 1.0, reason="why", room=room) == []
    return supervision.asked(name, given[-1], 1.0, reason="why", room=room)


SERVES, SILENT, FAILS = HealthAnswer.SERVES, HealthAnswer.SILENT, HealthAnswer.FAILS


def test_what_falls_silent_is_killed_and_restarted() -> None:
    supervision = up(Member("edge", silent_limit=3), SERVER)
    assert answers(supervision, "edge", SILENT, SILENT, SERVES, SILENT, SILENT) == []
    assert answers(supervision, "edge", SILENT) == [Hangs("edge", 3), Kill("edge")]
    # Its silence ends with it: nothing is counted while it waits for its restart, nor afterwards.
    assert supervision.exited("edge", 5.0) == [Crashed("edge", 0.1)]
    assert answers(supervision, "edge", SILENT) == []
    assert supervision.tick(5.1) == [Launch("edge")]
    supervision.ready("edge", 6.0)
    assert answers(supervision, "edge", SILENT, SILENT) == []
    assert answers(supervision, "server", *[SILENT] * 9) == []


def test_what_is_silent_while_it_starts_again_is_killed_but_not_in_its_first_start() -> None:
    supervision = Supervision([Member("edge", silent_limit=3)])
    supervision.start(0.0)
    # The first start may take any time up to its limit.
    assert answers(supervision, "edge", *[SILENT] * 9) == []
    supervision.ready("edge", 1.0)
    supervision.exited("edge", 2.0)
    supervision.tick(2.1)
    assert supervision.state("edge") is State.STARTING
    # A probe during the start does not decide whether it serves or fails.
    assert answers(supervision, "edge", FAILS, FAILS, SERVES) == []
    # Any answer in between ends a silence.
    assert answers(supervision, "edge", SILENT, SILENT, FAILS, SILENT, SILENT) == []
    assert answers(supervision, "edge", SILENT) == [Hangs("edge", 3), Kill("edge")]


BROKER = Member("broker", silent_limit=4, failing_limit=3, grace_s=7.0)


def test_what_fails_with_room_on_the_disk_is_ended_and_restarted() -> None:
    supervision = up(BROKER)
    # It answers, so it is not silent. A failure between two good answers does not count.
    assert answers(supervision, "broker", SILENT, SILENT, SILENT, FAILS, FAILS, SERVES, FAILS, FAILS) == []
    assert answers(supervision, "broker", FAILS) == [Failing("broker", 3, "why"), Terminate("broker")]
    assert supervision.state("broker") is State.ENDING
    # It may hang while it ends.
    assert supervision.tick(1.0 + BROKER.grace_s) == [Kill("broker")]
    assert supervision.exited("broker", 8.5) == [Crashed("broker", 0.1)]
    assert supervision.tick(8.6) == [Launch("broker")]


def test_what_fails_on_a_full_disk_is_left_alone_and_restarted_once_there_is_room() -> None:
    supervision = up(BROKER)
    assert answers(supervision, "broker", FAILS, room=False) == [Alarm("broker", "why")]
    assert answers(supervision, "broker", *[FAILS] * 100, room=False) == []
    assert supervision.alarm("broker") == "why"
    assert supervision.state("broker") is State.READY
    assert answers(supervision, "broker", FAILS, FAILS, FAILS)[1:] == [Terminate("broker")]
    supervision.exited("broker", 2.0)
    supervision.tick(3.0)
    supervision.ready("broker", 3.0)
    assert supervision.alarm("broker") == "why", "nobody has seen it write yet"
    assert answers(supervision, "broker", SERVES) == [AlarmOver("broker")]
    assert supervision.alarm("broker") is None


def test_what_recovers_by_itself_when_there_is_room_is_not_restarted() -> None:
    supervision = up(BROKER)
    supervision.asked("broker", FAILS, 1.0, reason="why", room=False)
    assert answers(supervision, "broker", FAILS, SERVES) == [AlarmOver("broker")]
    assert supervision.restarts("broker") == 0


def test_a_restart_that_does_not_help_is_repeated_ever_later_and_raises_the_alarm() -> None:
    supervision = up(BROKER)
    now, restarted = 1.0, [0.0]
    alarms = 0
    while now < 2_000.0:
        now += 1.0
        commands = supervision.asked("broker", FAILS, now, reason="why")
        alarms += sum(isinstance(command, Alarm) for command in commands)
        if Terminate("broker") in commands:
            restarted.append(now)
            supervision.exited("broker", now)
            supervision.tick(supervision.next_deadline() or now)
            supervision.ready("broker", now)
    waits = [after - before for before, after in itertools.pairwise(restarted[1:])]
    assert waits[0] == pytest.approx(POLICY.first_repair_delay_s, abs=2.0)
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(POLICY.longest_repair_delay_s, abs=2.0)
    assert alarms == 1


def test_what_ended_on_a_full_disk_is_started_the_moment_there_is_room() -> None:
    supervision = up(BROKER)
    now = 10.0
    for _ in range(9):
        supervision.exited("broker", now)
        supervision.room_checked("broker", False, now)
        assert supervision.watches_room("broker")
        now = supervision.next_deadline() or now
        supervision.tick(now)
    supervision.exited("broker", now)
    assert supervision.alarm("broker") == "its disk is full"
    assert (supervision.next_deadline() or 0.0) > now + 5.0
    assert supervision.room_checked("broker", False, now + 1.0) == []
    supervision.room_checked("broker", True, now + 2.0)
    assert supervision.tick(now + 2.0) == [Launch("broker")]
    # Room that existed before does not shorten the wait.
    supervision.exited("broker", now + 3.0)
    due = supervision.next_deadline()
    supervision.room_checked("broker", True, now + 3.0)
    assert supervision.next_deadline() == due


def test_a_start_that_the_full_disk_held_up_is_repeated_when_there_is_room() -> None:
    supervision = up(BROKER)
    supervision.exited("broker", 10.0)
    supervision.tick(10.1)
    supervision.room_checked("broker", False, 11.0)
    supervision.room_checked("broker", True, 60.0)
    assert supervision.tick(60.0 + POLICY.start_with_room_s) == [Kill("broker")]


@given(st.lists(st.tuples(st.sampled_from(HealthAnswer), st.booleans(), st.floats(0.1, 20.0)), max_size=60))
def test_a_process_that_answers_is_never_ended_while_its_disk_is_full(
    told: Sequence[tuple[HealthAnswer, bool, float]],
) -> None:
    """Nor with too few failures or too little silence; and an alarm reports the state."""
    supervision = up(BROKER)
    now, silent, failing = 1.0, 0, 0
    for answer, room, pause_s in told:
        now += pause_s
        commands = supervision.asked("broker", answer, now, reason="why", room=room)
        silent = silent + 1 if answer is SILENT else 0
        failing = 0 if answer is SERVES or (answer is FAILS and not room) else failing + (answer is FAILS)
        if Kill("broker") in commands:
            assert silent >= BROKER.silent_limit
        if Terminate("broker") in commands:
            assert answer is FAILS
            assert room
            assert failing >= BROKER.failing_limit
        if Kill("broker") in commands or Terminate("broker") in commands:
            silent = failing = 0
            supervision.exited("broker", now)
            supervision.tick(supervision.next_deadline() or now)
            supervision.ready("broker", now)
        elif answer is FAILS and not room:
            assert supervision.alarm("broker") == "why"
        elif answer is SERVES:
            assert supervision.alarm("broker") is None


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
        # `life_s` itself differs from this because of rounding in the clock's sums.
        if now - ready_at < POLICY.settled_after_s:
            assert crashed.delay_s >= previous
        else:
            assert crashed.delay_s == POLICY.first_delay_s
        previous = crashed.delay_s
        now += crashed.delay_s
        supervision.tick(now)
        supervision.ready("server", now)


MEMBERS = (
    Member("nats", wave=0, rank=3, silent_limit=2, failing_limit=2),
    Member("redis", wave=0, rank=3),
    Member("store", wave=1, rank=2),
    Member("gateway", wave=2, rank=0, silent_limit=2),
    Member("autoscaler", wave=2, rank=1),
    WORKERS,
)


class SupervisionMachine(RuleBasedStateMachine):
    """Any order of events: at most one process per member, none after the stop, and the stop ends."""

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
                    if self.supervision.state(name) is State.ENDING:
                        assert name in self.alive
                        continue
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

    @rule(
        which=st.sampled_from([m.name for m in MEMBERS]),
        answer=st.sampled_from(HealthAnswer),
        room=st.booleans(),
    )
    def asked(self, which: str, answer: HealthAnswer, room: bool) -> None:
        commands = self.supervision.asked(which, answer, self.now, room=room)
        assert not commands or which in self.alive
        self.obey(commands)

    @rule(which=st.sampled_from([m.name for m in MEMBERS]), room=st.booleans())
    def room_checked(self, which: str, room: bool) -> None:
        self.obey(self.supervision.room_checked(which, room, self.now))

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
        """Check that it is never stuck: a process is alive, a deadline is pending, or all is over."""
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
