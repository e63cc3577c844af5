"""Operations on a tenant's sessions: requests to the state store and the scheduler."""

from __future__ import annotations

from cachetools import FIFOCache

from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.base import is_id
from turboserve.contracts.errors import (
    ConflictError,
    InvalidInputError,
    SessionNotFoundError,
    TransitionError,
    UnavailableError,
    UnknownModelError,
)
from turboserve.contracts.fidelity import QualityLimits
from turboserve.contracts.requests import (
    ChangeSession,
    CreateSession,
    DecisionPage,
    EndSession,
    ListSessions,
    MigrateSession,
    MigrationAccepted,
    SessionPage,
    SessionRef,
    SetControl,
    SubmitPrompt,
)
from turboserve.contracts.sessions import ControlReceipt, Phase, PromptReceipt, SessionRecord
from turboserve.gateway import metrics
from turboserve.gateway.model_offers import ModelOffers, frame_size
from turboserve.gateway.problems.errors import KeyReusedError
from turboserve.gateway.repeats import digest, id_of, key_reused
from turboserve.gateway.sessions.control_schemas import NewControl
from turboserve.gateway.sessions.schemas import NewSession, QualityInput, SessionChange
from turboserve.ids import random_bits
from turboserve.subjects import (
    CHANGE_SESSION,
    CREATE_SESSION,
    END_SESSION,
    GET_SESSION,
    LIST_DECISIONS,
    LIST_SESSIONS,
    MIGRATE_SESSION,
    PAUSE_SESSION,
    RESUME_SESSION,
    SET_CONTROL,
    SUBMIT_PROMPT,
)

SEED_BITS = 53
"""Bits of a seed that the gateway chooses. JavaScript represents such a number exactly."""
REMEMBERED = 4_096
MIGRATE_DEADLINE_S = 5.0
"""The scheduler asks the state store twice within this time, and itself answers if the outcome is unknown."""


