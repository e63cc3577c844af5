"""Decides what to start, restart and stop, and when. Told of events and the time; answers with commands."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from turboserve.cli.supervisor.commands import (
    Alarm,
    AlarmOver,
    AllReady,
    Command,
    Crashed,
    Done,
    Failing,
    GaveUp,
    Hangs,
    Kill,
    Launch,
    Terminate,
)

__all__ = [
    "Alarm",
    "AlarmOver",
    "AllReady",
    "Command",
    "Crashed",
    "Done",
    "Failing",
    "GaveUp",
    "Hangs",
    "HealthAnswer",
    "Kill",
    "Launch",
    "Member",
    "Policy",
    "State",
    "Supervision",
    "Terminate",
]


@dataclass(frozen=True)
class Member:
    """One process under supervision."""

    name: str
    wave: int = 0
    """Started once every member of the waves before it has been ready."""
    rank: int = 0
    """Stopped once every member of the ranks before it has ended."""
    grace_s: float = 5.0
    """Between the request to end and the kill."""
    start_limit_s: float = 120.0
    """Killed, and so restarted, when not ready by then."""
    silent_limit: int = 0
    """Killed, and so restarted, when so many questions in a row got no answer, also while it starts again;
    0: never."""
    failing_limit: int = 0
    """Ended, and so restarted, after so many failing answers in a row with room on the disk; 0: never."""
    launched: bool = True
    """False for processes that others start (the workers): they are only stopped here."""


@dataclass(frozen=True)
class Policy:
    """When to restart what crashed."""

    first_delay_s: float = 0.1
    factor: float = 2.0
    longest_delay_s: float = 10.0
    settled_after_s: float = 20.0
    """Up for this long: its earlier crashes no longer count."""
    attempts_to_start: int = 5
    """A member that was never ready and failed this often will not come up by trying again."""
    first_repair_delay_s: float = 15.0
    """Between a restart because of failing answers and the next one, where the first did not help."""
    longest_repair_delay_s: float = 600.0
    start_with_room_s: float = 3.0
    """A start that began on a full disk is repeated unless it succeeds this soon after there is room."""


class State(enum.Enum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"
    """Asked to end because it fails; started again afterwards."""
    BACKOFF = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"


class HealthAnswer(enum.Enum):
    """What came of asking a process whether it serves."""

    SERVES = "serves"
    SILENT = "silent"
    """No answer within the limit."""
    FAILS = "fails"
    """It answered that it cannot do its work."""


@dataclass
class _ProcessState:
    member: Member
    state: State = State.WAITING
    ever_ready: bool = False
    crashes: int = 0
    restarts: int = 0
    unanswered: int = 0
    failures: int = 0
    """Failing answers in a row with room on the disk."""
    repairs: int = 0
    """Restarts because of failing answers that did not help yet."""
    repair_due_s: float = 0.0
    """Not restarted because of failing answers before this time."""
    room: bool = True
    """Whether its disk had room when last looked at."""
    alarm: str | None = None
    """Why it does not serve, while restarting it does not help."""
    since_s: float = 0.0
    """When the current state began."""
    due_s: float | None = None
    """When the current state ends by itself."""


class Supervision:
    """The state of one stack. Every method takes the monotonic time and returns what to do, in order."""

    def __init__(self, members: Iterable[Member], policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self._process_states = {member.name: _ProcessState(member) for member in members}
        self._stopping = False
        self._ready_announced = False
        self._done_announced = False

    @property
    def stopping(self) -> bool:
        return self._stopping

    def state(self, name: str) -> State:
        return self._process_states[name].state

    def restarts(self, name: str) -> int:
        """How often `name` was started again."""
        return self._process_states[name].restarts

    def alarm(self, name: str) -> str | None:
        """Why `name` does not serve, while restarting it does not help; None: no alarm."""
        return self._process_states[name].alarm

    def watches_room(self, name: str) -> bool:
        """Whether `room_checked` matters for `name` now."""
        process_state = self._process_states[name]
        starting = process_state.ever_ready and process_state.state in (State.STARTING, State.BACKOFF)
        return starting or process_state.alarm is not None

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if nothing else happens before."""
        return min(
            (
                process_state.due_s
                for process_state in self._process_states.values()
                if process_state.due_s is not None
            ),
            default=None,
        )

    def start(self, now_s: float) -> list[Command]:
        return self._start_wave(now_s)

    def ready(self, name: str, now_s: float) -> list[Command]:
        """`name` answered that it serves. Late answers of a process that has ended change nothing."""
        process_state = self._process_states[name]
        if process_state.state is not State.STARTING:
            return []
        self._enter(process_state, State.READY, now_s)
        process_state.ever_ready = True
        return self._start_wave(now_s)

    def exited(self, name: str, now_s: float, refused: bool = False) -> list[Command]:
        """The process of `name` has ended, for whatever reason; `refused`: because of its settings."""
        process_state = self._process_states[name]
        if process_state.state not in (State.STARTING, State.READY, State.ENDING, State.STOPPING):
            return []
        if self._stopping:
            # Also what ends by itself before its turn comes.
            self._enter(process_state, State.STOPPED, now_s)
            return self._stop_rank(now_s)
        if (
            process_state.state is State.READY
            and now_s - process_state.since_s >= self.policy.settled_after_s
        ):
            process_state.crashes = 0
        process_state.crashes += 1
        if not process_state.ever_ready and (
            refused or process_state.crashes >= self.policy.attempts_to_start
        ):
            self._enter(process_state, State.STOPPED, now_s)
            return [GaveUp(name, process_state.crashes, refused), *self.stop(now_s)]
        delay_s = self._delay(process_state.crashes)
        self._enter(process_state, State.BACKOFF, now_s, now_s + delay_s)
        return [Crashed(name, delay_s)]

    def asked(
        self, name: str, answer: HealthAnswer, now_s: float, *, reason: str = "", room: bool = True
    ) -> list[Command]:
        """`name` was asked whether it serves, or while it starts whether it does by now.

        Questions are counted, not time: a supervisor that stood still, or a machine that slept, makes no
        process silent.

        `reason` is what a failing answer said; `room` is whether its disk has room, without which a restart
        does not help.
        """
        process_state = self._process_states[name]
        if process_state.state not in (State.STARTING, State.READY):
            return []
        # One that is silent while it starts for the first time may still be at work on its files.
        if process_state.state is State.STARTING and not (
            process_state.ever_ready and answer is HealthAnswer.SILENT
        ):
            process_state.unanswered = 0
            return []
        if answer is HealthAnswer.SILENT:
            process_state.unanswered += 1
            if not 0 < process_state.member.silent_limit <= process_state.unanswered:
                return []
            unanswered, process_state.unanswered = process_state.unanswered, 0
            return [Hangs(name, unanswered), Kill(name)]
        process_state.unanswered = 0
        if answer is HealthAnswer.FAILS:
            return self._failed(process_state, now_s, reason, room)
        process_state.failures = 0
        if now_s - process_state.since_s >= self.policy.settled_after_s:
            process_state.repairs, process_state.repair_due_s = 0, now_s
        if process_state.alarm is None:
            return []
        process_state.alarm = None
        return [AlarmOver(name)]

    def room_checked(self, name: str, room: bool, now_s: float) -> list[Command]:
        """The disk of `name` was looked at. What could not start without room starts once there is room."""
        process_state = self._process_states[name]
        before, process_state.room = process_state.room, room
        if self._stopping or process_state.state not in (State.STARTING, State.BACKOFF):
            return []
        if not room:
            return self._raise_alarm(process_state, "its disk is full")
        if not before:
            # What failed so far failed because of the disk.
            process_state.crashes = 0
            limit_s = now_s if process_state.state is State.BACKOFF else now_s + self.policy.start_with_room_s
            process_state.due_s = (
                limit_s if process_state.due_s is None else min(process_state.due_s, limit_s)
            )
        return []

    def _failed(self, process_state: _ProcessState, now_s: float, reason: str, room: bool) -> list[Command]:
        process_state.room = room
        name, limit = process_state.member.name, process_state.member.failing_limit
        if not room:
            # A restart may help once there is room, whatever earlier ones did.
            process_state.failures, process_state.repairs, process_state.repair_due_s = 0, 0, now_s
            return self._raise_alarm(process_state, reason)
        process_state.failures += 1
        if not 0 < limit <= process_state.failures:
            return []
        if now_s < process_state.repair_due_s:
            return self._raise_alarm(process_state, reason)
        failures = process_state.failures
        delay_s = self.policy.first_repair_delay_s * self.policy.factor ** min(process_state.repairs, 32)
        process_state.repair_due_s = now_s + min(delay_s, self.policy.longest_repair_delay_s)
        process_state.repairs += 1
        self._enter(process_state, State.ENDING, now_s, now_s + process_state.member.grace_s)
        return [Failing(name, failures, reason), Terminate(name)]

    @staticmethod
    def _raise_alarm(process_state: _ProcessState, reason: str) -> list[Command]:
        raised, process_state.alarm = process_state.alarm is None, reason
        return [Alarm(process_state.member.name, reason)] if raised else []

    def tick(self, now_s: float) -> list[Command]:
        """Do what is due."""
        commands: list[Command] = []
        for process_state in self._process_states.values():
            if process_state.due_s is None or process_state.due_s > now_s:
                continue
            if process_state.state is State.BACKOFF:
                process_state.restarts += 1
                commands.append(self._launch(process_state, now_s))
            elif process_state.state is State.STARTING:
                process_state.due_s = None
                commands.append(Kill(process_state.member.name))
            elif process_state.state in (State.STOPPING, State.ENDING):
                # Again and again: whoever may have started meanwhile below it is killed too.
                process_state.due_s = now_s + 1.0
                commands.append(Kill(process_state.member.name))
        return commands

    def stop(self, now_s: float) -> list[Command]:
        """End everything, rank by rank. A second call ends all that is left at once, with little grace."""
        if not self._stopping:
            self._stopping = True
            for process_state in self._process_states.values():
                if process_state.state is State.BACKOFF or (
                    process_state.state is State.WAITING and process_state.member.launched
                ):
                    self._enter(process_state, State.STOPPED, now_s)
            return self._stop_rank(now_s)
        commands: list[Command] = []
        for process_state in self._process_states.values():
            if process_state.state is State.STOPPED:
                continue
            if process_state.state is not State.STOPPING:
                commands.append(Terminate(process_state.member.name))
            self._enter(process_state, State.STOPPING, now_s, now_s + min(process_state.member.grace_s, 1.0))
        return commands

    def _start_wave(self, now_s: float) -> list[Command]:
        if self._stopping:
            return []
        commands: list[Command] = []
        launched = [
            process_state for process_state in self._process_states.values() if process_state.member.launched
        ]
        open_waves = {process_state.member.wave for process_state in launched if not process_state.ever_ready}
        for process_state in launched:
            if process_state.state is State.WAITING and process_state.member.wave == min(open_waves):
                commands.append(self._launch(process_state, now_s))
        if not open_waves and not self._ready_announced:
            self._ready_announced = True
            commands.append(AllReady())
        return commands

    def _stop_rank(self, now_s: float) -> list[Command]:
        alive = [
            process_state
            for process_state in self._process_states.values()
            if process_state.state is not State.STOPPED
        ]
        if not alive:
            if self._done_announced:
                return []
            self._done_announced = True
            return [Done()]
        rank = min(process_state.member.rank for process_state in alive)
        commands: list[Command] = []
        for process_state in alive:
            if process_state.member.rank == rank and process_state.state is not State.STOPPING:
                self._enter(process_state, State.STOPPING, now_s, now_s + process_state.member.grace_s)
                commands.append(Terminate(process_state.member.name))
        return commands

    def _launch(self, process_state: _ProcessState, now_s: float) -> Command:
        self._enter(process_state, State.STARTING, now_s, now_s + process_state.member.start_limit_s)
        return Launch(process_state.member.name)

    def _delay(self, crashes: int) -> float:
        exponent = min(crashes - 1, 32)
        return min(self.policy.first_delay_s * self.policy.factor**exponent, self.policy.longest_delay_s)

    @staticmethod
    def _enter(process_state: _ProcessState, state: State, now_s: float, due_s: float | None = None) -> None:
        process_state.state, process_state.since_s, process_state.due_s = state, now_s, due_s
        process_state.unanswered = process_state.failures = 0
