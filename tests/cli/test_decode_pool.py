"""`turboserve up --decode-workers`: processes of their own, which the workers know by address and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from turboserve.cli.embedded import Layout
from turboserve.cli.stack.options import InvalidOptionError, Options
from turboserve.cli.stack.plan import Plan
from turboserve.worker.settings import Settings

DECODERS = ("decode-worker", "decode-worker-2")
ROLE_SETTINGS = ("TURBOSERVE_ROLES", "TURBOSERVE_DECODE_WORKERS", "TURBOSERVE_DECODE_KEY")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "data")
    layout.create()
    return layout


def test_decode_workers_and_workers_have_what_they_need_of_each_other(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURBOSERVE_VIDEO_CRF", "30")
    options = Options(layout.data, decode_workers=2, model="toyworld-small")
    plan = Plan(options, layout)
    specs = {spec.name: spec for spec in plan.processes()}
    assert set(DECODERS) < specs.keys()
    pool = specs["autoscaler"].environment
    addresses = pool["TURBOSERVE_DECODE_WORKERS"].split(",")
    assert pool["TURBOSERVE_ROLES"] == "denoise"
    users = set()
    for name, address in zip(DECODERS, addresses, strict=True):
        given = specs[name].environment
        for variable in given:
            assert variable not in ("TURBOSERVE_WORKER_ID", "TURBOSERVE_WORKER_IDENTITIES")
        assert address == f"tcp://127.0.0.1:{given['TURBOSERVE_TRANSFER_PORT']}"
        assert given["TURBOSERVE_DECODE_KEY"] == pool["TURBOSERVE_DECODE_KEY"]
        assert (given["TURBOSERVE_ROLES"], given["TURBOSERVE_MODEL"]) == ("decode", "toyworld-small")
        assert given["TURBOSERVE_VIDEO_CRF"] == "30"
        # Workers are not trusted by each other: each has a user of its own at the broker.
        users.add(given["TURBOSERVE_NATS_USER"])
        assert plan.nats is not None
        assert given["TURBOSERVE_NATS_PASSWORD"] == plan.nats.passwords[given["TURBOSERVE_NATS_USER"]]
    assert len({*users, *(f"worker.{name}" for name in plan.identities)}) == 2 + len(plan.identities)
    holders = {name for name, spec in specs.items() if "TURBOSERVE_DECODE_KEY" in spec.environment}
    assert holders == {*DECODERS, "autoscaler"}
    # Sessions end before what decodes them.
    assert plan.workers_rank < specs[DECODERS[0]].member.rank < specs["state-store"].member.rank


def test_decode_workers_of_several_models_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="--decode-workers"):
        Options(tmp_path, decode_workers=1, model="toyworld,toyworld-small")


def test_without_the_option_nothing_is_different(layout: Layout) -> None:
    specs = {spec.name: spec for spec in Plan(Options(layout.data), layout).processes()}
    assert not [name for name in specs if name.startswith("decode")]
    for spec in specs.values():
        assert not set(ROLE_SETTINGS) & spec.environment.keys()
    assert "decode" not in layout.secrets.read_text()


def test_the_settings_of_a_stack_are_valid_for_a_worker(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = {spec.name: spec for spec in Plan(Options(layout.data, decode_workers=1), layout).processes()}
    for name, roles in (("autoscaler", "denoise"), ("decode-worker", "decode")):
        for variable in ROLE_SETTINGS:
            monkeypatch.delenv(variable, raising=False)
            if (value := specs[name].environment.get(variable)) is not None:
                monkeypatch.setenv(variable, value)
        assert Settings().roles == roles
