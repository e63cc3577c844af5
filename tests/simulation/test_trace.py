"""The digest by which two runs are compared."""

from __future__ import annotations

from collections.abc import Callable

from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.trace import EventTrace

Act = Callable[[EventTrace, VirtualLoop], None]


def digest(*acts: Act, fixed_order: bool = True) -> str:
    loop = VirtualLoop(1)
    loop.fixed_order = fixed_order
    trace = EventTrace(loop)
    for act in acts:
        act(trace, loop)
    loop.close()
    return trace.digest


def later(_: EventTrace, loop: VirtualLoop) -> None:
    loop.advance(1.0)


def idle(_: EventTrace, loop: VirtualLoop) -> None:
    """Run a callback that has no result."""
    loop.call_soon(lambda: None)


def first(trace: EventTrace, _: VirtualLoop) -> None:
    trace.result("chunk.ses_1", b"first", 1)


def second(trace: EventTrace, _: VirtualLoop) -> None:
    trace.result("chunk.ses_2", b"second", 2)


def test_the_digest_covers_subject_contents_number_and_time_of_each_result() -> None:
    others: list[tuple[Act, ...]] = [
        (lambda trace, _: trace.result("chunk.ses_3", b"first", 1),),
        (lambda trace, _: trace.result("chunk.ses_1", b"other", 1),),
        (lambda trace, _: trace.result("chunk.ses_1", b"first", 2),),
        (later, first),
        (first, first),
    ]
    digests = {digest(*acts, later) for acts in others}
    assert len(digests) == len(others)
    assert digest(first, later) not in digests


def test_results_of_one_time_have_no_order_and_those_of_two_times_have_one() -> None:
    assert digest(first, second) == digest(second, first)
    assert digest(first, later, second) != digest(second, later, first)


def test_callbacks_without_a_result_count_only_where_each_draws_a_process() -> None:
    assert digest(idle, later, first) == digest(later, first)
    assert digest(idle, later, first, fixed_order=False) != digest(later, first, fixed_order=False)
