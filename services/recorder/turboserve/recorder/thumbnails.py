"""Pictures of a recording, as JPEG. They need PyAV, the recorder's extra `thumbnails`."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

POSTER_WIDTH = 640
TILE_WIDTH = 160
TILES = 16
COLUMNS = 4
QUALITY = 3
"""Quantizer of JPEG, 2 (best) to 31."""


def available() -> bool:
    """Whether a decoder is installed."""
    return importlib.util.find_spec("av") is not None


def poster(videos: Sequence[bytes]) -> bytes:
    """Return the first frame of the first video, at most `POSTER_WIDTH` pixels wide."""
    frame = _first_frame(videos[0])
    width = min(frame.width, POSTER_WIDTH)
    return _jpeg(frame.reformat(width=_even(width), height=_even(frame.height * width / frame.width)))


def contact_sheet(videos: Sequence[bytes]) -> bytes:
    """Return the first frames of at most `TILES` videos of one size, in rows of `COLUMNS`."""
    import av.filter

    frames = [_first_frame(video) for video in videos[:TILES]]
    width, height = frames[0].width, frames[0].height
    tile_height = _even(height * TILE_WIDTH / width)
    columns = min(COLUMNS, len(frames))
    rows = -(-len(frames) // columns)
    graph = av.filter.Graph()
    source = graph.add_buffer(
        width=width, height=height, format=frames[0].format.name, time_base=Fraction(1, 1)
    )
    chain = [
        source,
        graph.add("scale", f"{TILE_WIDTH}:{tile_height}"),
        graph.add("tile", f"{columns}x{rows}"),
        graph.add("buffersink"),
    ]
    for first, second in pairwise(chain):
        first.link_to(second)
    graph.configure()
    for number, frame in enumerate(frames):
        same = frame.reformat(width=width, height=height, format=frames[0].format.name)
        same.pts, same.time_base = number, Fraction(1, 1)
        graph.push(same)
    # An incomplete last row comes out at the end of the input only.
    graph.push(None)
    return _jpeg(graph.pull())


def _first_frame(video: bytes) -> Any:
    import av

    with av.open(io.BytesIO(video), "r") as container:
        return next(container.decode(video=0))


def _jpeg(frame: Any) -> bytes:
    import av

    codec = av.CodecContext.create("mjpeg", "w")
    codec.width, codec.height, codec.pix_fmt = frame.width, frame.height, "yuvj420p"
    codec.time_base = Fraction(1, 1)
    codec.qmin = codec.qmax = QUALITY
    picture = frame.reformat(format="yuvj420p")
    picture.pts = 0
    return b"".join(bytes(packet) for packet in [*codec.encode(picture), *codec.encode(None)])


def _even(side: float) -> int:
    return max(2, round(side / 2) * 2)
