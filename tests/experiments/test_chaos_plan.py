"""The seed determines the plan, and the checks find the violations that they look for."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.cli.embedded import Layout
from turboserve.cli.stack.options import MODULES, Options
from turboserve.cli.stack.plan import Plan
from turboserve.experiments.chaos import small_disk, surroundings
from turboserve.experiments.chaos.degradations import (
    LINKS,
    SECOND,
    SECOND_LINKS,
    SECOND_SERVICE_LINKS,
    SERVICE_LINKS,
)
from turboserve.experiments.chaos.invariants import (
    INVARIANTS,
    Logged,
    Owned,
    Violations,
    check_capacity,
    check_log,
    check_oldest,
    check_skips,
    takeovers,
)
from turboserve.experiments.chaos.mechanisms import MechanismSet, settings_of
from turboserve.experiments.chaos.network_proxy import UNDISTURBED, NetworkConditions
from turboserve.experiments.chaos.plan import (
    AFTERWARDS_S,
    FREEZES,
    LONGEST_STOP_S,
    REDUNDANT,
    SERVERS,
    SERVICES,
    WORKER,
    FaultGroup,
    FaultKind,
    decode_worker_names,
    plan,
)
from turboserve.experiments.chaos.process_faults import IdleSockets
from turboserve.experiments.chaos.stack_network import StackNetwork
from turboserve.experiments.chaos.user_actions import SHIPPED_ACTIONS, UserActionKind
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.state_store.settings import Settings as StoreSettings
from turboserve.worker.settings import Settings as WorkerSettings

MANY = [plan(seed, 300.0, sessions=3, schedulers=2, gap_s=6.0) for seed in range(60)]


def test_decode_workers_are_hit_like_workers(tmp_path: Path) -> None:
    decoders = decode_worker_names(2)
    assert decoders == ("decode-worker", "decode-worker-2")
    plans = [plan(seed, 300.0, 3, 2, 6.0, decoders=decoders) for seed in range(20)]
    faults = [fault for one in plans for fault in one.faults if fault.target in decoders]
    kinds = Counter((fault.target, fault.kind) for fault in faults)
    assert set(kinds) == {(name, kind) for name in decoders for kind in (FaultKind.KILL, FaultKind.STOP)}
    assert max(fault.seconds for fault in faults) > LONGEST_STOP_S
    # Names of a stack's processes.
    layout = Layout(tmp_path / "data")
    layout.create()
    stack = Plan(Options(layout.data, decode_workers=2), layout)
    assert stack.decode_pool.names == list(decoders)


def test_the_same_seed_plans_the_same_and_another_does_not() -> None:
    assert plan(7, 300.0, 3, 2, 6.0) == MANY[7]
    assert len({(one.faults, one.actions) for one in MANY}) == len(MANY)


def test_everything_is_hit_in_every_way_and_within_the_time() -> None:
    faults = [fault for one in MANY for fault in one.faults]
    assert all(0 < fault.at_s < 300.0 for fault in faults)
    hit = Counter((fault.target, fault.kind) for fault in faults)
    for target in (*SERVICES, "scheduler-2", WORKER, *SERVERS):
        assert hit[target, FaultKind.KILL] > 0
        assert hit[target, FaultKind.STOP] > 0
        assert (hit[target, FaultKind.RESTART] > 0) == (target in SERVERS)
    # Some workers are stopped for longer than it takes to give their sessions to others.
    assert max(fault.seconds for fault in faults if fault.target == WORKER) > 15.0
    actions = Counter((action.session, action.kind) for one in MANY for action in one.actions)
    assert set(actions) == {(session, kind) for session in range(3) for kind in SHIPPED_ACTIONS}


def test_limits_add_actions_and_change_nothing_else() -> None:
    for seed, shipped in enumerate(MANY[:5]):
        more = plan(seed, 300.0, sessions=3, schedulers=2, gap_s=6.0, limits=True)
        assert more.faults == shipped.faults
        assert [one for one in more.actions if one.kind in SHIPPED_ACTIONS] == list(shipped.actions)
        assert {one.kind for one in more.actions} == set(UserActionKind)


def test_all_mechanisms_are_on_by_settings_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings_of(MechanismSet.SHIPPED, tmp_path) == {}
    chosen = settings_of(MechanismSet.ALL, tmp_path)
    shipped = [kind() for kind in (AutoscalerSettings, SchedulerSettings, StoreSettings, WorkerSettings)]
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    changed = set()
    for before in shipped:
        values = type(before)().model_dump()
        changed |= {name for name, value in before.model_dump().items() if values[name] != value}
    assert changed == {name.removeprefix("TURBOSERVE_").lower() for name in chosen}


@pytest.mark.parametrize(
    ("skips", "violations"), [([], 0), ([(3, 3), (9, 9)], 0), ([(3, 4)], 1), ([(3, 3), (3, 3)], 1)]
)
def test_a_skip_names_the_chunk_that_follows_and_comes_once(
    skips: list[tuple[int, int]], violations: int
) -> None:
    found = Violations()
    check_skips("s", skips, found)
    assert found.counts["client_sees_prefix"] == violations


ALL_GROUPS = tuple(FaultGroup)
LASTING = [
    plan(seed, 900.0, sessions=3, schedulers=2, gap_s=6.0, groups=ALL_GROUPS[1:]) for seed in range(40)
]


def test_faults_with_an_end_of_their_own_come_one_after_the_other_and_all_of_them_come() -> None:
    for one in LASTING:
        assert {fault.kind.value for fault in one.faults} == {group.value for group in ALL_GROUPS[1:]}
        for before, after in itertools.pairwise(one.faults):
            assert after.at_s > before.at_s + before.seconds + AFTERWARDS_S
        assert one.faults[-1].at_s < 900.0
    steps = {fault.step_s for one in LASTING for fault in one.faults if fault.kind is FaultKind.CLOCK_STEP}
    assert steps == {3600.0, -3600.0}
    # The supervisor replaces a frozen broker. Some faults last longer than that takes.
    assert max(f.seconds for one in LASTING for f in one.faults if f.kind is FaultKind.BROKER_FROZEN) > 100.0


def test_every_pair_of_processes_freezes_that_another_process_can_stand_in_for() -> None:
    [one, two] = FREEZES.values()
    assert set(one) == {name for names in REDUNDANT.values() for name in names}
    service = {name: service for service, names in REDUNDANT.items() for name in names}
    pairs = [tuple(target.split("+")) for target in two]
    assert len(set(pairs)) == len(pairs)
    assert ("worker", "worker") in pairs
    assert all(service[a] != service[b] or a == b == "worker" for a, b in pairs)
    drawn = plan(1, 3_000.0, 3, 2, 2.0, [FaultGroup.TWO_FROZEN])
    assert {fault.target for fault in drawn.faults} == set(two)
    assert {fault.seconds for fault in drawn.faults} == {20.0}
    # After a pause, a session waits for a slot: that is no stall of a freeze.
    assert {action.kind for action in drawn.actions} == {UserActionKind.PROMPT, UserActionKind.CUT}


def test_redundancy_adds_every_second_process_and_its_connections() -> None:
    groups = [FaultGroup.PROCESS, FaultGroup.SLOW_NETWORK, FaultGroup.BEHIND]
    plans = [plan(seed, 900.0, 3, 2, 3.0, groups, redundancy=True) for seed in range(60)]
    hit: dict[FaultKind, set[str]] = {}
    for fault in (fault for one in plans for fault in one.faults):
        hit.setdefault(fault.kind, set()).add(fault.target.partition(" ")[0])
    second = {name for names in REDUNDANT.values() for name in names[1:] if name != WORKER}
    assert second <= hit[FaultKind.KILL]
    assert {"nats", "nats-2", "nats-3", "redis", "postgres"} == hit[FaultKind.RESTART]
    assert hit[FaultKind.SLOW_NETWORK] == {*LINKS, *SECOND_LINKS}
    assert hit[FaultKind.BEHIND] == {*SERVICE_LINKS, *SECOND_SERVICE_LINKS}
    assert {f"{service}-2" for service in SECOND} == {name for name in second if "nats" not in name}


def test_the_processes_of_a_redundant_stack_reach_each_server_through_a_proxy(tmp_path: Path) -> None:
    with StackNetwork(tmp_path / "data", redundancy=True) as network:
        command = network.prefixes["state-store-2"]
        variables = dict(word.split("=", 1) for word in command[1:])
        urls = variables["TURBOSERVE_NATS_URL"].split(",")
        proxies = [network[f"state-store-2-nats.{number}"] for number in range(3)]
        assert [urlsplit(url).port for url in urls] == [proxy.port for proxy in proxies]
        network.degrade("state-store-2-nats", NetworkConditions(delay_s=1.0))
        assert {proxy.conditions.delay_s for proxy in proxies} == {1.0}
        assert network["state-store-nats.0"].conditions == UNDISTURBED
        assert set(network.prefixes) == {*MODULES, *(f"{service}-2" for service in SECOND)}
        viewers = network.serve_viewers_of(["http://127.0.0.1:1", "http://127.0.0.1:2"])
        assert [urlsplit(url).port for url in viewers] == [
            network["viewers.0"].port,
            network["viewers-2.1"].port,
        ]


def test_faults_of_processes_may_be_among_them() -> None:
    mixed = [plan(seed, 900.0, 3, 2, 6.0, ALL_GROUPS) for seed in range(20)]
    process_faults = {fault.kind for one in mixed for fault in one.faults}
    assert process_faults == set(FaultKind)
    for one in mixed:
        for before, after in itertools.pairwise(one.faults):
            assert not before.lasts or after.at_s > before.at_s + before.seconds + AFTERWARDS_S


def test_what_this_machine_cannot_do_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(surroundings, "faketime_library", lambda: None)
    monkeypatch.setattr(small_disk, "why_not", lambda: "mounting needs root")
    monkeypatch.setenv("PATH", str(tmp_path))
    reasons = surroundings.left_out(ALL_GROUPS)
    assert set(reasons) == {FaultGroup.DISK_FULL, FaultGroup.DESCRIPTORS, FaultGroup.CLOCK_STEP}
    assert "root" in reasons[FaultGroup.DISK_FULL]
    assert "libfaketime" in reasons[FaultGroup.CLOCK_STEP]


@pytest.mark.skipif(small_disk.why_not() is not None, reason=str(small_disk.why_not()))
def test_a_small_disk_is_full_until_it_is_freed(tmp_path: Path) -> None:
    with small_disk.SmallDisk(tmp_path / "disk", 2**20) as disk:
        disk.fill()
        with pytest.raises(OSError, match="No space left"), (disk.path / "more").open("wb") as file:
            file.write(b"x")
        disk.free()
        (disk.path / "more").write_bytes(b"x" * 4096)
    assert not (disk.path / "more").exists(), "it is unmounted"


async def test_idle_sockets_take_every_descriptor_that_a_server_has_and_give_them_back() -> None:
    taken = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        taken += 1
        await reader.read()
        taken -= 1
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        attack = asyncio.create_task(IdleSockets(server.sockets[0].getsockname()[1], 40).hold(60.0))
        while taken < 40:
            await asyncio.sleep(0.01)
        attack.cancel()
        while taken:
            await asyncio.sleep(0.01)


GOOD: list[Owned | Logged] = [
    Owned(1, 1, "a"),
    Logged(2, 0, 1, "a", "x"),
    Logged(3, 1, 1, "a", "y"),
    Owned(4, 2, "b"),
    Logged(5, 2, 2, "b", "z"),
]


def test_a_log_that_is_as_it_should_be_has_no_violation() -> None:
    found = Violations()
    for seen in ([], [(0, "x")], [(0, "x"), (1, "y"), (2, "z")]):
        check_log("s", GOOD, seen, found)
    assert dict(found.counts) == dict.fromkeys(INVARIANTS, 0)


@pytest.mark.parametrize(
    ("entries", "seen", "broken"),
    [
        ([*GOOD, Logged(6, 4, 2, "b", "w")], [], "chunks_contiguous"),
        ([*GOOD, Logged(6, 2, 2, "b", "w")], [], "chunks_contiguous"),
        ([*GOOD, Logged(6, 3, 1, "a", "w")], [], "one_executor"),
        ([*GOOD, Logged(6, 3, 2, "a", "w")], [], "one_executor"),
        ([Logged(1, 0, 1, "a", "x")], [], "one_executor"),
        ([*GOOD, Owned(6, 2, "c")], [], "epochs_increase"),
        (GOOD, [(1, "y")], "client_sees_prefix"),
        (GOOD, [(0, "x"), (1, "other")], "client_sees_prefix"),
        (GOOD[:2], [(0, "x"), (1, "y")], "client_sees_prefix"),
    ],
)
def test_what_is_wrong_in_a_log_is_found(
    entries: list[Owned | Logged], seen: list[tuple[int, str]], broken: str
) -> None:
    found = Violations()
    check_log("s", entries, seen, found)
    assert {name for name, count in found.counts.items() if count} == {broken}
    assert found.messages[0].startswith(f"{broken}: s: ")


@pytest.mark.parametrize(
    ("entries", "seen", "broken"),
    [
        (GOOD[3:], [(0, "x"), (1, "y"), (2, "z")], set()),
        (GOOD[3:], [(0, "x"), (1, "y")], set()),
        (GOOD[3:], [(0, "x"), (1, "y"), (2, "other")], {"client_sees_prefix"}),
        (GOOD[3:], [(0, "x"), (2, "z")], {"client_sees_prefix"}),
        (GOOD[3:], [(0, "x"), (1, "y"), (2, "z"), (3, "w")], {"client_sees_prefix"}),
        (GOOD[3:], [(0, "x")], {"client_sees_prefix"}),
        ([*GOOD[3:], Logged(6, 4, 2, "b", "w")], [(0, "x"), (1, "y")], {"chunks_contiguous"}),
        (GOOD[4:], [(0, "x"), (1, "y")], {"one_executor"}),
        # Another chunk was removed after the disk had room again, or reappeared.
        ([GOOD[3], Logged(6, 3, 2, "b", "w")], [(0, "x"), (1, "y")], {"chunks_contiguous"}),
        (GOOD, [(0, "x"), (1, "y")], {"chunks_contiguous"}),
    ],
)
def test_oldest_chunks_that_made_room_on_a_full_disk_are_not_missed(
    entries: list[Owned | Logged], seen: list[tuple[int, str]], broken: set[str]
) -> None:
    found = Violations()
    check_log("s", entries, seen, found, first=2)
    assert {name for name, count in found.counts.items() if count} == broken


def test_chunks_that_no_full_disk_explains_are_missed() -> None:
    found = Violations()
    check_log("s", GOOD[3:], [(0, "x"), (1, "y")], found)
    assert found.counts["chunks_contiguous"]


@pytest.mark.parametrize(
    ("oldest", "allowed", "missing"),
    [
        ({"s": 0, "t": 0}, {}, []),
        ({"s": 5, "t": 0}, {"s": 5}, []),
        # A session without chunks is not in the log.
        ({"t": 0}, {"s": 5}, []),
        ({"s": 1, "t": 0}, {}, ["s"]),
        ({"s": 6, "t": 2}, {"s": 5}, ["s", "t"]),
    ],
)
def test_chunks_that_go_before_a_disk_is_full_are_missed(
    oldest: dict[str, int], allowed: dict[str, int], missing: list[str]
) -> None:
    found = Violations()
    check_oldest(oldest, allowed, "at first", found)
    assert found.counts["chunks_contiguous"] == len(missing)
    assert [message.split(": ")[1] for message in found.messages] == missing


def test_reservations_count_against_capacity() -> None:
    found = Violations()
    full = {"id": "w", "phase": "ready", "capacity": 4, "sessions": 3, "incoming": 1}
    check_capacity([full, {**full, "phase": "gone", "capacity": 0}], found)
    assert found.counts["capacity"] == 0
    check_capacity([{**full, "incoming": 2}], found)
    assert found.counts["capacity"] == 1
    check_capacity([{**full, "incoming": 2, "floor_capacity": 5}], found)
    assert found.counts["capacity"] == 1, "it absorbs a burst"


def test_a_takeover_counts_from_the_new_owner_to_its_first_chunk_after_a_death() -> None:
    log: list[Owned | Logged] = [
        Owned(1, 1, "a", at=0.0),
        Logged(2, 0, 1, "a", "x", at=1.0),
        # Moved: the log was not silent.
        Owned(3, 2, "b", at=1.5),
        Logged(4, 1, 2, "b", "y", at=2.0),
        # Resumed where it was.
        Owned(5, 3, "b", at=20.0),
        Logged(6, 2, 3, "b", "z", at=21.0),
        # Its worker died.
        Owned(7, 4, "c", at=33.0),
        Logged(8, 3, 4, "c", "v", at=34.5),
        # Ended.
        Owned(9, 5, None, at=60.0),
    ]
    assert takeovers(log, silence_s=8.0) == [1.5]
