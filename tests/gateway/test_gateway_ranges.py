"""Which bytes a request for a range gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboserve.gateway.recordings.ranges import ByteRange, RangeNotSatisfiableError, is_known, requested

ETAG = '"a1"'


@given(start=st.integers(0, 120), end=st.integers(0, 120), size=st.integers(1, 100))
def test_a_range_is_what_it_says(start: int, end: int, size: int) -> None:
    header = f"bytes={start}-{end}"
    if end < start:
        assert requested(header, size) is None
    elif start >= size:
        with pytest.raises(RangeNotSatisfiableError) as refused:
            requested(header, size)
        assert (refused.value.status, refused.value.limit) == (416, size)
    else:
        assert requested(header, size) == ByteRange(start, min(end + 1, size))


@given(length=st.integers(1, 200), size=st.integers(1, 100))
def test_a_suffix_is_the_end(length: int, size: int) -> None:
    assert requested(f"bytes=-{length}", size) == ByteRange(max(0, size - length), size)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "bytes",
        "bytes=",
        "bytes=-",
        "bytes=a-b",
        "items=0-1",
        "bytes=0-1,3-4",
        "bytes=--1",
        "bytes=1",
    ],
)
def test_what_is_no_single_range_gets_everything(header: str | None) -> None:
    assert requested(header, 10) is None


def test_open_ends_and_empty_videos() -> None:
    assert requested("bytes=4-", 10) == ByteRange(4, 10)
    for header in ("bytes=0-", "bytes=-5"):
        with pytest.raises(RangeNotSatisfiableError):
            requested(header, 0)
    with pytest.raises(RangeNotSatisfiableError):
        requested("bytes=-0", 10)


def test_a_range_of_another_version_gets_everything() -> None:
    assert requested("bytes=1-2", 10, ETAG, ETAG) == ByteRange(1, 3)
    assert requested("bytes=1-2", 10, '"b2"', ETAG) is None


@pytest.mark.parametrize(
    ("header", "known"), [(None, False), (ETAG, True), (f'"x", W/{ETAG}', True), ("*", True), ('"x"', False)]
)
def test_what_the_client_has_is_not_sent_again(header: str | None, known: bool) -> None:
    assert is_known(header, ETAG) is known
