"""Which connections a server keeps, over any sequence of connections, requests and ends."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.connections import ConnectionLimits, ConnectionRefusal, ConnectionTable, contains

EXEMPT = (ip_network("127.0.0.0/8"),)
addresses = st.sampled_from(["192.0.2.1", "192.0.2.2", "127.0.0.1", "2001:db8::1", "2001:db8::2", "pipe"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), addresses),
        st.tuples(st.sampled_from(["serve", "wait", "idle", "close"]), st.integers(0, 40)),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(steps, st.integers(1, 6), st.integers(1, 4))
def test_limits_hold_and_only_who_waits_makes_room(
    steps: list[tuple[str, str | int]], total: int, per_address: int
) -> None:
    table = ConnectionTable(ConnectionLimits(total, per_address, EXEMPT))
    open_: dict[int, str] = {}
    waiting: list[int] = []  # Longest first.
    idle: set[int] = set()
    evicted: set[int] = set()
    for what, given_ in steps:
        if isinstance(given_, int):
            keys = sorted(open_)
            if not keys:
                continue
            key = keys[given_ % len(keys)]
            if what == "close":
                table.close(key)
                table.close(key)
                del open_[key]
                evicted.discard(key)
            elif what == "serve":
                table.serve(key)
            else:
                table.wait(key, idle=what == "idle")
            if key in waiting:
                waiting.remove(key)
            idle.discard(key)
            if what in ("wait", "idle") and key not in evicted:
                waiting.append(key)
                idle |= {key} if what == "idle" else set()
            continue
        group = "2001:db8::/64" if given_.startswith("2001") else given_
        admission = table.admit(given_)
        of_group = [key for key, known in open_.items() if known == group and key not in evicted]
        idle_of_group = [key for key in waiting if key in idle and open_[key] == group]
        if group != "127.0.0.1" and len(of_group) >= per_address and not idle_of_group:
            assert admission.refusal is ConnectionRefusal.ADDRESS
        elif group != "127.0.0.1" and len(of_group) >= per_address:
            assert admission.evicted == idle_of_group[0]
            evicted.add(idle_of_group[0])
            waiting.remove(idle_of_group[0])
            idle.discard(idle_of_group[0])
        elif len(open_) - len(evicted) >= total and not waiting:
            assert admission.refusal is ConnectionRefusal.TOTAL
        elif len(open_) - len(evicted) >= total:
            assert admission.evicted == waiting[0]
            idle.discard(waiting[0])
            evicted.add(waiting.pop(0))
        else:
            assert admission.evicted is None
            assert admission.refusal is None
        if admission.refusal is None:
            assert admission.key is not None
            assert admission.key not in open_
            open_[admission.key] = group
            waiting.append(admission.key)
        else:
            assert admission.key is admission.evicted is None
        assert len(table) == len(open_) - len(evicted) <= total


@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1", "127.9.9.9"])
def test_exempt_addresses_are_known_in_every_form(address: str) -> None:
    table = ConnectionTable(ConnectionLimits(10, 1, EXEMPT))
    assert [table.admit(address).refusal for _ in range(3)] == [None] * 3


def test_the_addresses_of_one_ipv6_network_are_one_host() -> None:
    table = ConnectionTable(ConnectionLimits(10, 1))
    assert table.admit("2001:db8::1%eth0").refusal is None
    assert table.admit("2001:db8::2").refusal is ConnectionRefusal.ADDRESS
    assert table.admit("2001:db8:0:1::2").refusal is None


def test_what_is_no_address_lies_in_no_network() -> None:
    assert not contains(EXEMPT, "unix")
    assert contains(EXEMPT, "127.1.2.3")
