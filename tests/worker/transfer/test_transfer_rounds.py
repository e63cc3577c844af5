"""Rounds of a copy in virtual time, of a session that rewrites a rolling window while it is copied."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from turboserve.simulation.runtime.device.fabric import TransferFabric
from turboserve.simulation.runtime.device.links import MemoryLink
from turboserve.simulation.runtime.device.network import MemoryNetwork
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.worker.engine.state_pages import SOURCES_AT_ONCE, Page, changed
from turboserve.worker.transfer import rounds, sender
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import PeerLostError, SourceNotReadyError, TransferTooSlowError
from turboserve.worker.transfer.fetched_state import FetchedState
from turboserve.worker.transfer.pace import CopyLimits
from turboserve.worker.transfer.rounds import ROUND_BYTES, SMALL_BYTES, RoundPlan, lasting
from turboserve.worker.transfer.source import Source
from turboserve.worker.transfer.target import Target
from turboserve.worker.transfer.transfer_attempt import WAIT_S

MODEL, SESSION, MIGRATION, TARGET = "0123456789abcdef", "ses_1", 7, "wrk_target"
KEY = bytes(range(32))
FRAME_BYTES = 287_500_000
"""Keys and values of one frame of longlive-1-3b at 480p, over all layers, in bfloat16."""
SCALE = 100_000
"""Bytes of the model for each byte that the test copies."""


@dataclass
class RollingWindow:
    """A session that plays: a chunk of three frames each `chunk_s`, in work for the last `busy_s` of it."""

    frame_bytes: int = FRAME_BYTES
    frames: int = 12
    sink: int = 3
    chunk_s: float = 0.75
    busy_s: float = 0.33
    per_chunk: int = 3
    chunks: int = 0
    writes: dict[int, int] = field(default_factory=dict)
    """Chunk that wrote a ring position last."""
    at_s: float = 0.0

    def positions(self, chunk: int) -> list[int]:
        rolling = self.frames - self.sink
        return [self.sink + (chunk * self.per_chunk + n) % rolling for n in range(self.per_chunk)]

    def until(self, now: float) -> None:
        """Generate up to this time."""
        while (self.chunks + 1) * self.chunk_s <= now:
            self.chunks += 1
            self.writes |= dict.fromkeys(self.positions(self.chunks - 1), self.chunks)
        self.at_s = max(self.at_s, now)

    @property
    def boundary_s(self) -> float:
        """When the next chunk is finished."""
        return (self.chunks + 1) * self.chunk_s

    def pages(self, *, quiesced: bool = False) -> list[Page]:
        writing = not quiesced and self.boundary_s - self.at_s <= self.busy_s
        begun = self.chunks + writing
        found = []
        for position in range(self.frames):
            if writing and position in self.positions(self.chunks):
                continue
            lasts_s = math.inf
            if position >= self.sink:
                ahead = next(n for n in range(self.frames) if position in self.positions(begun + n))
                lasts_s = (ahead + 0.5) * self.chunk_s
            stamp = self.writes.get(position, 0)
            part = self.content(position, stamp)
            found += [Page(f"{name}/{position}", (part,), stamp, lasts_s=lasts_s) for name in ("k", "v")]
        return found

    def content(self, position: int, stamp: int) -> Tensor:
        return torch.empty(self.frame_bytes // 2, dtype=torch.uint8, device="meta")


class FilledWindow(RollingWindow):
    """Its pages have contents."""

    def content(self, position: int, stamp: int) -> Tensor:
        return torch.full((self.frame_bytes // 2,), (16 * stamp + position) % 251, dtype=torch.uint8)


def size_of(pages: Sequence[Page]) -> int:
    return sum(page.size for page in pages)


@dataclass
class Copy:
    """Sends a window's pages over a link of this rate, in virtual time."""

    window: RollingWindow
    bytes_per_s: float
    plan: RoundPlan = field(default_factory=RoundPlan)
    sent: dict[str, object] = field(default_factory=dict)
    rounds: int = 0
    size: int = 0

    def send(self, pages: Sequence[Page]) -> None:
        self.sent |= {page.name: page.stamp for page in pages}
        self.rounds, self.size = self.rounds + 1, self.size + size_of(pages)
        self.window.until(self.window.at_s + size_of(pages) / self.bytes_per_s)

    def left(self, *, quiesced: bool = False) -> list[Page]:
        return changed(self.window.pages(quiesced=quiesced), self.sent)

    def send_rounds(self) -> None:
        measured = 0.0
        while pages := self.plan.next_round(self.window.pages(), self.sent, measured):
            self.send(pages)
            measured = self.bytes_per_s

    def pause_s(self) -> float:
        """The pause of a session that is quiesced at the next boundary."""
        self.window.until(self.window.boundary_s)
        return size_of(self.left(quiesced=True)) / self.bytes_per_s


