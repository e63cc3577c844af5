"""Encode frames to closed fMP4 fragments: every chunk decodes by itself and joins any other."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
from av.codec.context import Flags
from av.video.reformatter import (
    ColorPrimaries,
    ColorRange,
    Colorspace,
    ColorTrc,
    Interpolation,
    VideoReformatter,
)
from numpy.typing import NDArray

from turboserve.contracts.errors import TurboServeError
from turboserve.static_frozen import statically_frozen


class FrameFormatError(TurboServeError):
    """Frames of a shape, type or rate that cannot be packaged. The same frames fail again."""

    code, status, title = "frame_format", 422, "Frames cannot be packaged"


_HEADER = 8
_STSD_FIELDS = 8
_VISUAL_SAMPLE_FIELDS = 78


def boxes(data: bytes, start: int = 0, end: int | None = None) -> Iterator[tuple[bytes, int, int]]:
    """The boxes of one level: (type, start with header, end). Raises `ValueError` if their sizes do not add
    up."""
    end = len(data) if end is None else end
    while start < end:
        size = int.from_bytes(data[start : start + 4], "big")
        if size < _HEADER or start + size > end:
            raise ValueError(f"box at byte {start}: {size} bytes do not fit in {end - start}")
        yield data[start + 4 : start + _HEADER], start, start + size
        start += size


def find(data: bytes, *path: bytes) -> bytes | None:
    """The content of the first box at `path`, without its header; None if there is none."""
    start, end = 0, len(data)
    for kind in path:
        for found, box_start, box_end in boxes(data, start, end):
            if found == kind:
                start, end = box_start + _inner(kind), box_end
                break
        else:
            return None
    return data[start:end]


def split(data: bytes) -> tuple[bytes, bytes]:
    """Split a one-fragment file into init segment (ftyp and moov) and fragment (moof and mdat)."""
    parts = {kind: data[start:end] for kind, start, end in boxes(data)}
    return parts[b"ftyp"] + parts[b"moov"], parts[b"moof"] + parts[b"mdat"]


def codec_string(init: bytes) -> str:
    """RFC 6381 name of the init segment's H.264 track: profile, constraints and level from its avcC. Raises
    `ValueError` if there is no avcC box."""
    config = find(init, b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd", b"avc1", b"avcC")
    if config is None:
        raise ValueError("init segment: no avcC box")
    return f"avc1.{config[1:4].hex()}"


def _inner(kind: bytes) -> int:
    if kind == b"stsd":
        return _HEADER + _STSD_FIELDS
    if kind == b"avc1":
        return _HEADER + _VISUAL_SAMPLE_FIELDS
    return _HEADER


TIMESCALE = 48_000
"""Ticks per second. A frame lasts a whole number of ticks at 16, 24, 25, 30, 48, 50 and 60 fps."""
_AVCOL_SPC_BT709 = 1
_MUXER_BITEXACT = 0x400
_SIDE_LIMIT = 4_096
_MUX = {
    "movflags": "empty_moov+default_base_moof+frag_custom+frag_discont+skip_trailer",
    "video_track_timescale": str(TIMESCALE),
    # Without these two options the muxer shifts every fragment to decode time 0.
    "use_editlist": "0",
    "avoid_negative_ts": "disabled",
}


@dataclass(frozen=True)
class EncoderSettings:
    """What the init segment depends on besides size and rate. All workers must agree on it."""

    crf: int = 18
    """Constant rate factor: 0 is lossless, 51 is worst, 18 is hard to tell from the original."""
    preset: str = "veryfast"


@statically_frozen()
class EncodedChunk:
    """One chunk, ready to be published."""

    init: bytes
    """ftyp and moov: the same bytes for every chunk of the same size, rate and settings."""
    fragment: bytes
    """moof and mdat, at its own absolute decode time."""
    codec: str
    """RFC 6381, e.g. `avc1.64000a`."""
    width: int
    height: int
    frames: int


class FragmentEncoder:
    """Packages chunks. Keeps no state between calls: any instance may package any chunk of any session."""

    def __init__(self, settings: EncoderSettings | None = None) -> None:
        self._settings = settings or EncoderSettings()
        self._reformat = VideoReformatter()

    def encode(self, frames: NDArray[np.uint8], *, index: int, first_frame: int, fps: float) -> EncodedChunk:
        """Encode frames, uint8 [F, H, W, 3], RGB, to a closed fragment: an IDR frame first, no B frames.

        `index` is the chunk's index; the fragment's sequence number is `index` + 1. `first_frame` counts
        video frames from the session's start and sets the decode time. Raises `FrameFormatError` for empty
        chunks, odd sizes (4:2:0 halves both), and rates at which a frame is not a whole number of ticks.
        """
        step = self._check(frames, index, first_frame, fps)
        count, height, width, _ = frames.shape
        target = io.BytesIO()
        options = {**_MUX, "fragment_index": str(index + 1)}
        with av.open(target, "w", format="mp4", options=options) as container:
            container.flags |= _MUXER_BITEXACT
            stream = container.add_stream("libx264", rate=Fraction(TIMESCALE, step))
            self._configure(stream, width, height)
            for offset in range(count):
                picture = self._picture(frames[offset])
                picture.pts = (first_frame + offset) * step
                picture.time_base = Fraction(1, TIMESCALE)
                container.mux(stream.encode(picture))
            container.mux(stream.encode(None))
        init, fragment = split(target.getvalue())
        return EncodedChunk(init, fragment, codec_string(init), width, height, count)

    def _configure(self, stream: av.VideoStream, width: int, height: int) -> None:
        codec = stream.codec_context
        codec.width, codec.height, codec.pix_fmt = width, height, "yuv420p"
        codec.time_base = stream.time_base = Fraction(1, TIMESCALE)
        codec.thread_count = 1
        codec.gop_size = 1_000_000
        codec.max_b_frames = 0
        codec.colorspace = _AVCOL_SPC_BT709
        codec.color_range = ColorRange.MPEG
        codec.color_primaries = ColorPrimaries.BT709
        codec.color_trc = ColorTrc.BT709
        codec.flags |= Flags.global_header | Flags.bitexact
        codec.options = {
            "preset": self._settings.preset,
            "tune": "zerolatency",
            "crf": str(self._settings.crf),
            # A scene cut after a prompt switch must not start a second group of pictures.
            "x264-params": "scenecut=0:keyint=infinite",
        }

    def _picture(self, frame: NDArray[np.uint8]) -> av.VideoFrame:
        source = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        # Both color spaces are stated: swscale's default for RGB is BT.601, which shifts greens.
        return self._reformat.reformat(
            source,
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            src_color_range=ColorRange.JPEG,
            dst_color_range=ColorRange.MPEG,
            interpolation=Interpolation.AREA,
        )

    @staticmethod
    def _check(frames: NDArray[np.uint8], index: int, first_frame: int, fps: float) -> int:
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or frames.shape[0] == 0:
            raise FrameFormatError(
                f"frames: {frames.dtype} {list(frames.shape)} is not uint8 [F ≥ 1, H, W, 3]",
                field="frames",
                limit="uint8 [F, H, W, 3]",
            )
        for name, side in (("height", frames.shape[1]), ("width", frames.shape[2])):
            if side % 2 or not 2 <= side <= _SIDE_LIMIT:
                raise FrameFormatError(
                    f"{name}: {side} is not even and in 2..{_SIDE_LIMIT}", field=name, limit=_SIDE_LIMIT
                )
        if index < 0 or first_frame < 0:
            raise FrameFormatError("index, first_frame: below 0", field="first_frame", limit=0)
        step = round(TIMESCALE / fps) if fps > 0 else 0
        if step == 0 or step * fps != TIMESCALE:
            raise FrameFormatError(
                f"fps: a frame at {fps} fps is not a whole number of ticks of 1/{TIMESCALE} s",
                field="fps",
                limit=TIMESCALE,
            )
        return step
