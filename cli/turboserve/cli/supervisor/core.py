"""Decides what to start, restart and stop, and when. Takes events with the time, and returns commands."""

from __future__ import annotations

from collections.abc import Iterable

from turboserve.backoff import backoff_s
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
from turboserve.cli.supervisor.members import HealthAnswer, Member, Policy, ProcessState, State

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


class Supervision:
    """The state of one stack. Event methods take the monotonic time and return commands, in order."""

    def __init__(self, members: Iterable[Member], policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self._process_states = {member.name: ProcessState(member) for member in members}
        self._stopping = False
        self._ready_announced = False
        self._done_announced = False

    @property
    def stopping(self) -> bool:
        return self._stopping

    def state(self, name: str) -> State:
        return self._process_states[name].state

    def restarts(self, name: str) -> int:
        """Return how often `name` was restarted."""
        return self._process_states[name].restarts

    def alarm(self, name: str) -> str | None:
        """Return why `name` does not serve although a restart does not help. None: no alarm."""
        return self._process_states[name].alarm

    def watches_room(self, name: str) -> bool:
        """Whether `room_checked` has an effect for `name` now."""
        process_state = self._process_states[name]
        starting = process_state.ever_ready and process_state.state in (State.STARTING, State.BACKOFF)
        return starting or process_state.alarm is not None

    def next_deadline(self) -> float | None:
        """Return the time at which to call `tick`, unless another event comes first. None: no deadline."""
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
        """Note that `name` is ready. A late answer of a process that has ended changes nothing."""
        process_state = self._process_states[name]
        if process_state.state is not State.STARTING:
            return []
        self._enter(process_state, State.READY, now_s)
        process_state.ever_ready = True
        return self._start_wave(now_s)

    def exited(self, name: str, now_s: float, refused: bool = False) -> list[Command]:
        """Note that the process of `name` has ended for any reason. `refused`: it refused its settings."""
        process_state = self._process_states[name]
        if process_state.state not in (State.STARTING, State.READY, State.ENDING, State.STOPPING):
            return []
        if self._stopping:
            # The process may also have ended by itself before its turn.
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
        delay_s = backoff_s(process_state.crashes, self.policy.first_delay_s, self.policy.longest_delay_s)
        self._enter(process_state, State.BACKOFF, now_s, now_s + delay_s)
        return [Crashed(name, delay_s)]

    def asked(
        self, name: str, answer: HealthAnswer, now_s: float, *, reason: str = "", room: bool = True
    ) -> list[Command]:
        """Note the result of a health check of `name`, or of a probe while it starts.

        Silence is counted in checks instead of seconds, so that a pause of the supervisor or of the machine
        makes no process count as silent.

        `reason` is the text of a failing answer. `room` is whether the process's disk has space: without
        space, a restart does not help.
        """
        process_state = self._process_states[name]
        if process_state.state not in (State.STARTING, State.READY):
            return []
        # A process that is silent during its first start may still be preparing its files.
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
        """Note whether the disk of `name` has space. A start that failed for lack of it is repeated then."""
        process_state = self._process_states[name]
        before, process_state.room = process_state.room, room
        if self._stopping or process_state.state not in (State.STARTING, State.BACKOFF):
            return []
        if not room:
            return self._raise_alarm(process_state, "its disk is full")
        if not before:
            # The failures so far were due to the full disk.
            process_state.crashes = 0
            limit_s = now_s if process_state.state is State.BACKOFF else now_s + self.policy.start_with_room_s
            process_state.due_s = (
                limit_s if process_state.due_s is None else min(process_state.due_s, limit_s)
            )
        return []

    def _failed(self, process_state: ProcessState, now_s: float, reason: str, room: bool) -> list[Command]:
        process_state.room = room
        name, limit = process_state.member.name, process_state.member.failing_limit
        if not room:
            # Once there is space, a restart may help, even if earlier restarts did not.
            process_state.failures, process_state.repairs, process_state.repair_due_s = 0, 0, now_s
            return self._raise_alarm(process_state, reason)
        process_state.failures += 1
        if not 0 < limit <= process_state.failures:
            return []
        if now_s < process_state.repair_due_s:
            return self._raise_alarm(process_state, reason)
        failures = process_state.failures
        process_state.repairs += 1
        process_state.repair_due_s = now_s + backoff_s(
            process_state.repairs, self.policy.first_repair_delay_s, self.policy.longest_repair_delay_s
        )
        self._enter(process_state, State.ENDING, now_s, now_s + process_state.member.grace_s)
        return [Failing(name, failures, reason), Terminate(name)]

    @staticmethod
    def _raise_alarm(process_state: ProcessState, reason: str) -> list[Command]:
        raised, process_state.alarm = process_state.alarm is None, reason
        return [Alarm(process_state.member.name, reason)] if raised else []

    def tick(self, now_s: float) -> list[Command]:
        """Return the commands that are due."""
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
                # Repeat the kill, to end descendants that were started in the meantime.
                process_state.due_s = now_s + 1.0
                commands.append(Kill(process_state.member.name))
        return commands

    def stop(self, now_s: float) -> list[Command]:
        """End everything, rank by rank. A second call ends the rest at once, with a grace of at most 1 s."""
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

    def _launch(self, process_state: ProcessState, now_s: float) -> Command:
        self._enter(process_state, State.STARTING, now_s, now_s + process_state.member.start_limit_s)
        return Launch(process_state.member.name)

    @staticmethod
    def _enter(process_state: ProcessState, state: State, now_s: float, due_s: float | None = None) -> None:
        process_state.state, process_state.since_s, process_state.due_s = state, now_s, due_s
        process_state.unanswered = process_state.failures = 0
