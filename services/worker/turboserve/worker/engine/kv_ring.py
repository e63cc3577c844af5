"""A slab's ring of keys and values, to which one session's forwards write and from which they read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from turboserve.worker.engine.errors import FramesExhaustedError
from turboserve.worker.engine.fidelity import Fidelity, block_size
from turboserve.worker.engine.layer_arrival import LayerArrival
from turboserve.worker.engine.memory import Slab
from turboserve.worker.engine.ring_placement import LayerPlacement, Placement, reduced_reads
from turboserve.worker.engine.sparse_attention import sparse_attention
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.rope import Rotation, rotate

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Softmax attention: q [1, S, heads, head_dim]; k, v [1, heads, N, head_dim] → q's shape."""


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See `Attention`."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2)


class KVRing:
    """Ring positions of one slab, and the frames whose keys and values they hold.

    Bookkeeping is on the host; no call waits for the device.
    """

    def __init__(self, slab: Slab, config: ModelConfig, rotation: Rotation) -> None:
        self.slab = slab
        self._limit = config.session_frames
        self._capacity = config.window_frames
        self._sink = config.sink_size if config.local_attn_size != -1 else 0
        self._always_read = min(config.sink_size, config.window_frames)
        self._tokens = config.tokens_per_frame
        self._rotation = rotation
        self._keys = slab.keys.flatten(1, 2).unbind(0)
        self._values = slab.values.flatten(1, 2).unbind(0)
        self._kept = slab.sink_keys.flatten(1, 2).unbind(0)
        self._kept_tokens = slab.sink_keys.shape[1] * self._tokens
        self._text = tuple(
            (_for_attention(keys), _for_attention(values))
            for keys, values in zip(slab.text_keys, slab.text_values, strict=True)
        )
        self._views: tuple[Placement, tuple[LayerPlacement, ...]] | None = None
        self.frames: list[int] = []
        """Index of the frame at each filled ring position."""
        self.writes = [0] * config.window_frames
        """Number of forwards that were given each ring position to write to. A position with the same number
        as when it was read has the same contents."""
        self.text_writes = 0
        """Number of times that the prompt was written."""
        self._next = self._sink
        self.shift = 0
        """Frames by which the sink's read keys are turned; 0 for absolute rotation."""
        self._arrival: LayerArrival | None = None

    @property
    def end(self) -> int:
        """Index after the newest frame, or 0."""
        return max(self.frames) + 1 if self.frames else 0

    def chunks_until_written(self, position: int, chunk_frames: int) -> float:
        """Number of chunks to come before the one that writes this ring position; infinite for the sink's."""
        if position < self._sink:
            return math.inf
        rolling = self._capacity - self._sink
        frames = self._capacity - len(self.frames) + (position - self._next) % rolling
        return frames // chunk_frames

    def place(self, first: int, count: int) -> Placement:
        """Choose ring positions for frames first … first+count−1: their own, or those of the oldest frames.

        The oldest frames are evicted, never the sink. Raises `FramesExhaustedError` past the model's last
        frame: there is no window and no position is left, or no rotation is defined.
        """
        if first >= self.end:
            if self._limit is not None and first + count > self._limit:
                raise FramesExhaustedError(first + count, self._limit)
            for frame in range(first, first + count):
                self._insert(frame)
            self._change(self._blank)
            self._follow()
        return self.resident(first, count)

    def resident(self, first: int, count: int, *, keep_sink: bool = False) -> Placement:
        """Ring positions of those of the frames first … first+count−1 that the ring holds.

        `keep_sink` leaves out the sink's. Keys and values of frames without a position are not written: no
        later forward reads them.
        """
        where = {
            frame: position
            for position, frame in enumerate(self.frames)
            if first <= frame < first + count and not (keep_sink and position < self._always_read)
        }
        runs: list[tuple[int, int, int]] = []
        for frame in sorted(where):
            self.writes[where[frame]] += 1
            start, offset = where[frame] * self._tokens, (frame - first) * self._tokens
            if runs and runs[-1][0] + runs[-1][2] == start and runs[-1][1] + runs[-1][2] == offset:
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + self._tokens)
            else:
                runs.append((start, offset, self._tokens))
        return Placement(tuple(runs), max(len(self.frames), self._always_read) * self._tokens)

    def reduced(self, placement: Placement, fidelity: Fidelity, chunk_frames: int) -> Placement:
        """The placement with the reads of this configuration: the sink and the newest frames."""
        oldest = self.end - fidelity.window_chunks * chunk_frames
        visible = placement.visible // self._tokens
        always_read = max(self._sink, self._always_read)
        reads = reduced_reads(self.frames, visible, always_read, oldest, self._tokens)
        return replace(placement, reads=reads, sparsity=fidelity.sparsity)

    def attend(
        self,
        layer: int,
        placement: Placement,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        heads: slice = slice(None),
        by: Attention = attention,
    ) -> Tensor:
        """Write this forward's keys and values, then attend over all visible ones, computed by `by`.

        q, k, v: [1, S, heads, head_dim]; returns q's shape. `heads`: q has only these heads of the slab's.
        """
        view = self._written(layer, placement, k, v)
        # The copy of several runs serves all queries, so it costs little beside attention.
        keys, values = (
            x[0][:, heads] if len(x) == 1 else torch.cat([part[:, heads] for part in x], dim=2)
            for x in (view.keys, view.values)
        )
        if placement.sparsity:
            return sparse_attention(q, keys, values, placement.sparsity, block_size(self._tokens), by)
        return by(q, keys, values)

    def write(self, layer: int, placement: Placement, k: Tensor, v: Tensor) -> None:
        """Write this forward's keys and values, [1, S, heads, head_dim], without attending."""
        self._written(layer, placement, k, v)

    def arrives(self, arrival: LayerArrival) -> None:
        """Let each layer's first read or write wait for its arrival, until `has_arrived`."""
        self._arrival = arrival

    def has_arrived(self) -> None:
        """Note that all layers are in the slab: no forward waits any more."""
        if self._arrival is not None:
            self._arrival.catch_up()
            self._arrival = None

    def _await(self, layer: int) -> None:
        if self._arrival is not None:
            self._arrival.wait(layer)

    def _written(self, layer: int, placement: Placement, k: Tensor, v: Tensor) -> LayerPlacement:
        self._await(layer)
        if self._views is None or self._views[0] is not placement:
            self._views = placement, tuple(self._layer(i, placement) for i in range(len(self._keys)))
        view = self._views[1][layer]
        for keys, values, offset, count in view.writes:
            keys.copy_(k[0].narrow(0, offset, count))
            values.copy_(v[0].narrow(0, offset, count))
        for kept, offset, count in view.kept:
            kept.copy_(k[0].narrow(0, offset, count))
        return view

    def attend_text(self, layer: int, q: Tensor) -> Tensor:
        """Attend over the prompt. q: [1, S, heads, head_dim]; returns the same shape."""
        self._await(layer)
        return attention(q, *self._text[layer])

    def set_text(self, layers: list[tuple[Tensor, Tensor]], row: int) -> None:
        """Replace the prompt by row `row` of the result of the transformer's `project_text`."""
        self.text_writes += 1
        for layer, (keys, values) in enumerate(layers):
            self.slab.text_keys[layer] = keys[row]
            self.slab.text_values[layer] = values[row]

    def bookkeeping(self) -> dict[str, object]:
        """The ring's state outside the tensors, as JSON. `slots`: `frames`, by its name in transfers."""
        return {"slots": list(self.frames), "next": self._next, "shift": self.shift}

    def restore(self, frames: list[int], next_position: int, shift: int) -> None:
        """Restore the result of `bookkeeping`; the caller fills the slab."""
        self.frames, self._next, self.shift = list(frames), next_position, shift
        self._blank(slice(None))

    def follow(self, frames: list[int], next_position: int, shift: int) -> None:
        """Repeat the bookkeeping of a ring with the same writes, with its effects on the sink's keys."""
        self.frames, self._next = list(frames), next_position
        self._blank(slice(None))
        self._turn(shift)

    def filled(self) -> dict[str, Tensor]:
        """Views of every filled part of the slab, by name; writing to them restores a ring."""
        frames = len(self.frames)
        sink = min(frames, self.slab.sink_keys.shape[1])
        return {
            "keys": self.slab.keys[:, :frames],
            "values": self.slab.values[:, :frames],
            "text_keys": self.slab.text_keys,
            "text_values": self.slab.text_values,
            "sink_keys": self.slab.sink_keys[:, :sink],
        }

    def _layer(self, layer: int, placement: Placement) -> LayerPlacement:
        keys, values = self._keys[layer], self._values[layer]
        writes, kept = [], []
        for start, offset, count in placement.runs:
            writes.append((keys.narrow(0, start, count), values.narrow(0, start, count), offset, count))
            if start < self._kept_tokens:
                part = self._kept[layer][start : start + count]
                kept.append((part, offset, part.shape[0]))
        reads = placement.reads or ((0, placement.visible),)
        return LayerPlacement(
            tuple(writes),
            tuple(kept),
            tuple(_for_attention(keys.narrow(0, start, count)) for start, count in reads),
            tuple(_for_attention(values.narrow(0, start, count)) for start, count in reads),
        )

    def _insert(self, frame: int) -> None:
        if len(self.frames) < self._capacity:
            self.frames.append(frame)
            return
        self.frames[self._next] = frame
        self._next = self._next + 1 if self._next + 1 < self._capacity else self._sink

    def _change(self, change: Callable[[slice], None]) -> None:
        """Change all layers of the slab: now, or each when it has arrived."""
        if self._arrival is None:
            change(slice(None))
        else:
            self._arrival.postpone(change)

    def _blank(self, layers: slice) -> None:
        """Zero the sink's positions that have no frame yet, where a chunk is shorter than the sink.

        LongLive 1 reads its whole sink from the first chunk on. Keys of zero take a share of the attention.
        """
        for tensor in (self.slab.keys, self.slab.values):
            if len(self.frames) < self._always_read:
                tensor[layers, len(self.frames) : self._always_read].zero_()

    def _follow(self) -> None:
        """Under window rotation, turn the sink's keys so that the sink directly precedes the rolling frames.

        Rotation is relative. This therefore equals reading the whole window with indices that start at its
        first frame (LongLive's "infinity"), at the cost of the sink alone. The turned keys are computed from
        the kept keys each time: turning them in place would accumulate rounding errors over a long session.
        """
        if self.slab.sink_keys.shape[1]:
            self._turn(max(0, self.end - self._capacity - self.frames[0]))

    def _turn(self, shift: int) -> None:
        if shift != self.shift:
            self.shift = shift
            self._change(self._turn_sink)

    def _turn_sink(self, layers: slice) -> None:
        kept = self.slab.sink_keys.shape[1]
        turn = self._rotation.by_frames(self.shift, self.slab.keys.device)
        # Turning all layers at once would temporarily need several times the sink's memory.
        for keys, written in zip(self.slab.keys[layers], self.slab.sink_keys[layers], strict=True):
            keys[:kept] = rotate(written, turn)


def _for_attention(tokens: Tensor) -> Tensor:
    """A view of [N, heads, head_dim] as [1, heads, N, head_dim]."""
    return tokens.transpose(0, 1).unsqueeze(0)
