"""Knowledge of a stream's followers, for tests in which the stream is lost."""

from __future__ import annotations

import asyncio

import pytest

from turboserve.bus import Bus
from turboserve.bus.feeds import StreamIncarnation


async def acquainted(bus: Bus, stream: str, limit_s: float = 60.0) -> None:
    """Wait until a running follower on `bus` has read a description of `stream` younger than itself.

    A lost stream is noticed by comparison with such a description. Raises TimeoutError.
    """
    began_at = asyncio.get_running_loop().time()
    known = asyncio.Event()
    look = bus.incarnations.look

    def observed(name: str) -> StreamIncarnation | None:
        life = look(name)
        # The follower takes over the description before it waits again.
        if name == stream and life is not None and life.asked_at >= began_at:
            known.set()
        return life

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bus.incarnations, "look", observed)
        async with asyncio.timeout(limit_s):
            await known.wait()
