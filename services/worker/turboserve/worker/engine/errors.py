"""Errors of the engine. Each names the thing and the limit, and says whether to retry."""

from __future__ import annotations

from turboserve.wording import counted


class EngineError(Exception):
    """Root of the engine's errors."""

    code = "engine_error"
    """Stable name for logs, metrics and replies."""
    retryable = False
    """Whether the same call may succeed later without a change by the caller."""


class SlabsExhaustedError(EngineError):
    """No KV slab is free: admission is refused until a session ends or is suspended."""

    code = "slabs_exhausted"
    retryable = True

    def __init__(self, slabs: int, slab_bytes: int) -> None:
        super().__init__(f"slabs: none of {slabs} is free, {slab_bytes} bytes each")
        self.slabs = slabs
        self.slab_bytes = slab_bytes


class SessionsExhaustedError(SlabsExhaustedError):
    """Slabs and host memory hold no further session: admission is refused until one ends or is suspended."""

    code = "sessions_exhausted"

    def __init__(self, slabs: int, slab_bytes: int, host_sessions: int, state_bytes: int) -> None:
        EngineError.__init__(
            self,
            f"sessions: no room in {counted(slabs, 'slab')} ({slab_bytes} bytes each) and "
            f"{counted(host_sessions, 'place')} in host memory ({state_bytes} bytes each)",
        )
        self.slabs, self.slab_bytes = slabs, slab_bytes
        self.host_sessions, self.state_bytes = host_sessions, state_bytes


class StateNotArrivedError(EngineError):
    """A layer of a returning session's state did not arrive: its copy failed or was given up."""

    code = "state_not_arrived"

    def __init__(self, session: str, layer: int) -> None:
        super().__init__(f"session {session!r}: layer {layer} of its state has not arrived")
        self.session, self.layer = session, layer


class BudgetTooSmallError(EngineError):
    """The memory budget does not hold the model and one session."""

    code = "budget_too_small"

    def __init__(self, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(f"memory: {needed_bytes} bytes needed for one session, {budget_bytes} in the budget")
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class HostPoolFullError(EngineError):
    """Suspended sessions fill their host memory; the session stays active."""

    code = "host_pool_full"
    retryable = True

    def __init__(self, needed_bytes: int, free_bytes: int, limit_bytes: int, largest_bytes: int) -> None:
        super().__init__(
            f"host pool: {needed_bytes} bytes needed, {free_bytes} of {limit_bytes} free, "
            f"{largest_bytes} in one piece"
        )
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.limit_bytes = limit_bytes


class HostMemoryUnavailableError(EngineError):
    """The machine does not provide the host memory for suspended sessions."""

    code = "host_memory_unavailable"

    def __init__(self, limit_bytes: int, reason: str) -> None:
        super().__init__(f"host pool: {limit_bytes} bytes could not be allocated: {reason}")
        self.limit_bytes = limit_bytes


class UnknownSessionError(EngineError):
    """There is no session of this name in the state that the call needs."""

    code = "unknown_session"

    def __init__(self, session: str, wanted: str) -> None:
        super().__init__(f"session {session!r}: no {wanted} session of this name")
        self.session = session


class DuplicateSessionError(EngineError):
    """A session of this name is already here."""

    code = "duplicate_session"

    def __init__(self, session: str) -> None:
        super().__init__(f"session {session!r}: already admitted")
        self.session = session


class FramesExhaustedError(EngineError):
    """The model cannot represent more frames in one session."""

    code = "frames_exhausted"

    def __init__(self, wanted: int, limit: int) -> None:
        super().__init__(f"frames: {wanted} wanted, the model's limit is {limit}")
        self.wanted = wanted
        self.limit = limit


class SnapshotRejectedError(EngineError):
    """A snapshot does not fit this model, or is not what was exported."""

    code = "snapshot_rejected"

    def __init__(self, field: str, found: object, wanted: object) -> None:
        super().__init__(f"snapshot {field}: {found!r}, need {wanted!r}")
        self.field = field


class InvalidRebuildError(EngineError):
    """The latents for a rebuild are not those of chunks before the next one, or have the wrong shape."""

    code = "bad_rebuild"


class InvalidFirstChunkError(EngineError):
    """The values of a session's controls do not show its first chunk. Do not retry."""

    code = "bad_first_chunk"

    def __init__(self, reason: str) -> None:
        super().__init__(f"first chunk: {reason}")


class InvalidFidelityError(EngineError):
    """The model cannot generate at this configuration. Do not retry."""

    code = "invalid_fidelity"

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"fidelity.{field}: {value} must be {limit}")
        self.field, self.value, self.limit = field, value, limit


class AttentionUnavailableError(EngineError):
    """The configured kind of attention does not work for this model on this device."""

    code = "attention_unavailable"

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"attention {kind}: {reason}")
        self.kind = kind


class SequenceParallelUnavailableError(EngineError):
    """Two workers cannot split this model's forwards. Do not retry."""

    code = "sequence_parallel_unavailable"

    def __init__(self, field: str, value: int) -> None:
        super().__init__(f"sequence parallelism: {field} is {value}, at least 2 needed")
        self.field, self.value = field, value


class DonorReleasedError(EngineError):
    """The donor ends the loan: the home computes the session alone."""

    code = "donor_released"
    retryable = True


class PartnerLostError(EngineError):
    """The other worker of a loan is dead, frozen or too slow; its group is closed."""

    code = "partner_lost"
    retryable = True
