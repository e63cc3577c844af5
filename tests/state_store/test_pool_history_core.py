"""The core of the pools' history: steps, chunks as text, and what is deleted."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.fidelity import ChunkFidelity, Tier
from turboserve.contracts.pool_history import SAMPLE_S, PoolSample
from turboserve.state_store.core import pool_history as rules
from turboserve.state_store.core.chunk_history import ChunkRow, lanes, marks, rows_of

T0 = 1_700_000_000
COUNTS = st.integers(0, 50)
SAMPLES = st.builds(
    PoolSample,
    ready=COUNTS,
    starting=COUNTS,
    target=COUNTS,
    capacity=st.none() | COUNTS,
    required=st.none() | COUNTS,
    waiting=st.none() | COUNTS,
    rho_max=st.none() | st.floats(0, 9),
)
TIMED = st.lists(st.tuples(st.integers(0, 500), SAMPLES), max_size=40).map(
    lambda rows: sorted(((T0 + SAMPLE_S * step, sample) for step, sample in rows), key=lambda row: row[0])
)


def greatest(samples: list[PoolSample], name: str) -> Any:
    return max((value for one in samples if (value := getattr(one, name)) is not None), default=None)


@given(TIMED, st.integers(1, 200), st.lists(st.tuples(st.integers(0, 500), COUNTS), max_size=20))
def test_longer_steps_lose_no_peak_no_chunk_and_no_order(
    samples: list[tuple[int, PoolSample]], factor: int, chunks: list[tuple[int, int]]
) -> None:
    step_s = SAMPLE_S * factor
    counts = [rules.ChunkCount(T0 + SAMPLE_S * at, number, 0, number // 2) for at, number in chunks]
    found = rules.points(samples, counts, step_s)
    assert [point.at for point in found] == sorted({rules.step_of(at, step_s) for at, _ in samples})
    for point in found:
        mine = [one for at, one in samples if point.at <= at < point.at + step_s]
        for name in ("required", "waiting", "rho_max"):
            assert getattr(point, name) == greatest(mine, name)
        assert (point.ready, point.target) == (mine[-1].ready, mine[-1].target)
        assert point.chunks == sum(c.chunks for c in counts if rules.step_of(c.at, step_s) == point.at)
    # Steps of steps are the same as long steps at once.
    short = rules.points(samples, counts, SAMPLE_S)
    plain_samples = [
        (int(one.at), PoolSample(**one.model_dump(include=set(PoolSample.model_fields)))) for one in short
    ]
    again = rules.points(plain_samples, (), step_s)
    plain = {"chunks", "late", "lowered"}
    assert [one.model_dump(exclude=plain) for one in again] == [
        one.model_dump(exclude=plain) for one in found
    ]


@given(
    st.lists(st.integers(0, 30_000), max_size=60),
    st.integers(0, 40_000),
    st.integers(0, 40_000),
    st.integers(1, 30),
)
def test_what_is_kept_is_young_and_within_the_size(
    times: list[int], now: int, retention_s: int, rows: int
) -> None:
    newest = sorted(times, reverse=True)
    kept_from = rules.kept_from(now, retention_s, newest[rows] if len(newest) > rows else None)
    kept = list(times)
    slices = list(rules.slices(min(times, default=None), kept_from))
    for before in slices:
        going = [at for at in kept if at < before]
        # One transaction deletes at most an hour.
        assert not going or max(going) - min(going) < rules.SLICE_S
        kept = [at for at in kept if at >= before]
    assert len(kept) <= rows
    assert all(at >= now - retention_s for at in kept)
    # Nothing else is deleted: a row goes because of its age, or its step is where the number is exceeded.
    for at in Counter(times) - Counter(kept):
        assert at < now - retention_s or sum(other >= at for other in times) > rows


HEADERS = st.builds(
    ChunkHeader,
    session=st.sampled_from(["ses_1", "ses_2", "s-3"]),
    index=st.integers(0, 40),
    epoch=st.just(1),
    worker=st.sampled_from(["wk_1", "wk_2"]),
    control_seq=st.just(0),
    first_frame=st.just(0),
    frames=st.just(12),
    fps=st.just(16.0),
    width=st.just(64),
    height=st.just(64),
    codec=st.just("avc1.42c01e"),
    init_bytes=st.just(1),
    compute_s=st.floats(0, 1e6),
    slack_s=st.none() | st.floats(-5, 5),
    tier=st.none() | st.sampled_from(Tier),
    fidelity=st.none() | st.just(ChunkFidelity(steps=2, window_chunks=3)),
    published_at=st.floats(T0, T0 + 60.0),
)


@given(st.lists(HEADERS, max_size=30), st.integers(1, 30))
def test_chunks_survive_their_text_and_flushes_only_append(headers: list[ChunkHeader], every: int) -> None:
    flushed = []
    for first in range(0, len(headers), every):
        flushed += rows_of((header, T0 + 60.0) for header in headers[first : first + every])
    assert rows_of([]) == []
    rows = []
    for _, group in groupby(sorted(flushed, key=lambda r: (r.worker, r.at)), lambda r: (r.worker, r.at)):
        parts = list(group)
        assert parts[0].at % SAMPLE_S == 0
        rows.append(
            ChunkRow(
                parts[0].worker,
                parts[0].at,
                sum(part.chunks for part in parts),
                sum(part.late for part in parts),
                sum(part.lowered for part in parts),
                "".join(part.body for part in parts),
            )
        )
    found = [(row.worker, mark) for row in rows for mark in marks(row)]
    assert sum(row.chunks for row in rows) == len(headers)
    assert sum(row.late for row in rows) == sum(mark.late for _, mark in found)

    def known(header: ChunkHeader) -> tuple[Any, ...]:
        late = header.slack_s is not None and header.slack_s < 0
        return header.worker, header.session, header.index, late, header.fidelity is not None, header.tier

    read = Counter((worker, m.session, m.index, m.late, m.lowered, m.tier) for worker, m in found)
    assert read == Counter(map(known, headers))
    for row in rows:
        assert all(row.at <= mark.published_at < row.at + SAMPLE_S for mark in marks(row))


@given(st.lists(HEADERS, max_size=40, unique_by=lambda h: (h.session, h.index)), st.integers(1, 60))
def test_bars_have_every_chunk_once(headers: list[ChunkHeader], step_s: int) -> None:
    of_one = [(header.model_copy(update={"worker": "wk_1"}), T0 + 60.0) for header in headers]
    found = [mark for row in rows_of(of_one) for mark in marks(row)]
    each, steps = lanes(found, 0), lanes(found, step_s)
    assert sum(len(lane.bars) for lane in each) == len(headers)
    for one in (each, steps):
        bars = [bar for lane in one for bar in lane.bars]
        assert sum(bar.chunks for bar in bars) == len(headers)
        assert sum(bar.late for bar in bars) == sum(mark.late for mark in found)
        assert all(bar.began_at <= bar.ended_at for bar in bars)
    for lane in steps:
        ends = [rules.step_of(bar.ended_at, step_s) for bar in lane.bars]
        assert ends == sorted(set(ends))


def test_a_worker_with_a_wrong_clock_does_not_write_into_the_past() -> None:
    header = ChunkHeader(
        session="ses_1",
        index=0,
        epoch=1,
        worker="wk_1",
        control_seq=0,
        first_frame=0,
        frames=12,
        fps=16.0,
        width=64,
        height=64,
        codec="avc1.42c01e",
        init_bytes=1,
        published_at=1.0,
    )
    [row] = rows_of([(header, T0 + 3.0)])
    assert (row.at, marks(row)[0].published_at) == (T0, T0 + 3.0)
