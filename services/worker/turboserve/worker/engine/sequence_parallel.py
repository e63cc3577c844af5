"""Sequence parallelism of degree 2: one session's forward, computed by two workers (Ulysses).

The home owns the session; the donor lends its device. Each computes half of the tokens of every frame, and
within attention half of the heads over all tokens. Around each self-attention both exchange:

    before   home → donor   q, k, v of the home's tokens, the donor's heads
             donor → home   q of the donor's tokens, the home's heads; k, v of the donor's tokens, all heads
    after    both           attention's result, the other's tokens, the own heads

The home's ring gets all keys and values, so that the state is complete at home after every forward: the loan
can end between any two forwards, and a forward that breaks is repeated by the home alone. The donor keeps the
keys and values of its own heads in memory of its own, and drops them with the loan.

The flow equals that of one worker up to rounding, because each half of the tokens is a matrix multiplication
of its own. Source: DeepSpeed-Ulysses; SlackServe, 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from turboserve.worker.engine.errors import DonorReleasedError, SequenceParallelUnavailableError
from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.memory import Slab, SlabLayout
from turboserve.worker.engine.ring_placement import Placement
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.work import Row, RowsForward
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.transformer import CausalWanTransformer

HOME, DONOR = 0, 1
"""Ranks of the two workers."""


class Exchange(Protocol):
    """The other worker. Raises `PartnerLostError` if it does not take part before the deadline."""

    def __call__(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send the tensors `sent` and fill `received`. The other worker does the reverse, in equal sizes."""
        ...


@dataclass(frozen=True)
class Split:
    """Which tokens of each frame and which heads a worker computes. The home's come first."""

    tokens: int
    """Tokens of a frame."""
    heads: int

    @classmethod
    def of(cls, config: ModelConfig) -> Split:
        """The split of a model. Raises `SequenceParallelUnavailableError`."""
        for field, value in (("num_heads", config.num_heads), ("tokens_per_frame", config.tokens_per_frame)):
            if value < 2:
                raise SequenceParallelUnavailableError(field, value)
        return cls(config.tokens_per_frame, config.num_heads)

    def tokens_of(self, rank: int) -> slice:
        """The tokens of each frame that a worker computes."""
        return _half(self.tokens, rank)

    def heads_of(self, rank: int) -> slice:
        """The heads whose attention a worker computes."""
        return _half(self.heads, rank)


def _half(count: int, rank: int) -> slice:
    first = count - count // 2
    return slice(0, first) if rank == HOME else slice(first, count)


def part_size(part: slice) -> int:
    """Number of tokens or heads in a part."""
    size: int = part.stop - part.start
    return size


@dataclass(frozen=True)
class ForwardSpec:
    """One forward of a borrowed session, apart from its tensors: what the home sends before it."""

    loan: int
    frames: int
    """Latent frames of the forward."""
    first_frame: int
    timestep: float
    ring_frames: tuple[int, ...]
    """See `KVRing.frames`. `next_position` and `shift` complete the ring's bookkeeping."""
    next_position: int
    shift: int
    runs: tuple[tuple[int, int, int], ...]
    """See `Placement`, as are the next three."""
    visible: int
    reads: tuple[tuple[int, int], ...]
    sparsity: float
    text_tokens: int
    """Length of the prompt's embedding, which the forward's latents precede. 0: the prompt is unchanged."""
    seeds: bool
    """Whether the donor's heads of the whole ring follow: the donor lacks the session's keys and values."""

    @property
    def placement(self) -> Placement:
        """Where the forward writes and reads."""
        return Placement(self.runs, self.visible, self.reads, self.sparsity)


