"""Times of the engine's forwards and chunks, and the memory of a session."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turboserve.bench.engine.naive import NaiveLoop, ShiftedCache
from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.memory import SlabLayout, SlabPool
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.tensor_backend import attention_kind
from turboserve.worker.engine.work import ChunkWork, Row, RowsForward
from turboserve.worker.model.schedule import Schedule
from turboserve.worker.model.transformer import CausalWanTransformer

WARM_UP = 2
"""Runs that are not counted."""


class Timer:
    """Seconds of work on a device: processor time on a CPU, so that other load does not count."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def __call__(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def median(self, work: Callable[[], object], repeats: int) -> float:
        """Return the median seconds of `repeats` runs of `work`, after warm-up runs."""
        for _ in range(WARM_UP):
            work()
        seconds = [self.once(work) for _ in range(repeats)]
        return sorted(seconds)[len(seconds) // 2]

    def once(self, work: Callable[[], object]) -> float:
        """Return the seconds of one run of `work`."""
        begin = self()
        work()
        return self() - begin


@dataclass(frozen=True)
class Batch:
    """Latency at one batch size. Seconds, medians."""

    forward_s: float
    """Time of one forward with a full window."""
    chunk_s: float
    """Time of a whole chunk of every session: all denoising forwards and the clean pass, without decoding."""
    enqueue_s: float
    """Wall time until a forward's work is handed to the device.

    If it is far below `forward_s`, the device never waits for the host, and CUDA graphs would gain nothing.
    """


class Sessions:
    """Sessions in lockstep with full windows, for measurements. Their slabs are one pool."""

    def __init__(
        self,
        model: CausalWanTransformer,
        count: int,
        text: Tensor,
        seed: int = 0,
        attention: str = "rows",
        compiler: str | None = None,
    ) -> None:
        """Create the sessions. Raises `AttentionUnavailableError`.

        Args:
            text: Prompt embeddings [1, L, text_dim].
            attention: One of `tensor_backend.KINDS`.
            compiler: See `RowsForward`.
        """
        self._config = model.config
        self._schedule = Schedule(model.config)
        weight = model.patch_embedding.weight
        kind = attention_kind(attention, model.config, weight.device, weight.dtype)
        forward = RowsForward(model, kind.memory, compiler)

        def run(rows: Sequence[Row]) -> Tensor:
            with kind.chosen():
                return forward(rows)

        self.forward = run
        """Runs one forward over any rows."""
        self.layout = SlabLayout.of(model.config, weight.dtype)
        self.pool = SlabPool(self.layout, count * self.layout.total_bytes, weight.device)
        self.states = []
        with torch.inference_mode():
            projected = model.project_text(text.to(weight))
            for number in range(count):
                slab = self.pool.acquire()
                ring = KVRing(slab, model.config, model.rotation)
                ring.set_text(projected, 0)
                generator = torch.Generator(weight.device)
                self.states.append(SessionState(str(number), slab, ring, generator, seed + number, ""))
        self._begin()

    @property
    def expected_bytes(self) -> int:
        """Bytes of all sessions' keys and values, by the formula.

        The formula counts self-attention over the window, cross-attention over the prompt and, under window
        rotation, the sink's keys a second time.
        """
        config = self._config
        width = config.num_layers * config.num_heads * config.head_dim * self.layout.dtype.itemsize
        frames = 2 * config.window_frames
        if config.rotation == "window" and config.local_attn_size != -1:
            frames += config.sink_size
        return len(self.states) * width * (frames * config.tokens_per_frame + 2 * config.text_len)

    @torch.inference_mode()
    def chunk(self, noise: Tensor | None = None) -> list[Tensor]:
        """Make one chunk of every session, and restart them where the model's frames end.

        Returns clean latents.
        """
        limit = self._config.session_frames
        last = self.states[0].first_frame(self._config) + self._config.frames_per_chunk
        if limit is not None and last > limit:
            self._begin()
        draw = None if noise is None else noise.__getitem__
        works = [ChunkWork(state, self._config, self._schedule, draw) for state in self.states]
        while works[0].done < works[0].total:
            flows = self.forward([work.row() for work in works])
            for work, flow in zip(works, flows, strict=True):
                work.advance(flow)
        clean = []
        for state, work in zip(self.states, works, strict=True):
            assert work.clean is not None
            state.remember(work.clean, self._config)
            state.next_chunk += 1
            clean.append(work.clean)
        return clean

    @torch.inference_mode()
    def fill(self) -> None:
        """Mark every window full. The values are arbitrary, because the time does not depend on them."""
        for state in self.states:
            for tensor in (state.slab.keys, state.slab.values):
                tensor.normal_()
            per_chunk = self._config.frames_per_chunk
            state.next_chunk = max(1, self._config.window_frames // per_chunk - 1)
            for chunk in range(state.next_chunk):
                state.ring.place(chunk * per_chunk, per_chunk)

    @torch.inference_mode()
    def measure(self, timer: Timer, repeats: int) -> Batch:
        """Measure the median times at this batch size."""
        self.fill()
        chunk_s = timer.median(self.chunk, repeats)
        limit = self._config.session_frames
        if limit is not None and self.states[0].first_frame(self._config) >= limit:
            self.fill()
        works = [ChunkWork(state, self._config, self._schedule) for state in self.states]
        rows = [work.row() for work in works]
        forward_s = timer.median(lambda: self.forward(rows), repeats)
        handed: list[float] = []
        for _ in range(repeats):
            timer()
            begin = time.perf_counter()
            self.forward(rows)
            handed.append(time.perf_counter() - begin)
        return Batch(forward_s, chunk_s, sorted(handed)[len(handed) // 2])

    def _begin(self) -> None:
        for state in self.states:
            state.next_chunk = 0
            state.ring.restore([], self._config.sink_size if self._config.local_attn_size != -1 else 0, 0)


def batches(
    model: CausalWanTransformer,
    text: Tensor,
    sizes: Sequence[int],
    repeats: int,
    attention: str = "rows",
    compiler: str | None = None,
) -> dict[int, Batch]:
    """Measure the latencies by batch size. For `attention` and `compiler`, see `Sessions`."""
    timer = Timer(model.patch_embedding.weight.device)
    return {
        size: Sessions(model, size, text, attention=attention, compiler=compiler).measure(timer, repeats)
        for size in sizes
    }


@dataclass(frozen=True)
class AgainstCopies:
    """One session's chunk in the engine's ring, and in the naive loop's cache. Seconds, medians."""

    ring_s: float
    copies_s: float
    speedup: float
    """Median of the rounds' quotients.

    The two runs of a round follow each other, under the most similar load.
    """


def ring_against_copies(
    model: CausalWanTransformer, text: Tensor, rounds: int, cache: type[ShiftedCache] = ShiftedCache
) -> AgainstCopies:
    """Measure both in turns, with full windows. The model has no last frame, or one far enough away."""
    config, weight = model.config, model.patch_embedding.weight
    sessions, loop = Sessions(model, 1, text), NaiveLoop(model, text.to(weight), cache)
    noise = torch.randn(len(config.denoising_steps), *config.latent_shape, device=weight.device)
    sessions.fill()
    for _ in range(-(-config.window_frames // config.frames_per_chunk)):
        loop.chunk(noise)
    timer = Timer(weight.device)
    works: dict[str, Callable[[], object]] = {"ring": sessions.chunk, "copies": lambda: loop.chunk(noise)}
    found: list[tuple[float, float]] = []
    for number in range(WARM_UP + rounds):
        seconds = {}
        for name in ("ring", "copies") if number % 2 else ("copies", "ring"):
            begin = timer()
            works[name]()
            seconds[name] = timer() - begin
        found.append((seconds["ring"], seconds["copies"]))
    found = found[WARM_UP:]
    middle = len(found) // 2
    return AgainstCopies(
        sorted(ring for ring, _ in found)[middle],
        sorted(copies for _, copies in found)[middle],
        sorted(copies / ring for ring, copies in found)[middle],
    )


def naive_chunk_s(
    model: CausalWanTransformer, text: Tensor, repeats: int, cache: type[ShiftedCache] = ShiftedCache
) -> float:
    """Measure the median seconds of a chunk in the naive loop, with a full window."""
    config, weight = model.config, model.patch_embedding.weight
    noise = torch.randn(len(config.denoising_steps), *config.latent_shape, device=weight.device)
    loop = NaiveLoop(model, text.to(weight), cache)
    limit = config.session_frames
    room = 10**9 if limit is None else limit // config.frames_per_chunk
    fill = max(0, min(config.window_frames // config.frames_per_chunk, room - WARM_UP - repeats))
    for _ in range(fill):
        loop.chunk(noise)
    return Timer(weight.device).median(lambda: loop.chunk(noise), min(repeats, max(1, room - fill - WARM_UP)))
