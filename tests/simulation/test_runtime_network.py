"""Connections between simulated workers end as sockets do."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from turboserve.simulation.runtime.device.fabric import TransferFabric
from turboserve.simulation.runtime.device.network import MemoryNetwork
from turboserve.simulation.runtime.loop import VirtualLoop


def test_what_arrives_at_a_closed_socket_is_dropped() -> None:
    loop = VirtualLoop(seed=1)
    failures: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _loop, context: failures.append(context))
    fabric = TransferFabric(loop, random.Random(1), delay_s=0.01)
    source, target = MemoryNetwork(fabric, "source", "m"), MemoryNetwork(fabric, "target", "m")
    heard: list[bytes] = []
    on_its_way: list[int] = []

    async def serve(reader: Any, writer: Any) -> None:
        for _ in range(50):
            writer.write(b"more")
        heard.append(await reader.read())

    async def work() -> None:
        await source.listen(serve)
        reader, writer = await target.connect("source", 4711)
        writer.write(b"enough")
        assert await reader.readexactly(4) == b"more"
        received: Any = reader
        on_its_way.append(50 - 1 - len(received._buffer) // 4)
        writer.close()
        await asyncio.sleep(1.0)
        # The other side reads to the end.
        assert heard == [b"enough"]

    loop.run_until_complete(work())
    loop.close()
    assert on_its_way[0] > 0
    assert failures == []
