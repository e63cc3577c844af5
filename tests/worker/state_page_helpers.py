"""Copies a session from one engine to another by hand, and compares its chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from turboserve.worker.engine.interface import ChunkReady, SessionQuiesced, SessionSpec
from turboserve.worker.engine.receive_buffer import PagedReceiveBuffer
from turboserve.worker.engine.state_pages import Page, fingerprint_of

FAR = 1e9
SPEC = SessionSpec("a", "a red circle", seed=11)


def copy(pages: Iterable[Page], buffer: PagedReceiveBuffer) -> None:
    for page in pages:
        places = buffer.place(page.name, page.size, page.dtype, page.shape)
        for place, part in zip(places, page.parts, strict=True):
            place.copy_(part)


def prints(pages: Iterable[Page]) -> dict[str, bytes]:
    return {page.name: fingerprint_of(page.parts) for page in pages}


def frozen(driver: Any, session: str = "a") -> int:
    driver.engine.quiesce(session, driver.now, 0.0, 0.0)
    events = driver.run(lambda events: any(isinstance(event, SessionQuiesced) for event in events))
    return next(event.next_chunk for event in events if isinstance(event, SessionQuiesced))


def equal(ours: list[ChunkReady], theirs: list[ChunkReady]) -> bool:
    return len(ours) == len(theirs) > 0 and all(
        a.index == b.index and torch.equal(a.latents, b.latents) and torch.equal(a.frames, b.frames)
        for a, b in zip(ours, theirs, strict=True)
    )


def stayed(make_driver: Callable[..., Any], chunks: int, **options: Any) -> list[ChunkReady]:
    """Return the session's chunks without a migration."""
    driver = make_driver(max_lead_s=FAR, **options)
    driver.engine.admit(SPEC, driver.now)
    found: list[ChunkReady] = driver.chunks("a", chunks)
    return found
