"""One side of a transfer in a process of its own, driven over a pipe. Its state consists of numbers.

It reports each step and waits for permission to continue, so that a test can kill or stop it, or the other
side, exactly there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turboserve.worker.engine.errors import SnapshotRejectedError
from turboserve.worker.engine.state_pages import Page
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import MigrationNotOfferedError, TransferError
from turboserve.worker.transfer.fetched_state import FetchedState
from turboserve.worker.transfer.link import Link, LocalPages, RemotePages
from turboserve.worker.transfer.links import Links
from turboserve.worker.transfer.pace import CopyLimits
from turboserve.worker.transfer.source import Source
from turboserve.worker.transfer.target import Target

MODEL = "0123456789abcdef"
LAYERS, POSITIONS, CHANGED = 3, 8, 2
SESSION, MIGRATION, TARGET = "ses_1", 7, "wrk_target"
STEPS = ("pages", "rest", "acknowledged", "sending_manifest")
LONG_S = 1_000.0
KEY = bytes(range(32))
"""Key of the migration."""


def layers(position: int, size: int, *, changed: bool) -> tuple[Tensor, ...]:
    """Return one page's bytes as views of one piece of memory, as in a slab."""
    generator = torch.Generator().manual_seed(2 * position + changed)
    # Eight bytes are drawn at a time: a test with large pages would otherwise spend its time here.
    words = torch.randint(-(2**63), 2**63 - 1, (-(-LAYERS * size // 8),), generator=generator)
    return tuple(words.view(torch.uint8)[: LAYERS * size].view(LAYERS, size).unbind(0))


class State:
    """The source's session: its last pages are written again before it is quiesced."""

    def __init__(self, size: int) -> None:
        self.bulk = [self._page(position, size, changed=False) for position in range(POSITIONS)]
        kept = POSITIONS - CHANGED
        again = [self._page(position, size, changed=True) for position in range(kept, POSITIONS)]
        self.final = self.bulk[:kept] + again

    @staticmethod
    def _page(position: int, size: int, *, changed: bool) -> Page:
        return Page(f"keys/{position}", layers(position, size, changed=changed), (position, changed))


class Steps:
    """Steps of a side, at which the test can hold it."""

    def __init__(self, pipe: Connection, stop_at: str | None) -> None:
        self._pipe, self._stop_at = pipe, stop_at

    async def at(self, step: str) -> None:
        if step == self._stop_at:
            self._pipe.send(("step", step))
            while not self._pipe.poll():
                await asyncio.sleep(0.01)
            self._pipe.recv()


class HeldClock:
    """A side's time, in seconds. It stops until the test lets it pass: a busy machine costs no deadline."""

    def __init__(self) -> None:
        self._at = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        return self._at if self._since is None else self._at + time.monotonic() - self._since

    def hold(self) -> None:
        self._at, self._since = self(), None

    def release(self) -> None:
        self._at, self._since = self(), time.monotonic()

    def advance(self, seconds: float) -> None:
        self._at += seconds


class Giver:
    """The source's worker. `StateProvider` of `transfer.source`."""

    def __init__(self, size: int, steps: Steps, *, quiesced: bool, restless: bool = False) -> None:
        """With `restless`, all of its state is written again before it is read again."""
        self.state, self.steps, self.quiesced = State(size), steps, quiesced
        self._restless = restless
        self.overs = self._reads = 0

    def key(self, session: str, migration: int) -> bytes | None:
        return KEY if (session, migration) == (SESSION, MIGRATION) else None

    def check(self, session: str, migration: int, target: str) -> None:
        if (session, migration, target) != (SESSION, MIGRATION, TARGET):
            raise MigrationNotOfferedError(
                f"session {session}: no migration {migration} to {target} is known here"
            )

    def offer(self, session: str, migration: int, target: str) -> bool:
        self.check(session, migration, target)
        return self.quiesced

    async def pages(self, session: str) -> Sequence[Page]:
        await self.steps.at("pages")
        self._reads += self._restless
        return [dataclasses.replace(page, stamp=(page.stamp, self._reads)) for page in self.state.bulk]

    async def rest(self, session: str, migration: int) -> tuple[Mapping[str, Any], Sequence[Page]]:
        await self.steps.at("rest")
        pages = [dataclasses.replace(page, stamp=(page.stamp, self._reads)) for page in self.state.final]
        return {"session": session, "next_chunk": 4}, pages

    async def acknowledged(self, session: str, migration: int, next_chunk: int) -> None:
        await self.steps.at("acknowledged")

    def sending_manifest(self, session: str, migration: int) -> None:
        """Do nothing: the step is the previous one."""

    def over(self, session: str, migration: int) -> None:
        self.overs += 1


class Room:
    """The target's memory. `ReceiveMemory` of `transfer.target`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = {f"keys/{n}": torch.zeros(LAYERS, size, dtype=torch.uint8) for n in range(POSITIONS)}

    def begin(self) -> None:
        for position in self.memory.values():
            position.zero_()

    def place(self, name: str, size: int, dtype: str = "", shape: Sequence[int] = ()) -> tuple[Tensor, ...]:
        if name not in self.memory or size != LAYERS * self.size:
            raise SnapshotRejectedError(name, size, LAYERS * self.size)
        return tuple(self.memory[name].unbind(0))

    def check(self, header: Mapping[str, Any], names: Iterable[str]) -> None:
        if header.get("next_chunk") != 4 or set(names) != set(self.memory):
            raise SnapshotRejectedError("header", header, "that of the session")

    def holds(self, state: State) -> bool:
        """Return whether it is the source's state, bit for bit."""
        return all(
            torch.equal(ours, theirs)
            for page in state.final
            for ours, theirs in zip(self.memory[page.name], page.parts, strict=True)
        )


def harmed(link: Link, harm: str | None, clock: HeldClock) -> Link:
    """Return a link that loses or changes data. With a single fault, that fault takes `LONG_S`."""
    send = link.transfer

    def transfer(
        session: str,
        source: LocalPages | RemotePages,
        target: LocalPages | RemotePages,
        page_range: range,
        deadline: Deadline,
    ) -> int:
        if harm == "truncate" and isinstance(source, LocalPages):
            source = LocalPages([[part[: part.numel() // 2] for part in page] for page in source.pages])
        copied = send(session, source, target, page_range, deadline)
        if harm in ("flip", "flip once") and isinstance(target, LocalPages):
            target.pages[0][0][5] ^= 4
            clock.advance(LONG_S if harm == "flip once" else 0.0)
        return copied

    offer = link.offer

    def offered(pages: LocalPages, page_range: range, deadline: Deadline) -> dict[str, Any]:
        if harm == "truncate":
            pages = LocalPages([[part[: part.numel() // 2] for part in page] for page in pages.pages])
        return offer(pages, page_range, deadline)

    if harm is not None:
        link.transfer = transfer  # type: ignore[method-assign]
        link.offer = offered  # type: ignore[method-assign]
    return link


class HarmedLinks(Links):
    harm: str | None = None
    clock: HeldClock

    async def _make(self, *args: Any) -> Link:
        harm, self.harm = self.harm, None if self.harm == "flip once" else self.harm
        return harmed(await super()._make(*args), harm, self.clock)


def facts(links: Links) -> dict[str, int]:
    """Return what a process holds."""
    gc.collect()
    return {"files": len(list(Path("/proc/self/fd").iterdir())), "links": links.idle}


def run_source(pipe: Connection, options: dict[str, Any]) -> None:
    gc.freeze()
    asyncio.run(_source(pipe, **options))


def run_target(pipe: Connection, options: dict[str, Any]) -> None:
    # Each collection would write to every object of the imports, and so copy the memory that forks share.
    gc.freeze()
    asyncio.run(_target(pipe, **options))


async def _source(
    pipe: Connection,
    backend: str,
    size: int,
    stop_at: str | None = None,
    quiesced: bool = False,
    harm: str | None = None,
    model: str = MODEL,
    deadline_s: float = 90.0,
    still_s: float = 20.0,
    restless: bool = False,
) -> None:
    links = HarmedLinks([backend], torch.device("cpu"), model)
    links.harm, links.clock = harm, HeldClock()
    provider = Giver(size, Steps(pipe, stop_at), quiesced=quiesced, restless=restless)
    source = Source(provider, links, CopyLimits(most_s=deadline_s, still_s=still_s))
    server = await asyncio.start_server(source.serve, "127.0.0.1", 0)
    pipe.send(("address", f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    loop = asyncio.get_running_loop()
    while True:
        # While it is held at a step, the message on the pipe is for that step.
        while not pipe.poll() or (provider.steps._stop_at is not None and source._open):
            await asyncio.sleep(0.01)
        match pipe.recv():
            case "facts":
                pipe.send((provider.overs, facts(links)))
            case "abort":
                source.abort(SESSION)
            case "step nowhere":
                provider.steps._stop_at = None
            case "end":
                server.close()
                links.close()
                loop.stop()
                return


async def _target(
    pipe: Connection,
    backend: str,
    size: int,
    harm: str | None = None,
    model: str = MODEL,
    deadline_s: float = 1e9,
    patience_s: float = 1e9,
    key: bytes = KEY,
) -> None:
    links = HarmedLinks([backend], torch.device("cpu"), model)
    clock = HeldClock()
    links.harm, links.clock = harm, clock
    target = Target(TARGET, links, patience_s, now=clock)
    task: asyncio.Task[None] | None = None
    failed = asyncio.Event()
    attempt = target._attempt

    async def attempted(*args: Any) -> FetchedState:
        try:
            return await attempt(*args)
        except TransferError:
            failed.set()
            raise

    target._attempt = attempted  # type: ignore[method-assign, assignment]

    async def fetch(session: str, migration: int, address: str) -> None:
        room = Room(size)
        try:
            fetched = await target.fetch(session, migration, key, [address], room, deadline_s)
        except TransferError as error:
            pipe.send(("error", error.code, str(error)))
        except asyncio.CancelledError:
            pipe.send(("error", "cancelled", ""))
        else:
            pipe.send(("fetched", fetched, room.holds(State(size))))

    while True:
        while not pipe.poll():
            await asyncio.sleep(0.01)
        match pipe.recv():
            case ("fetch", session, migration, address):
                clock.hold()
                task = asyncio.create_task(fetch(session, migration, address))
            case "time passes":
                clock.release()
            case "the deadline passes after an attempt":
                await failed.wait()
                clock.advance(deadline_s)
            case "cancel":
                assert task is not None
                task.cancel()
            case "facts":
                pipe.send((0, facts(links)))
            case "end":
                links.close()
                return
