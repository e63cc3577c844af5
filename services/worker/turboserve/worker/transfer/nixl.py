"""NIXL: the target reads the source's memory, in which the source takes no part (TurboServe, 6.1).

Each link has its own agent at both ends, which costs some threads. The agents make a failure safe: a read
from a stopped peer cannot be canceled, so that the link drops its agent and the connection, and nothing
writes to the target's memory after that.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from turboserve.wording import counted
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import (
    PeerLostError,
    TransferBackendError,
    TransferError,
    TransferProtocolError,
    TruncatedStateError,
)
from turboserve.worker.transfer.link import PROGRESS_S, Link, LocalPages, RemotePages, let_go
from turboserve.worker.transfer.listeners import opened_by

POLL_S = 0.0005
READ_BYTES = 64 << 20
"""Bytes of one read. Each end checks for progress after each."""
SLOW_BYTES_S = 10e6
"""Transfer rate below which a peer counts as dead or stopped, bytes per second."""
PIECE, DONE = b"piece", b"read"
"""Notifications of the target: a piece was read, the last piece was read."""
MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}
Place = tuple[int, int, int]
"""(address, bytes, device)."""


def installed() -> bool:
    """Whether the extra `turboserve-worker[nixl]` is installed."""
    return importlib.util.find_spec("nixl") is not None


class NixlLink(Link):
    """One agent. The target's agent knows the source's from its first offer on."""

    kind = "nixl"

    def __init__(self, name: str, role: str, peers: Sequence[str]) -> None:
        """`peers`: addresses from which the other end may connect. Raises `TransferBackendError`."""
        super().__init__(name)
        from nixl._api import nixl_agent, nixl_agent_config

        try:
            # NIXL's progress thread would use a core for as long as the link is kept.
            config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            agent, listeners = opened_by(lambda: nixl_agent(f"{name}-{role}", config))
        except Exception as error:
            raise TransferBackendError(f"nixl: {error!r}") from error
        # UCX does not authenticate TCP peers, and serves reads of memory.
        listeners.only_from(peers)
        listeners.close()
        self._agent: Any = agent
        self._offered: Any = None
        self._peer: str | None = None

    def offer(self, pages: LocalPages, page_range: range, deadline: Deadline) -> dict[str, Any]:
        """Register the memory and describe where each part lies. See `Link.offer`."""
        self.settle()
        parts = pages.parts(page_range)
        if not parts:
            return {"memory": "DRAM", "parts": [], "agent": ""}
        agent = self._live(deadline)
        try:
            self._offered = agent.register_memory(_regions(parts), _memory(parts))
            metadata = agent.get_partial_agent_metadata(self._offered, True, ["UCX"])
        except Exception as error:
            self.close()
            raise TransferBackendError(f"nixl: {error!r}") from error
        return {
            "memory": _memory(parts),
            "parts": [list(where) for where in _places(parts)],
            "agent": base64.b64encode(metadata).decode(),
        }

    def transfer(
        self,
        session: str,
        source: LocalPages | RemotePages,
        target: LocalPages | RemotePages,
        page_range: range,
        deadline: Deadline,
    ) -> int:
        """See `Link.transfer`. The source only drives the library until the target reports the last read."""
        try:
            if isinstance(source, LocalPages):
                return self._serve(source.size(page_range), deadline)
            assert isinstance(target, LocalPages)
            return self._read(source, target.parts(page_range), deadline)
        except BaseException as error:
            self.close()
            let_go(error)
            raise

    def settle(self) -> None:
        """See `Link.settle`."""
        if self._offered is not None and self._agent is not None:
            offered, self._offered = self._offered, None
            self._agent.deregister_memory(offered)

    def close(self) -> None:
        """Close the link: no read continues after it. See `Link.close`."""
        self.closed = True
        agent, self._agent = self._agent, None
        self._offered = None
        if agent is not None and self._peer is not None:
            try:
                agent.remove_remote_agent(self._peer)
            except Exception:
                # The agent does not know the peer any more, as intended.
                self._peer = None

    def _serve(self, size: int, deadline: Deadline) -> int:
        agent = self._live(deadline)
        timeout_s = _timeout_s(min(size, READ_BYTES))
        while size:
            try:
                said = [word for words in agent.get_new_notifs().values() for word in words]
            except Exception as error:
                raise _named(error) from error
            if DONE in said:
                break
            if said:
                timeout_s = _timeout_s(min(size, READ_BYTES))
            timeout_s.left()
            deadline.sleep(POLL_S)
        return size

    def _read(self, source: RemotePages, parts: list[Tensor], deadline: Deadline) -> int:
        places = _offered_places(source)
        sizes, wanted = [size for _, size, _ in places], [part.numel() for part in parts]
        if sizes != wanted:
            raise TruncatedStateError(
                f"nixl: {sum(sizes)} bytes in {counted(len(sizes), 'part')}, {sum(wanted)} announced"
            )
        if not parts:
            return 0
        agent = self._live(deadline)
        registered = None
        try:
            peer = agent.add_remote_agent(_metadata(source))
            self._peer = peer.decode() if isinstance(peer, bytes) else peer
            registered = agent.register_memory(_regions(parts), _memory(parts))
            cuts = list(zip(_split(_places(parts)), _split(places), strict=True))
            kinds = _memory(parts), str(source.offer["memory"])
            for number, (ours, theirs) in enumerate(cuts, 1):
                word = DONE if number == len(cuts) else PIECE
                self._fetch(agent, ours, theirs, kinds, word, deadline)
        except TransferError:
            raise
        except Exception as error:
            raise _named(error) from error
        finally:
            if registered is not None:
                _quietly(lambda: agent.deregister_memory(registered))
        return sum(wanted)

    def _fetch(
        self,
        agent: Any,
        ours: list[Place],
        theirs: list[Place],
        kinds: tuple[str, str],
        word: bytes,
        deadline: Deadline,
    ) -> None:
        """Read one piece, and notify the source of it."""
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(ours, kinds[0]),
            agent.get_xfer_descs(theirs, kinds[1]),
            self._peer,
            word,
        )
        try:
            state = agent.transfer(handle)
            timeout_s = _timeout_s(sum(size for _, size, _ in ours))
            while state == "PROC":
                timeout_s.left()
                deadline.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
        finally:
            _quietly(handle.release)
        if state != "DONE":
            raise TransferBackendError(f"nixl: the read ended with {state}")

    def _live(self, deadline: Deadline) -> Any:
        deadline.left()
        if self._agent is None:
            raise PeerLostError("the link is closed")
        return self._agent


def _timeout_s(size: int) -> Deadline:
    return Deadline(max(PROGRESS_S, size / SLOW_BYTES_S))


def _places(parts: list[Tensor]) -> list[Place]:
    return [(part.data_ptr(), part.numel(), max(0, part.get_device())) for part in parts]


def _split(places: list[Place], size: int = READ_BYTES) -> Iterator[list[Place]]:
    """Split the places, in order, into lists of `size` bytes each. Both ends split alike."""
    piece: list[Place] = []
    room = size
    for address, left, device in places:
        while left:
            taken = min(room, left)
            piece.append((address, taken, device))
            address, left, room = address + taken, left - taken, room - taken
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def _regions(parts: list[Tensor]) -> list[tuple[int, int, int, str]]:
    """The memory regions of the parts, each once: parts of one slab are registered together."""
    regions = {}
    for part in parts:
        storage = part.untyped_storage()
        regions[storage.data_ptr()] = (storage.data_ptr(), storage.nbytes(), max(0, part.get_device()), "")
    return list(regions.values())


def _memory(parts: list[Tensor]) -> str:
    return MEMORY["cuda" if any(part.is_cuda for part in parts) else "cpu"]


def _offered_places(source: RemotePages) -> list[Place]:
    parts = source.offer.get("parts")
    if source.offer.get("memory") not in MEMORY.values() or not isinstance(parts, list):
        raise TransferProtocolError("nixl: the offer names no memory")
    places = []
    for part in parts:
        if not (isinstance(part, list) and len(part) == 3 and all(type(n) is int and n >= 0 for n in part)):
            raise TransferProtocolError("nixl: the offer names no memory")
        places.append((part[0], part[1], part[2]))
    return places


def _metadata(source: RemotePages) -> bytes:
    try:
        return base64.b64decode(str(source.offer.get("agent")), validate=True)
    except binascii.Error as error:
        raise TransferProtocolError("nixl: the offer names no agent") from error


def _named(error: Exception) -> Exception:
    if isinstance(error, TransferError):
        return error
    name = type(error).__name__
    lost = "Disconnect" in name or "NotFound" in name
    return PeerLostError(f"nixl: {error}") if lost else TransferBackendError(f"nixl: {error!r}")


def _quietly(call: Any) -> None:
    try:
        call()
    except Exception:
        # After a failure, closing the link drops the agent and everything it holds.
        return
