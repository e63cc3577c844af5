"""The session table: who is here, on the device or suspended on the host, and the memory they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from turboserve.worker.engine.errors import BadRebuild, DuplicateSession, UnknownSession
from turboserve.worker.engine.hostpool import Extent, HostPool, size_of
from turboserve.worker.engine.lane import Bell, Lane
from turboserve.worker.engine.pool import SlabPool
from turboserve.worker.engine.ring import KVRing
from turboserve.worker.engine.session import Playhead, Session, Undecoded
from turboserve.worker.engine.slab import Slab, SlabLayout
from turboserve.worker.engine.snapshot import Snapshot, parts, prepare
from turboserve.worker.engine.spec import EngineOptions, Rebuild, SessionSpec
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.transfer import Transfer, Way
from turboserve.worker.model.transformer import CausalWanTransformer

_Seated = tuple[SessionState, dict[str, Tensor]]
"""A state on its slab, and those of its tensors that are still to be filled, by name."""


@dataclass(frozen=True, eq=False)
class _Asleep:
    """A suspended session: its state is on the host, the rest of it waits here."""

    session: Session | None
    """None: it came here in this state."""
    snapshot: Snapshot
    extent: Extent


class SessionTable:
    """Active and suspended sessions. Every slab and every host byte in use belongs to exactly one of them, or
    is kept for one that is on its way here (`adoption.reserve`)."""

    def __init__(
        self, model: CausalWanTransformer, fingerprint: str, options: EngineOptions, bell: Bell
    ) -> None:
        """Raises `BudgetTooSmall` or `HostMemoryUnavailable`. `fingerprint`: see `snapshot.parts`; `bell`
        rings when a transfer is done."""
        parameter = model.patch_embedding.weight
        self.device = parameter.device
        self.pool = SlabPool(SlabLayout.of(model.config, parameter.dtype), options.slab_bytes, self.device)
        self.host = HostPool(options.host_bytes, pinned=self.device.type == "cuda")
        self.transfers: Lane[Transfer] = Lane("transfer", self.device, bell, options.overlap)
        self.sessions: dict[str, Session] = {}
        """Active sessions by name, and those whose state is on its way."""
        self._asleep: dict[str, _Asleep] = {}
        self._model, self._fingerprint = model, fingerprint
        self._config = model.config
        self._options = options

    @property
    def host_bytes_used(self) -> int:
        """Bytes of the host pool in use."""
        return self.host.used_bytes

    def active(self, session: str) -> Session:
        """The active session of this name. Raises `UnknownSession`."""
        if session not in self.sessions:
            raise UnknownSession(session, "active")
        return self.sessions[session]

    def suspended(self, session: str) -> Snapshot:
        """Snapshot of the suspended session of this name, in the host pool. Raises `UnknownSession`."""
        if session not in self._asleep:
            raise UnknownSession(session, "suspended")
        return self._asleep[session].snapshot

    def knows(self, session: str) -> bool:
        """Whether a session of this name is here, active or suspended."""
        return session in self.sessions or session in self._asleep

    def lay_down(self, snapshot: Snapshot, extent: Extent) -> None:
        """Take in a suspended session; `snapshot` lies in `extent` of the host pool."""
        self._asleep[snapshot.session] = _Asleep(None, snapshot, extent)

    def admit(self, spec: SessionSpec, snapshot: Snapshot | None) -> Session:
        """See `Engine.admit`."""
        if self.knows(spec.session):
            raise DuplicateSession(spec.session)
        if spec.rebuild is not None:
            self._check(spec.rebuild)
        state, targets = self._seated(
            lambda slab: (self._fresh(spec, slab), {}) if snapshot is None else self._prepared(snapshot, slab)
        )
        session = Session(state, self._options.max_lead_s, Playhead(position_s=spec.playhead_s))
        if spec.rebuild is not None and snapshot is None:
            self._plan(session, spec.rebuild)
        session.delivered = state.next_chunk
        self.sessions[spec.session] = session
        if snapshot is not None:
            self._arrive(session, snapshot, None, targets)
        return session

    @torch.inference_mode()
    def suspend(self, session: Session) -> None:
        """Begin to move a session at rest to the host. Raises `HostPoolFull` or `HostMemoryUnavailable`; then
        the session is as before."""
        header, tensors = parts(session.state, self._fingerprint)
        extent = self.host.take(size_of(tensors))
        try:
            targets = self.host.tensors(extent, tensors)
        except BaseException:
            self.host.give_back(extent)
            raise
        snapshot = Snapshot(header, targets)
        session.transfer = Transfer(session.name, Way.LEAVING, snapshot, extent, targets, tensors)
        self.transfers.submit(session.transfer)

    def resume(self, name: str) -> Session:
        """Begin to bring a suspended session back. Raises `UnknownSession` or `SlabsExhausted`."""
        snapshot = self.suspended(name)
        asleep = self._asleep[name]
        state, targets = self._seated(lambda slab: self._prepared(snapshot, slab))
        session = asleep.session or Session(state, self._options.max_lead_s, Playhead())
        session.state, session.delivered = state, state.next_chunk
        session.suspending = False
        session.announced = False
        session.due_at_s = None
        del self._asleep[name]
        self.sessions[name] = session
        self._arrive(session, snapshot, asleep.extent, targets)
        return session

    def transferred(self, transfer: Transfer) -> Session | None:
        """Book a transfer that is done: its session, or None if that was evicted meanwhile."""
        session = self.sessions.get(transfer.session)
        if session is None or session.transfer is not transfer:
            return None
        session.transfer = None
        failed = transfer.error is not None
        if transfer.extent is not None and (failed or transfer.way is Way.ARRIVING):
            self.host.give_back(transfer.extent)
        elif transfer.extent is not None:
            self._drop(session)
            self._asleep[session.name] = _Asleep(session, transfer.snapshot, transfer.extent)
        return session

    def evict(self, name: str) -> None:
        """See `Engine.evict`."""
        if name in self._asleep:
            self.host.give_back(self._asleep.pop(name).extent)
            return
        session = self.active(name)
        if session.transfer is not None:
            session.transfer.give_up()
            if session.transfer.extent is not None:
                self.host.give_back(session.transfer.extent)
            session.transfer = None
        self._drop(session)

    def _drop(self, session: Session) -> None:
        del self.sessions[session.name]
        self.pool.release(session.state.slab)
        session.state.forget()
        session.work = None
        session.undecoded.clear()

    def _arrive(
        self, session: Session, snapshot: Snapshot, extent: Extent | None, targets: dict[str, Tensor]
    ) -> None:
        session.transfer = Transfer(session.name, Way.ARRIVING, snapshot, extent, targets, snapshot.tensors)
        self.transfers.submit(session.transfer)

    def _seated(self, build: Callable[[Slab], _Seated]) -> _Seated:
        """What `build` makes of a free slab, which is given back if that fails."""
        slab = self.pool.acquire()
        try:
            return build(slab)
        except BaseException:
            self.pool.release(slab)
            raise

    def _prepared(self, snapshot: Snapshot, slab: Slab) -> _Seated:
        return prepare(snapshot, slab, self._config, self._fingerprint, self._model.rotation, self.device)

    def _fresh(self, spec: SessionSpec, slab: Slab) -> SessionState:
        ring = KVRing(slab, self._config, self._model.rotation)
        generator = torch.Generator(self.device)
        return SessionState(spec.session, slab, ring, generator, spec.seed, spec.prompt)

    def _plan(self, session: Session, rebuild: Rebuild) -> None:
        """Plan the passes that make a lost session whole: over its sink, if kept, then its newest chunks."""
        config, state = self._config, session.state
        state.next_chunk = rebuild.next_chunk
        latents = rebuild.latents.to(self.device)
        first = state.first_frame(config) - latents.shape[0]
        if rebuild.sink is not None and first >= config.sink_size:
            session.replay.append((0, rebuild.sink.to(self.device)))
        for part in torch.split(latents, config.frames_per_chunk):
            session.replay.append((first, part))
            state.remember(part, config)
            first += config.frames_per_chunk
        session.undecoded.append(Undecoded(latents, None))

    def _check(self, rebuild: Rebuild) -> None:
        frames, *shape = rebuild.latents.shape
        _, *needed = self._config.latent_shape
        per_chunk = self._config.frames_per_chunk
        if shape != needed or not frames or frames % per_chunk:
            found = tuple(rebuild.latents.shape)
            raise BadRebuild(f"latents: shape {found}, need ({per_chunk}·n, {', '.join(map(str, needed))})")
        if frames > rebuild.next_chunk * per_chunk:
            raise BadRebuild(f"latents: {frames} frames before chunk {rebuild.next_chunk}")
        if rebuild.sink is not None and list(rebuild.sink.shape) != [self._config.sink_size, *needed]:
            raise BadRebuild(f"sink: shape {tuple(rebuild.sink.shape)}, need {self._config.sink_size} frames")
