"""A model of the worker's engine: slabs, host memory, chunk boundaries; states stand for what they contain.

A state is known by its chain: a number that every chunk changes in a way that depends on all chunks before.
Two states that make the same next chunk have the same chain, so a copy, a resumption or a move that loses
or repeats a chunk shows in the chunks that follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from turboserve.bench.simulate.faults import Faults
from turboserve.bench.simulate.kernel import Program
from turboserve.contracts.chunks import ChunkHeader
from turboserve.worker.service import commands as do
from turboserve.worker.service import inputs as told

CHUNK_S = 1.0
"""Media time of one chunk."""
COMPUTE_S = 0.25
MAX_LEAD_S = 2.0
TRUST_S = 2.0
"""A playhead is taken to move on by itself for this long after it was reported."""
FRAMES = 12
ARRIVED = -1
"""Number of a standing still that nobody here has wished for."""
LOST = 1
"""Chain of a state that was begun without its context."""


@dataclass(frozen=True)
class Chunk:
    """What stands in the log: the header, the chain it was made from, the chain after it."""

    header: ChunkHeader
    parent: int
    chain: int


def link(chain: int, index: int) -> int:
    """The chain after chunk `index`."""
    return (chain * 6364136223846793005 + index * 1442695040888963407 + 12345) % (1 << 61)


def begin(seed: int) -> int:
    """The chain of a session that has made nothing."""
    return link(seed + 2, -1)


@dataclass
class State:
    """One session's state in a slab or on the host."""

    session: str
    run: int
    next_chunk: int
    chain: int
    control_seq: int
    playhead_s: float
    reported_at: float
    playing: bool = True
    halted: bool = False
    suspending: bool = False
    on_host: bool = False
    freezing: int | None = None
    """It is to stand still, or does: number of that wish."""
    working: bool = False
    finished_late: bool = False
    """The chunk in work was done while generating was stopped."""
    waiting: tuple[int, ...] = ()
    """Controls for the next boundary."""

    @property
    def digest(self) -> str:
        """Of everything that another worker needs to make the same next chunk."""
        return f"{self.session}:{self.next_chunk}:{self.chain}:{self.control_seq}"


@dataclass(frozen=True)
class Made:
    """A chunk on its way to the log."""

    session: str
    run: int
    index: int
    control_seq: int
    parent: int
    chain: int


Tell = Callable[[told.Input], None]