class Sessions:
    """Operations on sessions. All raise the state store's typed errors, or UnavailableError if it is away."""

    def __init__(self, bus: Bus, clock: Clock, default_model: str) -> None:
        self._bus = bus
        self._clock = clock
        self._offers = ModelOffers(bus, default_model)
        self._known: FIFOCache[str, SessionRecord] = FIFOCache(REMEMBERED)
        self._requested_at: FIFOCache[str, float] = FIFOCache(REMEMBERED)

    async def create(
        self, tenant: str, request: NewSession, key: str | None, creator: str | None = None
    ) -> SessionRecord:
        """Create a session. A repeat with the same `key` returns the session of the first request.

        `creator`: id of the API key for which the session counts. UnknownModelError and InvalidInputError
        have what is offered as their limit.
        """
        size = frame_size(request.width, request.height)
        seed = request.seed
        session = id_of("ses", tenant, repeat=key)
        if seed is None:
            bits = SEED_BITS
            seed = random_bits(bits) if key is None else int(digest("seed", tenant, key), 16) >> (256 - bits)
        began = self._clock.monotonic()
        try:
            record = await self._bus.call(
                CREATE_SESSION,
                CreateSession(
                    id=session,
                    tenant=tenant,
                    model=await self._offers.class_of(request.model, size),
                    prompt=request.prompt,
                    seed=seed,
                    metadata=request.metadata,
                    controls=request.controls,
                    quality=_limits(request.quality),
                    max_lead_s=request.max_lead_s,
                    recording=_recording(request, tenant, key),
                    key=creator,
                ),
            )
        except ConflictError:
            raise key_reused() from None
        except UnknownModelError:
            raise await self._offers.refusal(request.model, size) from None
        metrics.sessions_created.add(1)
        self._requested_at[session] = began
        return self.remember(record)

    async def get(self, tenant: str, session: str) -> SessionRecord:
        return self.remember(await self._bus.call(GET_SESSION, _ref(tenant, session)))

    async def get_or_remembered(self, tenant: str, session: str) -> SessionRecord:
        """As `get`. While the state store is away: the last known record, so that viewers can reconnect."""
        try:
            return await self.get(tenant, session)
        except UnavailableError:
            record = self._known.get(session)
            if record is None or record.tenant != tenant:
                raise
            return record

    async def page(
        self, tenant: str, phases: tuple[Phase, ...], limit: int, after: str | None
    ) -> SessionPage:
        return await self._bus.call(
            LIST_SESSIONS, ListSessions(tenant=tenant, phases=phases, limit=limit, after=after)
        )

    async def prompt(
        self,
        tenant: str,
        session: str,
        prompt: str,
        key: str | None,
        key_name: str = "Idempotency-Key",
        *,
        drop_buffer: bool = False,
    ) -> PromptReceipt:
        """Submit a prompt for the next chunk on. A repeat with the same `key` returns the first receipt.

        With `drop_buffer`, viewers discard the video before that chunk.

        Raises KeyReusedError, which names `key_name`, if the first request had another prompt.
        """
        ref = _ref(tenant, session)
        prompt_id = id_of("prm", session, repeat=key)
        request = SubmitPrompt(
            session=ref.session,
            tenant=ref.tenant,
            prompt_id=prompt_id,
            prompt=prompt,
            drop_buffer=drop_buffer,
        )
        try:
            return await self._bus.call(SUBMIT_PROMPT, request)
        except InvalidInputError as error:
            if error.field != "prompt_id":
                raise
            raise KeyReusedError(
                f"this {key_name} was used with a different prompt", field=key_name
            ) from None

    async def set_control(
        self,
        tenant: str,
        session: str,
        control: NewControl,
        key: str | None,
        key_name: str = "Idempotency-Key",
    ) -> ControlReceipt:
        """Set a control from the next chunk on. A repeat with the same `key` returns the first receipt.

        Raises KeyReusedError, which names `key_name`, if the first request had another value.
        """
        ref = _ref(tenant, session)
        request = SetControl(
            session=ref.session,
            tenant=ref.tenant,
            control_id=id_of("ctl", session, repeat=key),
            **control.model_dump(include={"name", "value", "drop_buffer"}),
        )
        try:
            return await self._bus.call(SET_CONTROL, request)
        except InvalidInputError as error:
            if error.field != "control_id":
                raise
            raise KeyReusedError(f"this {key_name} was used with a different value", field=key_name) from None

    async def pause(self, tenant: str, session: str) -> SessionRecord:
        return self.remember(await self._bus.call(PAUSE_SESSION, _ref(tenant, session)))

    async def resume(self, tenant: str, session: str) -> SessionRecord:
        return self.remember(await self._bus.call(RESUME_SESSION, _ref(tenant, session)))

    async def change(self, tenant: str, session: str, request: SessionChange) -> SessionRecord:
        """Change what the session's owner allows. Raises InvalidInputError for a request without a change."""
        if not request.changes:
            raise InvalidInputError(
                "at least one of quality and max_lead_s is required", field="quality", limit="max_lead_s"
            )
        ref = _ref(tenant, session)
        change = ChangeSession(
            session=ref.session,
            tenant=ref.tenant,
            changes=request.changes,
            quality=_limits(request.quality),
            max_lead_s=request.max_lead_s,
        )
        return self.remember(await self._bus.call(CHANGE_SESSION, change))

    async def migrate(self, tenant: str | None, session: str, worker: str | None) -> MigrationAccepted:
        """Begin a migration. `worker` None: the best one. `tenant` None: an operator's, for any session."""
        self.check_id(session)
        request = MigrateSession(session=session, tenant=tenant, worker=worker)
        try:
            return await self._bus.call(MIGRATE_SESSION, request, deadline_s=MIGRATE_DEADLINE_S)
        except SessionNotFoundError:
            # The scheduler knows only live sessions, and a new session only after a moment.
            record = await self._bus.call(GET_SESSION, SessionRef(session=session, tenant=tenant))
        if record.phase.ended:
            raise TransitionError(
                f"session {session} is {record.phase.value} and cannot be migrated",
                field="phase",
                limit=record.phase.value,
            )
        raise ConflictError(f"session {session} has just been made", field="session", retry_after_s=0.5)

    async def end(self, tenant: str, session: str) -> SessionRecord:
        ref = _ref(tenant, session)
        return self.remember(
            await self._bus.call(END_SESSION, EndSession(session=ref.session, tenant=ref.tenant))
        )

    async def decisions(self, tenant: str, session: str) -> DecisionPage:
        return await self._bus.call(LIST_DECISIONS, _ref(tenant, session))

    @staticmethod
    def check_id(session: str) -> None:
        """Raise SessionNotFoundError if `session` cannot be the id of a session."""
        if not is_id(session):
            raise SessionNotFoundError("no such session", field="session")

    def remember(self, record: SessionRecord) -> SessionRecord:
        """Keep the record of an answer or event, unless a newer one is known. Returns `record`."""
        known = self._known.get(record.id)
        if known is None or known.version <= record.version:
            self._known[record.id] = record
        return record

    def first_chunk_sent(self, session: str) -> None:
        """Record the time to first chunk: a viewer has received chunk 0."""
        began = self._requested_at.pop(session, None)
        if began is not None:
            metrics.time_to_first_chunk.record(self._clock.monotonic() - began)


def _ref(tenant: str, session: str) -> SessionRef:
    Sessions.check_id(session)
    return SessionRef(session=session, tenant=tenant)


def _limits(quality: QualityInput | None) -> QualityLimits | None:
    return None if quality is None else QualityLimits(floor=quality.floor, pin=quality.pin)


def _recording(request: NewSession, tenant: str, key: str | None) -> str | None:
    """Return the id of the recording that starts with the session."""
    if not request.record:
        return None
    return id_of("rec", tenant, repeat=key)