class SplitMemory:
    """The transformer's memory for one worker's tokens of a forward. See the module for what is exchanged."""

    def __init__(self, row: Row, split: Split, rank: int, exchange: Exchange) -> None:
        """`row.ring` has all heads at the home, and the donor's heads at the donor."""
        self._row, self._split, self._rank, self._exchange = row, split, rank, exchange
        self._frames = row.latents.shape[0]
        self._mine, self._theirs = split.tokens_of(rank), split.tokens_of(1 - rank)
        self._heads, self._their_heads = split.heads_of(rank), split.heads_of(1 - rank)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionMemory.attend`; S is this worker's tokens."""
        frames, rank = self._frames, self._rank
        q, k, v = (x[0].unflatten(0, (frames, -1)) for x in (q, k, v))
        # The home's ring is complete, so that it gets keys and values of all heads.
        kv_sent = self._their_heads if rank == HOME else slice(0, self._split.heads)
        kv_kept = slice(0, self._split.heads) if rank == HOME else self._heads
        theirs = part_size(self._theirs)
        others = (
            q.new_empty(frames, theirs, part_size(self._heads), q.shape[-1]),
            *(q.new_empty(frames, theirs, part_size(kv_kept), q.shape[-1]) for _ in range(2)),
        )
        self._exchange((q[:, :, self._their_heads], k[:, :, kv_sent], v[:, :, kv_sent]), others)
        whole = [
            self._joined(mine[:, :, kept], other, dim=1).flatten(0, 1).unsqueeze(0)
            for mine, kept, other in zip((q, k, v), (self._heads, kv_kept, kv_kept), others, strict=True)
        ]
        queried = self._heads if rank == HOME else slice(None)
        out = self._row.ring.attend(layer, self._row.placement, *whole, heads=queried)
        out = out[0].unflatten(0, (frames, -1))
        rest = out.new_empty(frames, part_size(self._mine), part_size(self._their_heads), out.shape[-1])
        self._exchange((out[:, self._theirs],), (rest,))
        return self._joined(out[:, self._mine], rest, dim=2).flatten(0, 1).unsqueeze(0)

    def attend_text(self, layer: int, q: Tensor) -> Tensor:
        """See `AttentionMemory.attend_text`. Each worker has the prompt's keys and values of all heads."""
        return self._row.ring.attend_text(layer, q)

    def _joined(self, mine: Tensor, other: Tensor, dim: int) -> Tensor:
        """Concatenate the two workers' parts, the home's first."""
        return torch.cat((mine, other) if self._rank == HOME else (other, mine), dim=dim)


class BorrowedForward:
    """At the home: the forwards of one session, split with a donor."""

    def __init__(
        self,
        loan: int,
        state: SessionState,
        forward: RowsForward,
        split: Split,
        announce: Callable[[ForwardSpec], None],
        exchange: Exchange,
    ) -> None:
        """`announce` sends a spec to the donor, without waiting."""
        self._loan, self._state, self._forward, self._split = loan, state, forward, split
        self._announce, self._exchange = announce, exchange
        self._text_writes = -1
        self._seeded = False

    @property
    def ring(self) -> KVRing:
        """The ring of the borrowed session."""
        return self._state.ring

    @torch.inference_mode()
    def __call__(self, row: Row) -> Tensor:
        """Run one forward. Returns the flow [F, C, H, W]; writes to the row's ring.

        Raises `DonorReleasedError` if the donor ends the loan, and `PartnerLostError` if it does not take
        part. Compute the row alone then: that overwrites whatever this call has written.
        """
        ring, dtype = row.ring, row.ring.slab.keys.dtype
        text = None if self._text_writes == ring.text_writes else self._state.text
        self._announce(self._spec(row, text))
        accepted = torch.zeros(1, dtype=torch.uint8, device=ring.slab.keys.device)
        self._exchange((), (accepted,))
        if not accepted.item():
            raise DonorReleasedError("the donor ends the loan")
        self._exchange([x.to(dtype) for x in (row.latents, text) if x is not None], ())
        if not self._seeded:
            for part in _cached(ring, self._split.heads_of(DONOR)):
                self._exchange(part, ())
        memory = SplitMemory(row, self._split, HOME, self._exchange)
        mine = self._forward.tokens(row, self._split.tokens_of(HOME), memory)
        rest = mine.new_empty(1, mine.shape[1], part_size(self._split.tokens_of(DONOR)), mine.shape[3])
        self._exchange((), (rest,))
        self._seeded, self._text_writes = True, ring.text_writes
        return self._forward.flow(torch.cat((mine, rest), dim=2))

    def _spec(self, row: Row, text: Tensor | None) -> ForwardSpec:
        kept, placement = row.ring.bookkeeping(), row.placement
        return ForwardSpec(
            self._loan,
            row.latents.shape[0],
            row.first_frame,
            row.timestep,
            tuple(row.ring.frames),
            kept["next"],  # type: ignore[arg-type]
            row.ring.shift,
            placement.runs,
            placement.visible,
            placement.reads,
            placement.sparsity,
            0 if text is None else text.shape[0],
            not self._seeded,
        )


class LentMemory:
    """At the donor: memory for the keys and values of one borrowed session, allocated once."""

    def __init__(self, model: CausalWanTransformer, split: Split) -> None:
        weight, config = model.patch_embedding.weight, model.config
        layout = SlabLayout.of(config, weight.dtype)

        def allocate(*shape: int, heads: int = part_size(split.heads_of(DONOR))) -> Tensor:
            return torch.zeros(
                layout.layers, *shape, heads, layout.head_dim, dtype=weight.dtype, device=weight.device
            )

        def frames(count: int) -> Tensor:
            return allocate(count, layout.tokens_per_frame)

        def text() -> Tensor:
            return allocate(layout.text_len, heads=split.heads)

        keys, values = frames(layout.frames), frames(layout.frames)
        slab = Slab(0, keys, values, text(), text(), frames(layout.kept_sink_frames))
        self.ring = KVRing(slab, config, model.rotation)
        self.model, self.split, self.slab = model, split, slab

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the memory."""
        slab = self.slab
        parts = (slab.keys, slab.values, slab.text_keys, slab.text_values, slab.sink_keys)
        return sum(part.numel() * part.element_size() for part in parts)


class LentForward:
    """At the donor: the other half of the forwards of one loan."""

    def __init__(self, loan: int, memory: LentMemory, forward: RowsForward, exchange: Exchange) -> None:
        self.loan = loan
        self._memory, self._forward, self._exchange = memory, forward, exchange
        self._placement: Placement | None = None

    @torch.inference_mode()
    def __call__(self, spec: ForwardSpec, *, accept: bool = True) -> None:
        """Compute this worker's half of a forward, or end the loan. Raises `PartnerLostError`."""
        config, slab, ring = self._memory.model.config, self._memory.slab, self._memory.ring
        self._exchange((torch.full((1,), accept, dtype=torch.uint8, device=slab.keys.device),), ())
        if not accept:
            return
        latents = slab.keys.new_empty(spec.frames, *config.latent_shape[1:])
        text = slab.keys.new_empty(spec.text_tokens, config.text_dim)
        self._exchange((), [x for x in (latents, text) if x.numel()])
        ring.follow(list(spec.ring_frames), spec.next_position, spec.shift)
        if spec.text_tokens:
            ring.set_text(self._memory.model.project_text(text.unsqueeze(0)), row=0)
        if spec.seeds:
            for part in _cached(ring, slice(None)):
                self._exchange((), part)
        if self._placement != spec.placement:
            self._placement = spec.placement
        row = Row(ring, self._placement, latents, spec.timestep, spec.first_frame)
        memory = SplitMemory(row, self._memory.split, DONOR, self._exchange)
        tokens = self._memory.split.tokens_of(DONOR)
        self._exchange((self._forward.tokens(row, tokens, memory),), ())


def _cached(ring: KVRing, heads: slice) -> list[tuple[Tensor, ...]]:
    """A ring's filled keys and values of these heads, layer by layer, as views of the slab."""
    filled = ring.filled()
    names = [name for name in ("keys", "values", "sink_keys") if filled[name].numel()]
    layers = filled["keys"].shape[0] if names else 0
    return [tuple(filled[name][layer][..., heads, :] for name in names) for layer in range(layers)]
