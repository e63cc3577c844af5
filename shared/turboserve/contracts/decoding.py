"""What decode workers carry, in reports of workers and pools."""

from __future__ import annotations

from pydantic import Field

from turboserve.contracts.base import Contract, Count, Id, Number

EACH_LIMIT = 64
"""Most decode workers that a load report names."""


class DecodeCapacity(Contract):
    """The decode workers of a worker, or of all workers of a model, and K without their limit."""

    workers: Count
    """Number of decode workers that have said what they carry."""
    sessions: Count
    """Sessions that they carry in real time, over all workers that ask them."""
    denoised: Count
    """Sessions that the worker denoises. In load feedback, the sum over all ready workers."""
    each: dict[Id, Count] = Field(default={}, max_length=EACH_LIMIT)
    """Sessions that each of the decode workers carries, by its id. Empty in load feedback, in reports of
    earlier versions, and where there are more than `EACH_LIMIT`."""
    own: Count = 0
    """Sum of K over the ready workers that decode their sessions themselves. Only in load feedback."""


class DecodeNeed(Contract):
    """The decode workers of a pool, and how many its sessions need."""

    workers: Number
    """Number of decode workers that have said what they carry."""
    sessions: Number
    """Sessions that they carry in real time."""
    needed: Number | None = None
    """Number of decode workers for the present demand. None: none has said yet what it carries."""
    limits: bool = False
    """Whether the pool's workers may have fewer sessions than they denoise. Then no worker is added."""
