"""How a source sends one state: rounds while the session generates, then the rest while it is quiesced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from turboserve.worker.engine.page_hashing import PageHasher
from turboserve.worker.engine.state_pages import Page, changed, digest_of
from turboserve.worker.transfer.errors import (
    DeadlineExceededError,
    SourceNotReadyError,
    TransferTooSlowError,
)
from turboserve.worker.transfer.frames import Manifest, PageSpec, Round, Verified, Wait
from turboserve.worker.transfer.link import LocalPages, RemotePages
from turboserve.worker.transfer.network import LinkTable
from turboserve.worker.transfer.pace import CopyLimits
from turboserve.worker.transfer.rounds import ROUND_BYTES, SMALL_BYTES, RoundPlan, lasting
from turboserve.worker.transfer.state_provider import StateProvider
from turboserve.worker.transfer.transfer_attempt import TransferAttempt

QUIESCE_POLL_S = 0.25
"""Interval at which pages are looked for that a session wrote before it is quiesced, seconds."""


class StateSender:
    """Sends the state of one attempt."""

    def __init__(
        self,
        attempt: TransferAttempt,
        provider: StateProvider,
        links: LinkTable,
        limits: CopyLimits,
        now: Callable[[], float],
    ) -> None:
        self._attempt, self._provider, self._links, self._limits = attempt, provider, links, limits
        self._now = now
        self._plan = RoundPlan()
        self._rest: tuple[Mapping[str, Any], Sequence[Page]] | None = None
        """Header and all pages, once the session is quiesced."""

    async def send_rounds(self) -> None:
        """While the session generates, send pages as long as that shortens the pause.

        A session with a large state is quiesced at the end: until it is, its pages are sent on.

        Raises:
            TransferTooSlowError: The rest would take longer than a session may be quiesced.
        """
        attempt, plan = self._attempt, self._plan
        while pages := plan.next_round(await self._pages(), attempt.sent, attempt.bytes_per_s):
            await self._round(pages)
        left, rate, still_s = plan.left_bytes, attempt.bytes_per_s, self._limits.still_s
        if left >= SMALL_BYTES and left > rate * still_s:
            raise TransferTooSlowError(
                f"still: {left} bytes have changed again, {left / rate:.1f} s at {rate:.3g} B/s, "
                f"at most {still_s:g} s"
            )
        if attempt.bytes_copied >= ROUND_BYTES:
            with self._pause_limited():
                self._rest = await self._send_until_quiesced()

    async def send_rest(self, still_s: float | None) -> None:
        """At the boundary: send the rest and the manifest, within `still_s` after the quiesce."""
        attempt = self._attempt
        if self._rest is None:
            rest = self._provider.rest(attempt.opened.session, attempt.opened.migration)
            self._rest = await attempt.meanwhile(rest)
            if still_s is not None:
                attempt.deadline.shorten(still_s)
        with self._pause_limited():
            await self._send_manifest(*self._rest)

    @contextmanager
    def _pause_limited(self) -> Iterator[None]:
        """Name the error of a session that was quiesced for too long."""
        try:
            yield
        except DeadlineExceededError as error:
            deadline = self._attempt.deadline
            if not deadline.shortened or not deadline.passed:
                raise
            raise TransferTooSlowError(f"still: for more than {deadline.seconds:g} s: {error}") from error

    async def _pages(self) -> Sequence[Page]:
        """The pages that no current work writes to."""
        return await self._attempt.meanwhile(self._provider.pages(self._attempt.opened.session))

    async def _send_until_quiesced(self) -> tuple[Mapping[str, Any], Sequence[Page]]:
        """Quiesce the session. Until it is, send what it has written and will not write again before."""
        attempt = self._attempt
        rest = self._provider.rest(attempt.opened.session, attempt.opened.migration)
        resting = asyncio.ensure_future(rest)
        resting.add_done_callback(self._pause_begins)
        try:
            while not resting.done():
                pages = await self._unsent()
                if not pages:
                    # A silent source counts as dead.
                    await attempt.channel.send(Wait(), attempt.deadline.left())
                    await attempt.meanwhile(_done(resting, QUIESCE_POLL_S))
                elif not resting.done():
                    await self._round(pages)
            return resting.result()
        finally:
            resting.cancel()
            await asyncio.gather(resting, return_exceptions=True)

    def _pause_begins(self, resting: asyncio.Future[Any]) -> None:
        # A round that is under way counts too.
        if not resting.cancelled() and resting.exception() is None:
            self._attempt.deadline.shorten(self._limits.still_s)

    async def _unsent(self) -> list[Page]:
        """What is worth a round before the session is quiesced; empty if nothing is."""
        attempt = self._attempt
        try:
            found = await self._pages()
        except SourceNotReadyError:
            # The state is on its way between slab and host: the session is quiesced once it has arrived.
            return []
        pages = lasting(changed(self._plan.foreseen(found), attempt.sent), attempt.bytes_per_s)
        return pages if sum(page.size for page in pages) >= SMALL_BYTES else []

    async def _send_manifest(self, header: Mapping[str, Any], pages: Sequence[Page]) -> None:
        attempt = self._attempt
        session, migration = attempt.opened.session, attempt.opened.migration
        await self._round(changed(pages, attempt.sent))
        await attempt.meanwhile(self._provider.acknowledged(session, migration, int(header["next_chunk"])))
        names = tuple(page.name for page in pages)
        digest = digest_of(header, {name: attempt.prints[name] for name in names})
        self._provider.sending_manifest(session, migration)
        manifest = Manifest(header=dict(header), pages=names, digest=digest)
        await attempt.channel.send(manifest, attempt.deadline.left())
        await attempt.receive_frame(Verified)

    async def _round(self, pages: Sequence[Page]) -> None:
        attempt = self._attempt
        link, deadline, number = attempt.link, attempt.deadline, attempt.rounds
        memory, everything = LocalPages([page.parts for page in pages]), range(len(pages))
        begun = self._now()
        # Some links already copy here.
        offering = self._links.blocking(lambda: link.offer(memory, everything, deadline), deadline, link)
        offer = await attempt.meanwhile(offering)
        specs = tuple(
            PageSpec(name=page.name, size=page.size, dtype=page.dtype, shape=page.shape) for page in pages
        )
        await attempt.channel.send(Round(number=number, pages=specs, offer=offer), deadline.left())

        def send() -> dict[str, bytes]:
            with PageHasher({page.name: page.parts for page in pages}, deadline.left) as hasher:
                hasher.arrived(memory.size(everything))
                link.transfer(attempt.opened.session, memory, RemotePages(), everything, deadline)
                return hasher.prints()

        prints = await attempt.until_taken(self._links.blocking(send, deadline, link))
        link.settle()
        attempt.prints |= prints
        attempt.sent |= {page.name: page.stamp for page in pages}
        size = memory.size(everything)
        attempt.rounds += 1
        attempt.bytes_copied += size
        # The time of a small round is not that of its bytes.
        if size and (size >= SMALL_BYTES or not attempt.bytes_per_s):
            attempt.bytes_per_s = size / max(self._now() - begun, 1e-9)


async def _done(future: asyncio.Future[Any], seconds: float) -> None:
    await asyncio.wait([future], timeout=seconds)
