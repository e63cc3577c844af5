"""Weights in the worker's shell: what a start without them leaves and reports, and when others get them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.worker.copied_weights import Copied
from turboserve.clock import SystemClock
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.playout import Playout
from turboserve.worker.model.presets import SHIPPED
from turboserve.worker.model.weight_manifest import WeightManifest
from turboserve.worker.model.weights import manifest_of, named_weights
from turboserve.worker.replicas import models as registry
from turboserve.worker.replicas.toyworld import load_toyworld
from turboserve.worker.replicas.weight_filler import WeightsUnavailableError
from turboserve.worker.service import host_platform
from turboserve.worker.service.host_platform import HostPlatform
from turboserve.worker.service.models import load_filled
from turboserve.worker.service.ports import StoredWeights
from turboserve.worker.service.quality import SlackBoard, SlackMeasured
from turboserve.worker.service.weights import least_credit_s, send_weights
from turboserve.worker.settings import Settings

MODEL = "toyworld-small"


@pytest.fixture(scope="module")
def models() -> Models:
    return load_toyworld(path=SHIPPED[MODEL])


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Only explicit collections."""
    gc.disable()
    yield
    gc.enable()


class Bus:
    """Notes subscriptions."""

    def __init__(self) -> None:
        self.subscribed: list[Any] = []

    async def subscribe(self, _subject: object, name: str, _handler: object) -> None:
        self.subscribed.append(name)


def worker(lead_s: float = 3.0) -> Any:
    pacing = SimpleNamespace(lead=lambda wanted_s: max(wanted_s, 0.75))
    return SimpleNamespace(
        id="wrk_a",
        slack=SlackBoard(),
        migrations=SimpleNamespace(links=None, source=SimpleNamespace(side_transfers=None)),
        table=SimpleNamespace(
            entries={
                "own": SimpleNamespace(record=SimpleNamespace(max_lead_s=lead_s)),
                "default": SimpleNamespace(record=SimpleNamespace(max_lead_s=None)),
            }
        ),
        engine=SimpleNamespace(options=SimpleNamespace(max_lead_s=6.0), pacing=pacing),
    )


async def has_slack(one: Any, weights: StoredWeights, session: str, credit_s: float) -> bool:
    bus: Any = Bus()
    await send_weights(one, weights, bus, lambda: 0.0)
    assert bus.subscribed == [one.id]
    one.slack.measured(SlackMeasured(0.0, {session: (1, Playout(credit_s, 0.0, 0.0))}, True))
    found: bool = one.migrations.source.side_transfers._source._has_slack()
    return found


async def test_a_session_with_the_shortest_lead_can_have_the_credit_for_a_shard(models: Models) -> None:
    """Incident: a second of credit was asked of sessions with a lead of 0.75 s, which never have it."""
    assert models.manifest is not None
    weights = StoredWeights(models.manifest, named_weights(models.networks))
    assert await has_slack(worker(0.75), weights, "own", 0.26)
    assert not await has_slack(worker(0.75), weights, "own", 0.24)
    # A session's lead is at least a chunk.
    assert not await has_slack(worker(0.1), weights, "own", 0.24)
    assert await has_slack(worker(), weights, "default", 1.01)
    assert not await has_slack(worker(), weights, "default", 0.99)
    assert [least_credit_s(lead_s) for lead_s in (0.3, 3.0, 60.0)] == pytest.approx([0.1, 1.0, 1.0])


async def test_weights_of_a_type_that_is_not_known_are_kept_by_a_worker_that_serves() -> None:
    """Incident: the error ended a worker that was ready."""
    network = nn.ParameterDict({"phase": nn.Parameter(torch.zeros(3, dtype=torch.complex64))})
    networks: dict[str, nn.Module] = {"net": network}
    bus: Any = Bus()
    one = worker()
    await send_weights(one, StoredWeights(manifest_of(networks), named_weights(networks)), bus, lambda: 0.0)
    assert one.migrations.source.side_transfers is None
    assert not bus.subscribed


@pytest.mark.usefixtures("no_collection")
def test_networks_that_were_not_filled_are_gone_before_the_files_are_read() -> None:
    """Incident: the frames of the error held them, so that the model was in memory twice."""
    held: list[weakref.ref[nn.Module]] = []

    class Fails:
        def fill(self, networks: Mapping[str, nn.Module], details: str) -> WeightManifest:
            held.extend(map(weakref.ref, networks.values()))
            # This frame and the error hold each other, as do those of a transfer.
            failed = WeightsUnavailableError("none")
            raise failed

    assert load_filled(Settings(model=MODEL), Fails()) is None
    assert held
    assert not any(reference() is not None for reference in held)


async def test_weights_come_from_workers_only_where_the_model_has_asked_for_them(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.MODELS._built_in, "ignores", lambda _: models)
    for name in ("make_engine", "switch_prompts", "measure"):
        monkeypatch.setattr(host_platform, name, lambda *_: None)
    monkeypatch.setattr(host_platform, "without_decoding", nullcontext)
    for name, from_peers in (("ignores", False), (MODEL, True)):
        platform = HostPlatform(Settings(model=name, device="cpu"), SystemClock(), lambda _: models)
        start = (await platform.load(Copied(models))).start
        assert (start.weights_digest, start.from_peers) == (models.weights, from_peers), name
