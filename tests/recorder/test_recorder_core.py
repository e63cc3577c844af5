"""Segments, their index, and orders: every chunk lands exactly once, whatever step the recorder dies at."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboserve.contracts.recordings import RecordingOrder, RecordingState
from turboserve.recorder.core.batching import Batch, LogChunk, NewSegment, SegmentLimits
from turboserve.recorder.core.orders import plan
from turboserve.recorder.core.playlist import media_playlist
from turboserve.recorder.core.segments import Index, Segment, init_name

FRAMES, FPS = 12, 16.0
LIMITS = SegmentLimits(seconds=3.0, bytes=10_000, age_s=10.0)


def chunk(index: int, init: bytes = b"init") -> LogChunk:
    return LogChunk(index, index * FRAMES, FRAMES, FPS, init, f"<{index}>".encode())


@dataclass
class Store:
    """Objects of one recording. A recorder may die before, in the middle of, or after any of its steps."""

    objects: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def put(self, name: str, data: bytes) -> None:
        self.objects[name], self.sizes[name] = data, len(data)

    def index(self) -> Index:
        return Index.of(self.sizes.items())

    def chunks(self) -> list[int]:
        """Indexes of the chunks of the index, read from the objects' bytes."""
        data = b"".join(self.objects[segment.name] for segment in self.index().segments)
        return [int(text) for text in data.decode().strip("<>").split("><")] if data else []


class Died(Exception):
    """The recorder was killed."""


def store(target: Store, segments: list[NewSegment], steps: list[str]) -> None:
    """Store segments as a writer does. Each entry of `steps` says what becomes of the next step."""
    for new in segments:
        for name, data in ((init_name(new.init), new.init), (new.segment.name, new.data)):
            step = steps.pop(0) if steps else "done"
            if step == "torn":
                # As after a loss of power: a file that has a part of its bytes.
                target.objects[name], target.sizes[name] = data, len(data) // 2
            if step in ("torn", "killed"):
                raise Died
            target.put(name, data)
            if step == "killed after":
                raise Died


@given(
    total=st.integers(0, 40),
    runs=st.lists(
        st.tuples(
            st.sampled_from([1.0, 1.5, 3.0, 6.0]),
            st.lists(st.sampled_from(["done", "killed", "killed after", "torn"]), max_size=8),
            st.booleans(),
        ),
        max_size=6,
    ),
)
def test_every_chunk_lands_exactly_once(total: int, runs: list[tuple[float, list[str], bool]]) -> None:
    """Each run is one life of a recorder, with segments of another length. The last one is not killed."""
    found = Store()
    for seconds, steps, flushes in [*runs, (3.0, list[str](), True)]:
        batch = Batch(found.index().end or 0, SegmentLimits(seconds, 10_000, 10.0))
        steps = list(steps)
        try:
            for index in range(total):
                store(found, batch.add(chunk(index), 0.0), steps)
            if flushes:
                store(found, batch.take(), steps)
        except Died:
            continue
    assert found.chunks() == list(range(total))
    assert found.index().chunks == total
    assert found.index().duration_s == pytest.approx(total * FRAMES / FPS)


@given(
    total=st.integers(1, 30),
    turns=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9)), max_size=40),
    seconds=st.tuples(st.sampled_from([0.75, 1.5, 3.0]), st.sampled_from([2.25, 3.75, 6.0])),
)
def test_two_recorders_at_once_lose_and_repeat_nothing(
    total: int, turns: list[tuple[int, int]], seconds: tuple[float, float]
) -> None:
    """An old process and its successor overlap for a while. The second one then goes on alone."""
    found = Store()
    read = [0, 0]
    batches = [Batch(0, SegmentLimits(limit, 10_000, 10.0)) for limit in seconds]
    for who, count in [*turns, (1, total)]:
        for _ in range(min(count, total - read[who])):
            store(found, batches[who].add(chunk(read[who]), 0.0), [])
            read[who] += 1
    store(found, batches[1].take(), [])
    assert found.chunks() == list(range(total))


