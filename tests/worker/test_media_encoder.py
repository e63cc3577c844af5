"""Packaging: closed fragments that join to one video, by any encoders, in the right colors."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from turboserve.worker.media import (
    TIMESCALE,
    EncodedChunk,
    EncoderSettings,
    FragmentEncoder,
    FrameFormatError,
    boxes,
    find,
)

COLOURS = {
    "red": (255, 0, 0),
    "green": (0, 200, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 220, 0),
    "white": (255, 255, 255),
    "grey": (128, 128, 128),
    "black": (0, 0, 0),
}


def solid(colour: tuple[int, int, int], count: int, size: tuple[int, int] = (64, 64)) -> NDArray[np.uint8]:
    return np.full((count, *size, 3), colour, np.uint8)


def moving(count: int, first: int, size: tuple[int, int] = (64, 64)) -> NDArray[np.uint8]:
    """Draw a white square on blue that moves two pixels a frame."""
    frames = solid((20, 20, 160), count, size)
    for offset in range(count):
        x = (2 * (first + offset)) % (size[1] - 16)
        frames[offset, 16:32, x : x + 16] = 255
    return frames


def session(chunks: int, fps: float = 16, size: tuple[int, int] = (64, 64)) -> list[EncodedChunk]:
    """Encode chunks of 9, 12, 12, … frames, each by an encoder of its own."""
    packaged, first = [], 0
    for index in range(chunks):
        count = 9 if index == 0 else 12
        encoder = FragmentEncoder()
        packaged.append(encoder.encode(moving(count, first, size), index=index, first_frame=first, fps=fps))
        first += count
    return packaged


def number(fragment: bytes, *path: bytes) -> int:
    content = find(fragment, *path)
    assert content is not None
    return int.from_bytes(content[4:], "big")


@pytest.mark.parametrize("fps", [16, 24])
def test_fragments_of_several_encoders_join_to_one_contiguous_video(fps: float) -> None:
    chunks = session(4, fps)
    data = chunks[0].init + b"".join(chunk.fragment for chunk in chunks)

    with av.open(io.BytesIO(data), "r") as container:
        pictures = list(container.decode(video=0))

    step = TIMESCALE // fps
    assert [picture.pts for picture in pictures] == [step * n for n in range(9 + 3 * 12)]
    assert [n for n, picture in enumerate(pictures) if picture.key_frame] == [0, 9, 21, 33]
    for n, picture in enumerate(pictures):
        error = np.abs(picture.to_ndarray(format="rgb24").astype(int) - moving(1, n)[0].astype(int))
        assert error.mean() < 3, f"frame {n}"


@pytest.mark.parametrize("fps", [16, 24])
def test_the_init_segment_is_the_same_bytes_for_every_chunk_and_encoder(fps: float) -> None:
    inits = {chunk.init for chunk in session(3, fps)}
    inits.add(
        FragmentEncoder().encode(solid(COLOURS["green"], 12), index=700, first_frame=8_397, fps=fps).init
    )
    assert len(inits) == 1


def test_a_chunk_in_the_middle_plays_by_itself() -> None:
    chunk = FragmentEncoder().encode(moving(12, 57), index=5, first_frame=57, fps=16)
    with av.open(io.BytesIO(chunk.init + chunk.fragment), "r") as container:
        pictures = list(container.decode(video=0))
    assert [picture.pts for picture in pictures] == [3_000 * n for n in range(57, 69)]


def test_decode_time_and_sequence_number_are_absolute() -> None:
    chunk = FragmentEncoder().encode(
        solid(COLOURS["red"], 12), index=1_000_000, first_frame=11_999_997, fps=16
    )
    assert number(chunk.fragment, b"moof", b"traf", b"tfdt") == 11_999_997 * 3_000
    assert number(chunk.fragment, b"moof", b"mfhd") == 1_000_001
    assert [kind for kind, _, _ in boxes(chunk.init)] == [b"ftyp", b"moov"]
    assert [kind for kind, _, _ in boxes(chunk.fragment)] == [b"moof", b"mdat"]


def test_the_same_frames_give_the_same_bytes() -> None:
    one, other = (FragmentEncoder().encode(moving(12, 9), index=1, first_frame=9, fps=16) for _ in range(2))
    assert one == other


def test_a_chunk_is_one_group_of_pictures_without_b_frames_even_across_a_scene_cut() -> None:
    frames = np.concatenate([solid(COLOURS["black"], 6), moving(6, 0)])
    chunk = FragmentEncoder().encode(frames, index=0, first_frame=0, fps=16)
    with av.open(io.BytesIO(chunk.init + chunk.fragment), "r") as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    assert [packet.is_keyframe for packet in packets] == [True] + [False] * 11
    assert all(packet.pts == packet.dts for packet in packets)


@pytest.mark.parametrize("name", sorted(COLOURS))
def test_colours_survive(name: str) -> None:
    chunk = FragmentEncoder().encode(solid(COLOURS[name], 12), index=0, first_frame=0, fps=16)
    with av.open(io.BytesIO(chunk.init + chunk.fragment), "r") as container:
        pictures = list(container.decode(video=0))
    assert {(picture.colorspace, picture.color_range) for picture in pictures} == {(1, 1)}
    mean = pictures[-1].to_ndarray(format="rgb24").reshape(-1, 3).mean(0)
    assert np.abs(mean - COLOURS[name]).max() <= 3


def test_large_pictures() -> None:
    chunk = FragmentEncoder(EncoderSettings(preset="ultrafast")).encode(
        moving(9, 0, (480, 832)), index=0, first_frame=0, fps=16
    )
    assert (chunk.width, chunk.height, chunk.frames) == (832, 480, 9)
    assert chunk.codec.startswith("avc1.")
    with av.open(io.BytesIO(chunk.init + chunk.fragment), "r") as container:
        assert sum(1 for _ in container.decode(video=0)) == 9


def test_the_codec_string_names_profile_and_level() -> None:
    assert session(1)[0].codec == "avc1.64000a"


@pytest.mark.parametrize(
    ("shape", "dtype", "fps", "field"),
    [
        ((12, 63, 64, 3), np.uint8, 16, "height"),
        ((12, 64, 65, 3), np.uint8, 16, "width"),
        ((12, 64, 8_192, 3), np.uint8, 16, "width"),
        ((0, 64, 64, 3), np.uint8, 16, "frames"),
        ((12, 64, 64), np.uint8, 16, "frames"),
        ((12, 64, 64, 4), np.uint8, 16, "frames"),
        ((12, 64, 64, 3), np.float32, 16, "frames"),
        ((12, 64, 64, 3), np.uint8, 23.976, "fps"),
        ((12, 64, 64, 3), np.uint8, 0, "fps"),
        ((12, 64, 64, 3), np.uint8, -16, "fps"),
    ],
)
def test_what_cannot_be_packaged_is_refused_by_name(
    shape: tuple[int, ...], dtype: type, fps: float, field: str
) -> None:
    with pytest.raises(FrameFormatError) as refused:
        FragmentEncoder().encode(np.zeros(shape, dtype), index=0, first_frame=0, fps=fps)
    assert refused.value.field == field
    assert refused.value.limit is not None
    assert not refused.value.retryable
