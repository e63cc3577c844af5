"""Plans of weight transfers in virtual time, against OServe's greedy and the best of all plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from turboserve.bench.weights import command, padded, plans, starts
from turboserve.bench.weights.exhaustive import least_rounds, rounds_bound
from turboserve.bench.weights.oserve import OServePlan
from turboserve.bench.weights.padded import write_padding
from turboserve.bench.weights.virtual import Fleet, new_plan, run
from turboserve.worker.model.weights import named_weights
from turboserve.worker.replicas.models import ModelOptions, load_model
from turboserve.worker.weight_transfer.plan_messages import PlanLimits


def test_the_search_finds_known_optima() -> None:
    # One receiver takes a shard a round; one shard doubles; M shards to N workers take M - 1 + log2(N + 1).
    assert [least_rounds(1, 1, shards) for shards in (1, 2, 4)] == [1, 2, 4]
    assert [least_rounds(1, receivers, 1) for receivers in (1, 2, 3)] == [1, 2, 2]
    assert least_rounds(1, 3, 2) == 3
    assert least_rounds(2, 2, 3) == 3
    for holders, receivers, shards in plans.SMALL[:6]:
        assert rounds_bound(holders, receivers, shards) <= least_rounds(holders, receivers, shards)


def test_plans_of_small_cases_are_near_the_best_of_all_and_never_behind_oserve() -> None:
    for case, found in plans.small_cases().items():
        assert found["best"] <= found["ours"] <= found["best"] + 1, case
        assert found["ours"] <= found["oserve"], case


def test_every_declared_fleet_gets_its_weights_no_later_than_with_oserve() -> None:
    result = command.run(quick=True, only="plans,disturbances")
    for case, found in result["plans"].items():
        assert found["gain"] >= 0.99, case
        assert found["far_bytes"]["ours"] <= found["far_bytes"]["oserve"] * 1.001, case
    # Receivers that share what they have: one copy crosses the network, instead of eight.
    assert result["plans"]["1 to 8, one other host"]["gain"] > 4
    disturbed = result["disturbances"]
    assert disturbed["a holder dies halfway"]["seconds"] < 2 * disturbed["calm"]["seconds"]
    assert disturbed["a holder lacks slack until halfway"]["bytes_without_slack"] == 0
    assert disturbed["oserve, a holder lacks slack until halfway"]["bytes_without_slack"] > 0
    assert command.table(result).renderables


def test_virtual_time_shares_a_worker_s_rate_among_its_transfers() -> None:
    fleet = Fleet(("a",), ("b", "c"), 1, 100, near_bytes_per_s=1.0, far_bytes_per_s=10.0)
    two_at_once = PlanLimits(sends=2, receives=1, wait_s=1e9)
    for planner in (new_plan(fleet, two_at_once), OServePlan(1, 100, two_at_once, in_total=False)):
        result = run(fleet, planner)
        assert result.seconds == pytest.approx(20.0)
        assert result.far_bytes == pytest.approx(200.0)


def test_a_worker_has_joined_once_its_line_is_written_to_the_end() -> None:
    line = '{"event": "worker joins", "weights_s": 1.5}\n'
    for written in range(len(line)):
        assert starts.joins('{"event": "other"}\n' + line[:written]) is None
    assert starts.joins('{"event": "other"}\n' + line + "{") == {"event": "worker joins", "weights_s": 1.5}


def test_padding_is_a_part_of_the_weights(tmp_path: Path) -> None:
    digests = set()
    for seed, size in ((0, 1000), (1, 1000), (0, padded.TENSOR_BYTES + 5)):
        write_padding(tmp_path / "padding", size, seed)
        starts.read_into_cache(tmp_path / "padding")
        starts.drop_from_cache(tmp_path / "padding")
        options = ModelOptions(torch.device("cpu"), torch.float32, checkpoint=tmp_path / "padding")
        models = load_model("padded-toyworld", options)
        assert models.manifest is not None
        named = named_weights(models.networks)
        assert sum(tensor.numel() for name, tensor in named.items() if "padding" in name) == size
        assert {tensor.name for tensor in models.manifest.tensors} == set(named)
        digests.add(models.weights)
    assert len(digests) == 3