def test_chunks_that_the_log_lost_leave_a_gap_between_segments() -> None:
    found, batch = Store(), Batch(2, LIMITS)
    for index in (2, 3):
        store(found, batch.add(chunk(index), 0.0), [])
    store(found, batch.skip_to(7), [])
    for index in (1, 6, 7, 8):
        store(found, batch.add(chunk(index), 0.0), [])
    store(found, batch.take(), [])
    assert found.chunks() == [2, 3, 7, 8]
    assert [(s.first, s.end, s.first_frame) for s in found.index().segments] == [(2, 4, 24), (7, 9, 84)]
    [part] = found.index().parts
    assert part.starts == (0, 24)
    with pytest.raises(ValueError, match="chunk 9 comes first"):
        batch.add(chunk(12), 0.0)


def test_a_segment_ends_at_its_length_its_size_and_with_the_encoder() -> None:
    batch = Batch(0, LIMITS)
    whole = [new for index in range(9) for new in batch.add(chunk(index), 0.0)]
    assert [new.segment.chunks for new in whole] == [4, 4]
    [first] = batch.add(chunk(9, b"other"), 0.0)
    assert (first.segment.first, first.segment.chunks, first.init) == (8, 1, b"init")
    small = Batch(0, SegmentLimits(seconds=60, bytes=6, age_s=10))
    assert [len(small.add(chunk(index), 0.0)) for index in range(4)] == [0, 1, 0, 1]


def test_an_unfinished_segment_becomes_due() -> None:
    batch = Batch(0, LIMITS)
    assert not batch.is_due(100.0)
    batch.add(chunk(0), 100.0)
    assert not batch.is_due(109.9)
    assert batch.is_due(110.0)
    assert len(batch.take()) == 1
    assert not batch.is_due(200.0)


@given(
    first=st.integers(0, 2**31),
    chunks=st.integers(1, 999),
    first_frame=st.integers(0, 2**31),
    frames=st.integers(1, 10**6),
    fps=st.sampled_from([0.01, 16.0, 23.976024, 29.97003, 60.0, 1000.0]),
    size=st.integers(1, 2**32),
)
def test_a_name_says_everything(
    first: int, chunks: int, first_frame: int, frames: int, fps: float, size: int
) -> None:
    segment = Segment(first, chunks, first_frame, frames, fps, "0123456789abcdef", size)
    assert Segment.parse(segment.name) == segment


@pytest.mark.parametrize("name", ["segments/x.m4s", "inits/0123456789abcdef.mp4", "index.json", ""])
def test_other_objects_are_no_segments(name: str) -> None:
    assert Segment.parse(name) is None


def test_the_playlist_of_a_growing_recording_only_grows() -> None:
    index = Index()
    lines: list[str] = []
    batch = Batch(0, LIMITS)
    for number in range(20):
        init = b"init" if number < 10 else b"other"
        for new in batch.add(chunk(number, init), 0.0):
            index = index.and_segment(new.segment)
        text = media_playlist(index, False, LIMITS.seconds).splitlines()
        assert text[: len(lines)] == lines
        lines = text
    assert "#EXT-X-TARGETDURATION:3" in lines
    assert "#EXT-X-PLAYLIST-TYPE:EVENT" in lines
    assert lines.count("#EXT-X-DISCONTINUITY") == 1
    assert [line for line in lines if "EXT-X-MAP" in line] == [
        '#EXT-X-MAP:URI="inits/1.mp4"',
        '#EXT-X-MAP:URI="inits/2.mp4"',
    ]
    whole = media_playlist(index, True, LIMITS.seconds)
    assert whole.endswith("#EXT-X-ENDLIST\n")
    assert "#EXT-X-PLAYLIST-TYPE:VOD" in whole


def order(name: str, state: RecordingState) -> RecordingOrder:
    return RecordingOrder(
        recording=name,
        session="ses_1",
        tenant="acme",
        state=state,
        from_chunk=0,
        next_chunk=0,
        session_ended=False,
        made=0,
    )


def test_a_recording_is_deleted_only_after_its_writer_has_ended() -> None:
    new, known = order("a", RecordingState.RECORDING), order("b", RecordingState.STOPPING)
    doomed, gone = order("c", RecordingState.DELETING), order("d", RecordingState.DELETING)
    found = plan([new, known, doomed, gone], {"b", "c", "x"}, set())
    assert found.start == (new,)
    assert found.update == (known,)
    assert found.stop == ("c", "x")
    assert found.delete == (gone,)
    assert plan([doomed], set(), {"c"}).delete == ()
