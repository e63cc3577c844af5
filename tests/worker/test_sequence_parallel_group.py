"""The group of two on its own: exchanges of any tensors, deadlines, and the proof of the key."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from turboserve.worker.engine.errors import PartnerLostError
from turboserve.worker.sequence_parallel.group import GlooGroup, Group, NcclGroup

KEYS = bytes(32), bytes(31) + b"\1"
CONNECT_S = 30.0
T = TypeVar("T")


def both(call: Callable[[int], T]) -> list[T]:
    """Call for both ranks at once."""
    with ThreadPoolExecutor(2) as threads:
        return [done.result() for done in [threads.submit(call, rank) for rank in (0, 1)]]


def gloo_pair(limit_s: float = CONNECT_S) -> list[Group]:
    store = HashStore()
    return both(lambda rank: GlooGroup(store, rank, KEYS[0], "g", CONNECT_S, limit_s))


def check_exchanges(groups: list[Group], device: Callable[[int], torch.device]) -> None:
    shapes: list[list[tuple[int, ...]]] = [[(3, 5), (2,)], [(7, 2, 2)]]

    def content(rank: int) -> list[torch.Tensor]:
        dtypes = (torch.float32, torch.bfloat16)
        return [
            torch.arange(torch.Size(shape).numel(), device=device(rank)).to(dtype).view(shape) + rank
            for shape, dtype in zip(shapes[rank], dtypes, strict=False)
        ]

    def exchange(rank: int) -> list[torch.Tensor]:
        sent = content(rank)
        found = [torch.zeros_like(each, device=device(rank)) for each in content(1 - rank)]
        groups[rank](sent, found)
        # One direction may be empty.
        groups[rank](sent if rank else (), () if rank else [torch.zeros_like(each) for each in content(1)])
        return [each.cpu() for each in found]

    for rank, found in enumerate(both(exchange)):
        for one, other in zip(found, content(1 - rank), strict=True):
            assert torch.equal(one, other.cpu())
    assert groups[0].exchanges == groups[1].exchanges


def test_both_ends_exchange_tensors_of_any_shapes_and_types() -> None:
    check_exchanges(gloo_pair(), lambda rank: torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nccl needs two GPUs")
def test_two_gpus_exchange_over_nccl() -> None:
    store = HashStore()

    def group(rank: int) -> Group:
        torch.cuda.set_device(rank)
        return NcclGroup(store, rank, KEYS[0], "g", CONNECT_S, CONNECT_S, torch.device("cuda", rank))

    check_exchanges(both(group), lambda rank: torch.device("cuda", rank))


def test_an_end_without_the_key_is_refused() -> None:
    store = HashStore()

    def refused(rank: int) -> bool:
        with pytest.raises(PartnerLostError, match="is not the partner"):
            GlooGroup(store, rank, KEYS[rank], "g", CONNECT_S, CONNECT_S)
        return True

    assert both(refused) == [True, True]


def test_an_exchange_without_the_other_end_fails_at_the_deadline_and_closes_the_group() -> None:
    home, _donor = gloo_pair(limit_s=1.0)
    began = time.monotonic()
    with pytest.raises(PartnerLostError):
        home([torch.zeros(4)], [torch.zeros(4)])
    assert 0.9 < time.monotonic() - began < CONNECT_S
    assert home.closed
    with pytest.raises(PartnerLostError, match="closed"):
        home((), ())


def test_memory_grows_to_the_largest_exchange_only() -> None:
    groups = gloo_pair()

    def exchange(rank: int) -> list[int]:
        for size in (10, 1000, 10, 500, 1000):
            groups[rank]([torch.zeros(size)], [torch.zeros(size)])
        return [buffer.numel() for buffer in groups[rank]._buffers]

    assert both(exchange) == [[4096, 4096], [4096, 4096]]


def test_a_group_that_is_closed_while_an_exchange_is_packed_is_a_lost_partner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop's thread closes the group when the partner's connection ends."""
    home, _ = gloo_pair(limit_s=1.0)
    room = home._room

    def closing(place: int, parts: list[torch.Tensor]) -> torch.Tensor:
        home.close()
        return room(place, parts)

    monkeypatch.setattr(home, "_room", closing)
    with pytest.raises(PartnerLostError):
        home([torch.zeros(3)], [torch.zeros(3)])
