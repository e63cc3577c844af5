"""Hashes pages while they are transferred."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from types import TracebackType

from torch import Tensor

from turboserve.worker.engine.state_pages import HASHED_AT_ONCE_BYTES, HASHERS, fingerprint_of


class PageHasher:
    """Hashes each of some pages as soon as all its bytes are there. Use it as a context manager."""

    def __init__(
        self, pages: Mapping[str, Sequence[Tensor]], check: Callable[[], object] | None = None
    ) -> None:
        """`pages` arrive in this order. `check`: see `fingerprint_of`."""
        self._names = list(pages)
        self._ends = list(accumulate(sum(part.numel() for part in parts) for parts in pages.values()))
        self._hash = [partial(fingerprint_of, parts, check) for parts in pages.values()]
        self._hashing: list[Future[bytes]] = []
        many = bool(self._ends) and self._ends[-1] >= HASHED_AT_ONCE_BYTES
        self._threads = ThreadPoolExecutor(HASHERS, thread_name_prefix="hash") if many else None

    def __enter__(self) -> PageHasher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def arrived(self, size: int) -> None:
        """Note that the first `size` bytes of the pages are there."""
        if self._threads is None:
            return
        while (begun := len(self._hashing)) < len(self._ends) and self._ends[begun] <= size:
            self._hashing.append(self._threads.submit(self._hash[begun]))

    def prints(self) -> dict[str, bytes]:
        """BLAKE2b of the pages, by name. All their bytes are there."""
        if self._threads is None:
            return {name: hash() for name, hash in zip(self._names, self._hash, strict=True)}
        self.arrived(self._ends[-1])
        return {name: each.result() for name, each in zip(self._names, self._hashing, strict=True)}
