"""The session table: who is here, on the device or suspended on the host, and the memory they hold."""

from __future__ import annotations

import torch

from turboserve.worker.engine.errors import BadRebuild, DuplicateSession, HostPoolFull, UnknownSession
from turboserve.worker.engine.pool import SlabPool
from turboserve.worker.engine.ring import KVRing
from turboserve.worker.engine.session import Playhead, Session
from turboserve.worker.engine.slab import Slab, SlabLayout
from turboserve.worker.engine.snapshot import Snapshot, export, restore
from turboserve.worker.engine.spec import EngineOptions, Rebuild, SessionSpec
from turboserve.worker.engine.state import SessionState
from turboserve.worker.model.transformer import CausalWanTransformer


class SessionTable:
    """Active and suspended sessions. Every slab and every host byte in use belongs to exactly one of them."""

    def __init__(self, model: CausalWanTransformer, options: EngineOptions) -> None:
        parameter = model.patch_embedding.weight
        self.device = parameter.device
        self.pool = SlabPool(SlabLayout.of(model.config, parameter.dtype), options.slab_bytes, self.device)
        self.sessions: dict[str, Session] = {}
        """Active sessions by name."""
        self.host_bytes_used = 0
        self._snapshots: dict[str, tuple[Snapshot, Session]] = {}
        self._model = model
        self._config = model.config
        self._options = options

    def active(self, session: str) -> Session:
        """The active session of this name. Raises `UnknownSession`."""
        if session not in self.sessions:
            raise UnknownSession(session, "active")
        return self.sessions[session]

    def suspended(self, session: str) -> Snapshot:
        """Snapshot of the suspended session of this name. Raises `UnknownSession`."""
        if session not in self._snapshots:
            raise UnknownSession(session, "suspended")
        return self._snapshots[session][0]

    def admit(self, spec: SessionSpec, snapshot: Snapshot | None) -> Session:
        """See `Engine.admit`."""
        if spec.session in self.sessions or spec.session in self._snapshots:
            raise DuplicateSession(spec.session)
        if spec.rebuild is not None:
            self._check(spec.rebuild)
        slab = self.pool.acquire()
        try:
            state = self._restore(snapshot, slab) if snapshot else self._fresh(spec, slab)
        except BaseException:
            self.pool.release(slab)
            raise
        playhead = Playhead(position_s=spec.playhead_s)
        session = Session(state, self._options.max_lead_s, playhead)
        if spec.rebuild is not None and snapshot is None:
            self._prepare(session, spec.rebuild)
        self.sessions[spec.session] = session
        return session

    def suspend(self, session: Session) -> Snapshot:
        """Move a session at a boundary to the host. Raises `HostPoolFull`; then the session is as before."""
        snapshot = export(session.state, self._config)
        limit = self._options.host_bytes
        if self.host_bytes_used + snapshot.total_bytes > limit:
            raise HostPoolFull(snapshot.total_bytes, limit - self.host_bytes_used, limit)
        self.host_bytes_used += snapshot.total_bytes
        self._drop(session)
        self._snapshots[session.name] = (snapshot, session)
        return snapshot

    def resume(self, name: str) -> Session:
        """Bring a suspended session back. Raises `UnknownSession` or `SlabsExhausted`."""
        snapshot = self.suspended(name)
        _, session = self._snapshots[name]
        slab = self.pool.acquire()
        session.state = self._restore(snapshot, slab)
        session.suspending = False
        session.announced = False
        session.due_at_s = None
        del self._snapshots[name]
        self.host_bytes_used -= snapshot.total_bytes
        self.sessions[name] = session
        return session

    def evict(self, name: str) -> None:
        """See `Engine.evict`."""
        if name in self._snapshots:
            snapshot, _ = self._snapshots.pop(name)
            self.host_bytes_used -= snapshot.total_bytes
            return
        self._drop(self.active(name))

    def _drop(self, session: Session) -> None:
        del self.sessions[session.name]
        self.pool.release(session.state.slab)
        session.work = None

    def _restore(self, snapshot: Snapshot, slab: Slab) -> SessionState:
        return restore(snapshot, slab, self._config, self._model.rotation, self.device)

    def _fresh(self, spec: SessionSpec, slab: Slab) -> SessionState:
        ring = KVRing(slab, self._config, self._model.rotation)
        generator = torch.Generator(self.device)
        return SessionState(spec.session, slab, ring, generator, spec.seed, spec.prompt)

    def _prepare(self, session: Session, rebuild: Rebuild) -> None:
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
        session.warming = latents

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