class Engine:
    """One worker's device. Commands are taken in order; a step is one chunk of one session."""

    def __init__(
        self,
        program: Program,
        slabs: int,
        host_slots: int,
        faults: Callable[[], Faults],
        deliver: Callable[[Made | told.Input], None],
    ) -> None:
        self.slabs, self.host_slots = slabs, host_slots
        self.states: dict[str, State] = {}
        self._generate_until = -math.inf
        self._ended = False
        self.landings: dict[tuple[str, int], bool] = {}
        """Memory kept for states on their way here, by session and run: whether on the host."""
        self.on_chunk: Callable[[str], None] = lambda _session: None
        """Called when a chunk of a session is begun."""
        self._program, self._faults, self._deliver = program, faults, deliver

    @property
    def used(self) -> int:
        coming = sum(not on_host for on_host in self.landings.values())
        return sum(not state.on_host for state in self.states.values()) + coming

    @property
    def on_host(self) -> int:
        return len(self.states) + len(self.landings) - self.used

    @property
    def generating(self) -> bool:
        """Whether the lease holds, by the engine's own look at the clock."""
        return not self._ended and self._program.kernel.now < self._generate_until

    def end(self) -> None:
        """As `EngineThread.stop`: no step begins after it, whatever commands are still queued."""
        self._ended = True

    # Commands

    def submit(self, command: do.Command) -> None:
        """Carried out a moment later, in order of submission."""
        self._program.after(0.001, lambda: self._carry_out(command))

    def admit(self, command: do.Admit, chain: int) -> None:
        self._program.after(0.001, lambda: self._admit(command, chain))

    # States that come from elsewhere

    def reserve(self, session: str, run: int, on_host: bool) -> bool:
        """Keep memory for a state; whether there was some."""
        free = self.host_slots - self.on_host if on_host else self.slabs - self.used
        if free < 1:
            return False
        self.landings[session, run] = on_host
        return True

    def unreserve(self, session: str, run: int) -> None:
        self.landings.pop((session, run), None)

    def land(self, state: State, run: int, on_host: bool) -> None:
        """The state is here; it stands still, or is on the host."""
        assert state.session not in self.states, f"{state.session} is here already"
        self.unreserve(state.session, run)
        state.run, state.on_host, state.freezing = run, on_host, None if on_host else ARRIVED
        state.working = state.finished_late = state.suspending = state.halted = False
        state.waiting = ()
        self.states[state.session] = state

    def _admit(self, command: do.Admit, chain: int) -> None:
        session, run = command.session, command.run
        if session in self.states:
            self._deliver(told.RunFailed(session, run, "it is here already"))
        elif self.used >= self.slabs:
            self._deliver(told.AdmissionRefused(session, run, "slabs: none is free", on_host=False))
        else:
            now = self._program.kernel.now
            self.states[session] = State(
                session, run, command.next_chunk, chain, command.control_seq, command.playhead_s, now
            )
            self._go_on(self.states[session])

    def _carry_out(self, command: do.Command) -> None:
        if isinstance(command, do.GenerateUntil | do.StopGenerating):
            self._generate(command.until if isinstance(command, do.GenerateUntil) else -math.inf)
            return
        state = self.states.get(getattr(command, "session", ""))
        if state is None or state.run != getattr(command, "run", None):
            return
        match command:
            case do.Evict():
                del self.states[state.session]
                return
            case do.Suspend():
                state.suspending = True
            case do.Resume(playhead_s=playhead_s):
                if not state.on_host:
                    self._deliver(told.RunFailed(state.session, state.run, "it is not on the host"))
                elif self.used >= self.slabs:
                    refusal = told.AdmissionRefused(state.session, state.run, "slabs: none is free", True)
                    self._deliver(refusal)
                else:
                    state.on_host, state.suspending = False, False
                    state.playhead_s, state.reported_at = playhead_s, self._program.kernel.now
            case do.Freeze(number=number):
                state.freezing = number
            case do.Thaw():
                state.freezing = None
            case do.Halt():
                state.halted = True
            case do.Unhalt():
                state.halted = False
            case do.SetPrompt(control_seq=control_seq):
                state.waiting = (*state.waiting, control_seq)
            case do.SetPlayhead(playhead_s=playhead_s, playing=playing):
                state.playhead_s, state.playing = playhead_s, playing
                state.reported_at = self._program.kernel.now
        if not state.on_host:
            self._go_on(state)

    def _generate(self, until: float) -> None:
        stood_still, self._generate_until = not self.generating, until
        for state in list(self.states.values()) if stood_still and self.generating else ():
            if state.finished_late:
                self._finish(state)
            elif not state.on_host:
                self._go_on(state)

    # Chunks

    def _go_on(self, state: State) -> None:
        """At a boundary: apply controls, leave for the host, or begin the next chunk if it is due."""
        if state.working or self.states.get(state.session) is not state or not self.generating:
            return
        if state.on_host:
            # Its next chunk was to be due later, and it has left its slab since.
            return
        if state.freezing is not None:
            self._deliver(told.Frozen(state.session, state.run, state.next_chunk, state.freezing))
            return
        if state.waiting:
            state.control_seq, state.waiting = state.waiting[-1], ()
            self._deliver(told.ControlTaken(state.session, state.run, state.control_seq))
        if state.suspending:
            self._suspend(state)
            return
        if state.halted:
            return
        now = self._program.kernel.now
        moved_s = min(now - state.reported_at, TRUST_S) if state.playing else 0.0
        playhead_s = max(state.playhead_s, min(state.playhead_s + moved_s, state.next_chunk * CHUNK_S))
        ahead_s = state.next_chunk * CHUNK_S - playhead_s - MAX_LEAD_S
        if ahead_s < 0:
            state.working = True
            self.on_chunk(state.session)
            self._program.after(COMPUTE_S, lambda: self._finish(state))
        elif state.playing and moved_s + ahead_s < TRUST_S:
            self._program.after(ahead_s + 0.01, lambda: self._go_on(state))

    def _finish(self, state: State) -> None:
        if self.states.get(state.session) is not state:
            return
        if not self.generating:
            state.finished_late = True
            return
        parent, index = state.chain, state.next_chunk
        state.chain, state.next_chunk = link(parent, index), index + 1
        state.working = state.finished_late = False
        self._deliver(Made(state.session, state.run, index, state.control_seq, parent, state.chain))
        self._go_on(state)

    def _suspend(self, state: State) -> None:
        state.suspending = False
        full = self.on_host >= self.host_slots or self._program.kernel.chance(self._faults().host_full)
        if full:
            self._deliver(told.SuspendRefused(state.session, state.run, "host memory: full"))
            self._go_on(state)
            return
        state.on_host = True
        self._deliver(told.MovedToHost(state.session, state.run, state.next_chunk))
