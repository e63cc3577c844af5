"""Weights between workers over real connections and links: sources that die, lie, refuse or lack slack."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
from pydantic import SecretStr
from torch import Tensor, nn

from turboserve.contracts.weights import WeightHolder, WeightKey
from turboserve.worker.model import weight_manifest, weights
from turboserve.worker.model.weight_manifest import WeightManifest
from turboserve.worker.model.weights import manifest_of, named_weights
from turboserve.worker.replicas.weight_filler import WeightsUnavailableError
from turboserve.worker.service.weights import WeightServer
from turboserve.worker.transfer.channel import Channel
from turboserve.worker.transfer.errors import DeadlineExceededError
from turboserve.worker.transfer.frames import Frame
from turboserve.worker.transfer.interface import Interface
from turboserve.worker.transfer.link import Link
from turboserve.worker.transfer.network import SocketNetwork
from turboserve.worker.transfer.pace import CopyLimits
from turboserve.worker.transfer.source import Source
from turboserve.worker.weight_transfer import source_connection, weight_receiver, weight_source
from turboserve.worker.weight_transfer.plan_messages import PlanLimits
from turboserve.worker.weight_transfer.source_connection import ANSWER_S, SourceConnection
from turboserve.worker.weight_transfer.weight_receiver import WeightGrant, WeightReceiver
from turboserve.worker.weight_transfer.weight_source import WeightSource

KEY = "ab" * 32
GRANT = "wgt_one"
RECEIVER = "wrk_new"
PATIENCE_S = 120.0


def networks(seed: int) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    large = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 33, bias=False).bfloat16())
    return {"large": large, "small": nn.Linear(3, 2)}


class NoStates:
    """A worker without sessions, as its source sees it."""

    def key(self, session: str, migration: int) -> bytes | None:
        return None

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@dataclass
class Holder:
    """A worker that sends weights."""

    name: str
    network: SocketNetwork
    weights: dict[str, nn.Module]
    source: WeightSource
    holder: WeightHolder
    slack: list[bool] = field(default_factory=lambda: [True])

    def tensor(self, name: str) -> Tensor:
        return named_weights(self.weights)[name]


MakeHolder = Callable[..., Any]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the weights have many shards."""
    for module in (weights, source_connection):
        monkeypatch.setattr(module, "PIECE_BYTES", 1 << 10)
    shards = WeightManifest.shards
    monkeypatch.setattr(WeightManifest, "shards", lambda self: shards(self, 2 << 10))
    monkeypatch.setattr(weight_source, "RETRY_S", 0.05)
    # A step of a busy machine may take seconds: no test waits for the end of these limits.
    monkeypatch.setattr(weight_source, "FIRST_FRAME_S", PATIENCE_S)
    monkeypatch.setattr(source_connection, "CONNECT_S", PATIENCE_S)
    monkeypatch.setattr(source_connection, "ANSWER_S", PATIENCE_S)
    assert weight_manifest.SHARD_BYTES > 2 << 10
    for variable in ("NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES"):
        monkeypatch.setenv(variable, "lo")


@pytest.fixture
async def hold() -> AsyncIterator[MakeHolder]:
    networks_made: list[SocketNetwork] = []
    sources: list[Source] = []

    async def make(name: str, seed: int = 1, backends: Sequence[str] = ("gloo",), key: str = KEY) -> Holder:
        device = torch.device("cpu")
        network = SocketNetwork(Interface(), 0, backends, device, "model")
        held = networks(seed)
        manifest, slack = manifest_of(held, "details"), [True]
        source = WeightSource(manifest, named_weights(held), network.links, lambda: slack[0])
        server = WeightServer(source, lambda: 0.0)
        await server.granted(WeightKey(worker=name, receiver=RECEIVER, grant=GRANT, key=SecretStr(key)), b"")
        serving = Source(NoStates(), network.links, CopyLimits())
        serving.side_transfers = server
        address = await network.listen(serving.serve)
        networks_made.append(network)
        sources.append(serving)
        holder = WeightHolder(worker=name, addresses=(address,), host=name)
        return Holder(name, network, held, source, holder, slack)

    yield make
    for network, source in zip(networks_made, sources, strict=True):
        network.close()
        source.close()
        network.links.close()