@given(
    bytes_per_s=st.floats(0.05e9, 20e9),
    frames=st.sampled_from([6, 9, 12, 21]),
    chunk_s=st.floats(0.2, 3.0),
    busy=st.floats(0.05, 1.0),
    began=st.floats(0.0, 1.0),
)
def test_rounds_end_and_send_no_state_in_vain(
    bytes_per_s: float, frames: int, chunk_s: float, busy: float, began: float
) -> None:
    window = RollingWindow(frames=frames, chunk_s=chunk_s, busy_s=busy * chunk_s)
    window.until(began * chunk_s)
    copy = Copy(window, bytes_per_s)
    copy.send_rounds()
    state = frames * FRAME_BYTES
    assert copy.size <= (rounds.COPIES_LIMIT + 1) * state
    # A link that is four times as fast as the session writes leaves two chunks at most.
    if bytes_per_s >= 4 * 3 * FRAME_BYTES / chunk_s:
        assert size_of(copy.left()) <= 6 * FRAME_BYTES


@pytest.mark.parametrize("bytes_per_s", [0.3e9, 0.6e9, 1.0e9])
def test_a_link_slower_than_the_session_writes_ends_with_a_shorter_pause_after_fewer_bytes(
    bytes_per_s: float,
) -> None:
    """Incident: three rounds of a whole rolling window, 13 s at 0.6 GB/s, gained nothing."""
    whole = Copy(RollingWindow(), bytes_per_s)
    for _ in range(3):
        whole.send(whole.left())
    copy = Copy(RollingWindow(), bytes_per_s)
    copy.send_rounds()
    assert copy.window.at_s < 0.5 * whole.window.at_s
    assert copy.size < 0.5 * whole.size
    assert copy.pause_s() <= whole.pause_s()


def test_what_the_next_chunk_overwrites_is_sent_last() -> None:
    window = RollingWindow()
    window.until(7 * window.chunk_s)
    order = [int(page.name[2:]) for page in sorted(window.pages(), key=lambda page: -page.lasts_s)]
    assert order[: 2 * window.sink] == sorted([*range(window.sink)] * 2)
    assert set(order[-2 * window.per_chunk :]) == set(window.positions(7))


def test_a_round_has_no_page_that_is_overwritten_before_its_end() -> None:
    window = RollingWindow()
    for bytes_per_s in (1e6, 0.2e9, 0.6e9, 5e9, 1e12):
        pages = lasting(window.pages(), bytes_per_s)
        assert all(page.lasts_s >= size_of(pages) / bytes_per_s for page in pages)
    assert len(lasting(window.pages(), 1e12)) == 2 * window.frames


def page(name: str, stamp: int, size: int) -> Page:
    return Page(name, (torch.empty(size, dtype=torch.uint8, device="meta"),), stamp)