async def receive(
    holders: Sequence[Holder],
    *,
    digest: str | None = None,
    into: dict[str, nn.Module] | None = None,
    backends: Sequence[str] = ("gloo",),
    details: str = "details",
) -> tuple[WeightReceiver, dict[str, nn.Module]]:
    network = SocketNetwork(Interface(), 0, backends, torch.device("cpu"), "model")
    grant = WeightGrant(GRANT, bytes.fromhex(KEY), [one.holder for one in holders])
    receiver = WeightReceiver(RECEIVER, grant, "here", network.links, network.connect)
    empty = networks(99) if into is None else into
    wanted = manifest_of(networks(1), "details").digest if digest is None else digest
    try:
        await receiver.fill(empty, details, wanted)
    finally:
        network.links.close()
    return receiver, empty


def equal(one: dict[str, nn.Module], other: dict[str, nn.Module]) -> bool:
    return manifest_of(one).digest == manifest_of(other).digest


def send_at_one_pace(monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    """Let no source send its next shard before the other has sent its last one, while shards are left.

    On a busy machine one source may be much slower than the other.
    """
    sends, changed = WeightSource._send, asyncio.Condition()
    asked, sent = Counter[WeightSource](), Counter[WeightSource]()

    async def in_turn(self: WeightSource, channel: Any, link: Any, shard: Any) -> None:
        async with changed:
            asked[self] += 1
            changed.notify_all()
            mine = asked[self]
            await changed.wait_for(lambda: asked.total() >= shards or sent.total() - sent[self] >= mine - 1)
        await sends(self, channel, link, shard)
        async with changed:
            sent[self] += 1
            changed.notify_all()

    monkeypatch.setattr(WeightSource, "_send", in_turn)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
async def test_weights_come_from_all_holders_bit_for_bit(
    hold: MakeHolder, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    holders = [await hold(name, backends=(backend,)) for name in ("a", "b")]
    send_at_one_pace(monkeypatch, len(manifest_of(networks(1)).shards()))
    receiver, got = await receive(holders, backends=(backend,))
    assert equal(got, networks(1))
    assert set(receiver.received_bytes) == {"a", "b"}
    assert sum(receiver.received_bytes.values()) == manifest_of(got).size
    # Each shard was sent once, and neither source has sent nearly everything.
    assert sum(one.source.sent_bytes for one in holders) == manifest_of(got).size
    assert max(one.source.sent_bytes for one in holders) < 0.8 * manifest_of(got).size


async def test_a_holder_with_changed_bytes_is_passed_over(hold: MakeHolder) -> None:
    good, bad = await hold("a"), await hold("b")
    # After the manifest was made.
    with torch.no_grad():
        bad.tensor("large.0.weight").view(-1)[5] += 1.0
    _, got = await receive([good, bad])
    assert equal(got, networks(1))
    with pytest.raises(WeightsUnavailableError, match="no worker sends shard"):
        await receive([bad])


async def test_a_manifest_with_other_pieces_spoils_no_other_holder(
    hold: MakeHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = await hold("a"), await hold("b")
    # As many pieces, so that the digests fit.
    monkeypatch.setattr(bad.source, "_manifest", replace(bad.source._manifest, piece_bytes=(1 << 10) + 1))
    receiver, got = await receive([bad, good])
    assert equal(got, networks(1))
    assert set(receiver.received_bytes) == {"b"}


async def test_a_holder_that_divides_its_weights_otherwise_is_passed_over(
    hold: MakeHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: gloo ended the receiving process, because a shard had another length than its memory."""
    bad, good = await hold("a"), await hold("b")
    pieces = [shard.pieces for shard in bad.source._shards]
    # As many shards, each with the pieces of its neighbor.
    others = [replace(shard, pieces=pieces[shard.number - 1]) for shard in bad.source._shards]
    assert any(one.size != other.size for one, other in zip(bad.source._shards, others, strict=True))
    monkeypatch.setattr(bad.source, "_shards", tuple(others))
    receiver, got = await receive([bad, good])
    assert equal(got, networks(1))
    assert receiver.received_bytes["b"] == manifest_of(got).size


async def test_a_holder_that_dies_costs_only_what_it_still_had_to_send(
    hold: MakeHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays, dies = await hold("a"), await hold("b")
    sends = WeightSource._send

    async def until_the_second(self: WeightSource, channel: Any, link: Any, shard: Any) -> None:
        if self is dies.source and self.sent_bytes:
            channel.abort()
        await sends(self, channel, link, shard)

    monkeypatch.setattr(WeightSource, "_send", until_the_second)
    receiver, got = await receive([stays, dies])
    assert equal(got, networks(1))
    assert 0 < receiver.received_bytes["b"] < receiver.received_bytes["a"]


async def test_a_holder_without_slack_sends_later(hold: MakeHolder) -> None:
    one = await hold("a")
    one.slack[0] = False
    receiving = asyncio.create_task(receive([one]))
    await asyncio.sleep(0.3)
    assert not one.source.sent_bytes
    one.slack[0] = True
    _, got = await receiving
    assert equal(got, networks(1))


async def test_who_has_no_key_or_other_weights_or_is_not_there_sends_nothing(hold: MakeHolder) -> None:
    other_key, other_weights = await hold("a", key="cd" * 32), await hold("b", seed=2)
    gone = await hold("c")
    gone.network.close()
    with pytest.raises(WeightsUnavailableError, match="of 3 that were asked"):
        await receive([other_key, other_weights, gone])
    assert not any(one.source.sent_bytes for one in (other_key, other_weights, gone))
    _, got = await receive([other_key, other_weights, gone, await hold("d")])
    assert equal(got, networks(1))


async def test_weights_of_another_layout_are_not_taken(hold: MakeHolder) -> None:
    one = await hold("a")
    wrong = networks(1) | {"small": nn.Linear(2, 3)}
    with pytest.raises(WeightsUnavailableError, match=r"tensor small.bias: \('torch.float32', \(2,\)\)"):
        await receive([one], into=wrong)
    with pytest.raises(WeightsUnavailableError, match="details"):
        await receive([one], details="other")
    assert not one.source.sent_bytes


async def test_an_unexpected_error_of_a_fetch_costs_its_source_alone(
    hold: MakeHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: the plan waited for ever for the end of a fetch whose task had raised."""
    good, bad = await hold("a"), await hold("b")
    fetch = SourceConnection.fetch

    async def raises(self: SourceConnection, shard: int, parts: Sequence[Tensor]) -> None:
        if self.host == "b":
            raise KeyError("a bug")
        await fetch(self, shard, parts)

    monkeypatch.setattr(SourceConnection, "fetch", raises)
    async with asyncio.timeout(PATIENCE_S):
        receiver, got = await receive([good, bad])
        with pytest.raises(WeightsUnavailableError, match="no worker sends shard"):
            await receive([bad])
    assert equal(got, networks(1))
    assert set(receiver.received_bytes) == {"a"}


async def test_a_fill_that_fails_has_ended_all_that_write_to_the_weights(
    hold: MakeHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = list[int](), list[int]()

    async def writes_on(self: SourceConnection, shard: int, parts: Sequence[Tensor]) -> None:
        begun.append(shard)
        try:
            await asyncio.Event().wait()
        finally:
            # As a thread that notices an abort late.
            await asyncio.sleep(0.2)
            ended.append(shard)

    monkeypatch.setattr(SourceConnection, "fetch", writes_on)
    monkeypatch.setattr(weight_receiver, "TICK_S", 0.02)
    limits = PlanLimits(sends=1, receives=2, wait_s=0.1, least_bytes_per_s=1e12)
    monkeypatch.setattr(weight_receiver, "LIMITS", limits)
    with pytest.raises(WeightsUnavailableError, match="no worker sends shard"):
        await receive([await hold("a"), await hold("b")])
    assert len(begun) == 2
    assert sorted(ended) == sorted(begun)


async def test_a_holder_that_falls_silent_costs_the_time_of_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_connection, "ANSWER_S", ANSWER_S)
    waited = list[float]()

    class Silent:
        async def send(self, frame: Frame, seconds: float) -> None:
            pass

        async def receive(self, seconds: float) -> Frame:
            waited.append(seconds)
            raise DeadlineExceededError("no message")

    links = SocketNetwork(Interface(), 0, (), torch.device("cpu"), "model").links
    connection = SourceConnection("there", cast(Channel, Silent()), cast(Link, None), links)
    with pytest.raises(DeadlineExceededError):
        await connection.fetch(0, [])
    assert waited == [ANSWER_S]
    links.close()


async def test_the_libraries_of_a_worker_that_only_connects_are_confined_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Incident: a worker that first got weights from others started NCCL and UCX on all interfaces."""
    for variable in ("NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES"):
        monkeypatch.delenv(variable)
    SocketNetwork(Interface(), 0, ("gloo",), torch.device("cpu"), "model").links.close()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    assert os.environ["UCX_NET_DEVICES"].split(",")[0] == "lo"