def test_a_small_state_goes_in_one_round() -> None:
    plan, sent = RoundPlan(), dict[str, object]()
    pages = [page(f"k/{n}", 0, ROUND_BYTES // 8) for n in range(8)]
    assert plan.next_round(pages, sent, 0.0) == pages
    sent |= {each.name: each.stamp for each in pages}
    again = [page("k/0", 1, SMALL_BYTES - 1), *pages[1:]]
    assert plan.next_round(again, sent, 1e9) == []
    assert plan.left_bytes == SMALL_BYTES - 1


def test_pages_that_are_written_unexpectedly_end_the_rounds_too() -> None:
    """Their stamps differ at each look, and nothing predicted it."""
    plan, sent, looks = RoundPlan(), dict[str, object](), 0
    while True:
        pages = [page(f"k/{n}", looks, SMALL_BYTES) for n in range(4)]
        chosen = plan.next_round(pages, sent, 1e9 if looks else 0.0)
        if not chosen:
            break
        sent |= {each.name: each.stamp for each in chosen}
        looks += 1
    assert looks == rounds.ROUNDS_WITHOUT_GAIN


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_cache_of_the_decoder_is_sent_if_it_was_not_seen_to_change(rewritten: bool) -> None:
    """A decoder creates it anew with each chunk, or keeps parts of it."""
    plan, sent, looks = RoundPlan(), dict[str, object](), 0
    large = 20 * ROUND_BYTES
    while True:
        cache = dataclasses.replace(
            page("decoder/a", looks if rewritten else 0, large), lasts_s=0.4, guessed=True
        )
        chosen = plan.next_round(
            [cache, page("k/0", 0, large), page("k/1", 0, large)], sent, 1e9 * bool(looks)
        )
        if not chosen:
            break
        sent |= {each.name: each.stamp for each in chosen}
        looks += 1
    assert list(sent) == (["k/0", "k/1"] if rewritten else ["k/0", "k/1", "decoder/a"])
    assert looks == len(sent)
    assert plan.left_bytes == (large if rewritten else 0)


@dataclass
class Provider:
    """See `state_provider.StateProvider`. The session is quiesced at the first boundary after the request
    and `waits_s`."""

    window: FilledWindow
    waits_s: float
    quiesced_s: float = 0.0

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def key(self, session: str, migration: int) -> bytes | None:
        return KEY

    def check(self, session: str, migration: int, target: str) -> None:
        return None

    def offer(self, session: str, migration: int, target: str) -> bool:
        return False

    async def pages(self, session: str) -> Sequence[Page]:
        if not self.quiesced_s:
            self.window.until(self._now)
        return self.window.pages(quiesced=bool(self.quiesced_s))

    async def rest(self, session: str, migration: int) -> tuple[Mapping[str, Any], Sequence[Page]]:
        await asyncio.sleep(self.waits_s)
        self.window.until(self._now)
        await asyncio.sleep(self.window.boundary_s - self._now)
        self.window.until(self.window.boundary_s)
        self.quiesced_s = self._now
        return {"session": session, "next_chunk": self.window.chunks}, self.window.pages(quiesced=True)

    async def acknowledged(self, session: str, migration: int, next_chunk: int) -> None:
        return None

    def sending_manifest(self, session: str, migration: int) -> None:
        return None

    def over(self, session: str, migration: int) -> None:
        return None


class Room:
    """See `fetched_state.ReceiveMemory`."""

    def __init__(self) -> None:
        self.pages: dict[str, Tensor] = {}

    def begin(self) -> None:
        self.pages.clear()

    def place(self, name: str, size: int, dtype: str = "", shape: Sequence[int] = ()) -> tuple[Tensor, ...]:
        return (self.pages.setdefault(name, torch.zeros(size, dtype=torch.uint8)),)

    def check(self, header: Mapping[str, Any], names: Iterable[str]) -> object:
        return None


def fetch(
    monkeypatch: pytest.MonkeyPatch, provider: Provider, bytes_per_s: float, still_s: float = 20.0
) -> tuple[FetchedState, Room, float]:
    """Migrate with both real roles, at a hundred-thousandth of all sizes. Also returns the pause."""
    [(fetched, room, ended_s)] = fetch_all(monkeypatch, provider, bytes_per_s, still_s, [SESSION])
    return fetched, room, ended_s - provider.quiesced_s


def fetch_all(
    monkeypatch: pytest.MonkeyPatch,
    provider: Provider,
    bytes_per_s: float,
    still_s: float,
    sessions: Sequence[str],
) -> list[tuple[FetchedState, Room, float]]:
    """Migrate these sessions at once. Also returns when each was verified."""
    for module in (rounds, sender):
        monkeypatch.setattr(module, "ROUND_BYTES", ROUND_BYTES // SCALE)
        monkeypatch.setattr(module, "SMALL_BYTES", SMALL_BYTES // SCALE)
    loop = VirtualLoop(1)
    fabric = TransferFabric(loop, Random(1), bytes_per_s=bytes_per_s / SCALE)
    here, there = MemoryNetwork(fabric, "here", MODEL), MemoryNetwork(fabric, "there", MODEL)

    async def migrated() -> list[tuple[FetchedState, Room, float]]:
        source = Source(provider, here.links, CopyLimits(still_s=still_s), loop.time)
        address = await here.listen(source.serve)
        target = Target(TARGET, there.links, 60.0, there.connect, loop.time)

        async def one(session: str) -> tuple[FetchedState, Room, float]:
            room = Room()
            fetched = await target.fetch(session, MIGRATION, KEY, (address,), room, 600.0)
            return fetched, room, loop.time()

        return list(await asyncio.gather(*map(one, sessions)))

    try:
        return loop.run_until_complete(migrated())
    finally:
        loop.close()


@pytest.mark.parametrize("waits_s", [0.0, 5.0])
@pytest.mark.parametrize(("bytes_per_s", "most_s"), [(0.6e9, 3.4), (1.0e9, 1.8), (4e9, 0.5)])
def test_a_session_is_quiesced_for_its_newest_frames_alone(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, most_s: float, waits_s: float
) -> None:
    """Incident: the pause was the copy of a whole rolling window, 4.5 s at 0.6 GB/s.

    Until the session is quiesced, which may take a while, its newest frames are sent on.
    """
    provider = Provider(FilledWindow(frame_bytes=FRAME_BYTES // SCALE), waits_s)
    fetched, room, pause_s = fetch(monkeypatch, provider, bytes_per_s)
    for each in provider.window.pages(quiesced=True):
        assert torch.equal(room.pages[each.name], each.parts[0])
    assert pause_s <= most_s
    assert fetched.seconds <= 9.0 + waits_s
    assert fetched.bytes_copied <= 2 * fetched.state_bytes + waits_s * bytes_per_s / SCALE


def test_a_session_that_would_be_quiesced_for_too_long_is_never_quiesced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = Provider(FilledWindow(frame_bytes=FRAME_BYTES // SCALE), 0.0)
    with pytest.raises(TransferTooSlowError, match="changed again"):
        fetch(monkeypatch, provider, 0.6e9, still_s=2.0)
    assert provider.quiesced_s == 0.0


@dataclass
class CountingProvider(Provider):
    """Several sessions, of which it counts those whose pages are read and that are not quiesced yet."""

    reading: set[str] = field(default_factory=set)
    most: int = 0

    async def pages(self, session: str) -> Sequence[Page]:
        self.reading.add(session)
        self.most = max(self.most, len(self.reading))
        return await super().pages(session)

    async def rest(self, session: str, migration: int) -> tuple[Mapping[str, Any], Sequence[Page]]:
        found = await super().rest(session, migration)
        self.reading.remove(session)
        # The window plays on for the others.
        self.quiesced_s = 0.0
        return found


def test_a_session_that_is_not_quiesced_yet_keeps_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has two caches of the decoder meanwhile, and there is memory for no more."""
    provider = CountingProvider(FilledWindow(frame_bytes=FRAME_BYTES // SCALE), waits_s=5.0)
    sessions = [f"ses_{n}" for n in range(SOURCES_AT_ONCE + 2)]
    found = fetch_all(monkeypatch, provider, 4e9, 20.0, sessions)
    assert len(found) == len(sessions)
    assert provider.most == SOURCES_AT_ONCE


class MovingProvider(Provider):
    """Its session is on the way between slab and host while it is to be quiesced."""

    moves = False

    async def pages(self, session: str) -> Sequence[Page]:
        if self.moves:
            raise SourceNotReadyError("its state is being copied into its slab")
        return await super().pages(session)

    async def rest(self, session: str, migration: int) -> tuple[Mapping[str, Any], Sequence[Page]]:
        self.moves = True
        return await super().rest(session, migration)


def test_a_state_that_moves_to_its_slab_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = MovingProvider(FilledWindow(frame_bytes=FRAME_BYTES // SCALE), waits_s=5.0)
    fetched, _, _ = fetch(monkeypatch, provider, 4e9)
    assert fetched.state_bytes == size_of(provider.window.pages(quiesced=True))


class RewritingProvider(Provider):
    """Its session writes everything once more before it is quiesced."""

    asked = False
    over_s = 0.0

    async def pages(self, session: str) -> Sequence[Page]:
        part = torch.full((ROUND_BYTES // SCALE + 1,), int(self.asked), dtype=torch.uint8)
        return [Page("k/0", (part,), self.asked)]

    async def rest(self, session: str, migration: int) -> tuple[Mapping[str, Any], Sequence[Page]]:
        self.asked = True
        await asyncio.sleep(self.waits_s)
        self.quiesced_s = self._now
        return {"session": session, "next_chunk": 1}, await self.pages(session)

    def over(self, session: str, migration: int) -> None:
        self.over_s = self._now


def test_a_round_on_its_way_counts_to_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 6.7 s, and the session is quiesced after the first of them."""
    provider = RewritingProvider(FilledWindow(), waits_s=1.0)
    with pytest.raises(TransferTooSlowError, match="for more than 3 s"):
        fetch(monkeypatch, provider, 10e6, still_s=3.0)
    assert 2.9 <= provider.over_s - provider.quiesced_s <= 3.1 + WAIT_S


def test_the_reason_of_a_source_counts_where_its_link_is_closed_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy that its source had ended as too slow was lost to the target, which fetched it again."""

    async def notices_the_end(link: MemoryLink, deadline: Deadline) -> None:
        wire, fabric = link._wire, link._fabric
        while not link._giving and not any(at <= fabric.loop.time() for at, _ in wire.rounds):
            if link.name not in fabric.wires:
                raise PeerLostError("the link is closed")
            await asyncio.sleep(deadline.left(0.01))

    monkeypatch.setattr(MemoryLink, "before", notices_the_end)
    provider = RewritingProvider(FilledWindow(), waits_s=1.0)
    with pytest.raises(TransferTooSlowError, match="for more than 3 s"):
        fetch(monkeypatch, provider, 10e6, still_s=3.0)
