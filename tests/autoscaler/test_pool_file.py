"""The pool file, the environment of its workers, and what a pool begins with."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from turboserve.autoscaler.__main__ import member_environment
from turboserve.autoscaler.composition_loop import CompositionLoop
from turboserve.autoscaler.control_loop import ControlLoop
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.messages import SizesWanted, SizeWanted
from turboserve.autoscaler.pool_file import PoolFile
from turboserve.autoscaler.pool_start import control_of, first_size
from turboserve.autoscaler.providers.base import ProviderWorker
from turboserve.autoscaler.settings import AutoscalerSettings

TWO = """
[kinds.big]
price = 4.0
most = 2
threads = 2
gpus = 0.5
settings = { TURBOSERVE_WORKER_MAX_SESSIONS = "4" }

[kinds.small]
price = 1.0
most = 3

[[offers]]
name = "wide"
kind = "big"
model = "toyworld"
least = 1

[[offers]]
name = "tiny"
kind = "small"
model = "toyworld-small"
sessions = 3
"""
POOL = Pool("local", lambda: "wrk_1")
ONE = TWO[: TWO.rindex("[[offers]]")]


def settings(text: str, **more: object) -> AutoscalerSettings:
    return AutoscalerSettings(pool_file=PoolFile.parse(text), **more)  # type: ignore[arg-type]


def test_a_file_has_limits_models_and_the_environment_of_each_offer(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text(TWO)
    read = AutoscalerSettings(pool_file=tmp_path / "pool.toml")  # type: ignore[arg-type]
    assert read.limits == (1, 5)
    assert read.models == ("toyworld", "toyworld-small")
    assert member_environment(read, "local-wide-0") == {
        "TURBOSERVE_WORKER_MAX_SESSIONS": "4",
        "OMP_NUM_THREADS": "2",
        "TURBOSERVE_MODEL": "toyworld",
    }
    assert member_environment(read, "local-tiny-2")["TURBOSERVE_MODEL"] == "toyworld-small"
    assert member_environment(read, "local-gone-0") == member_environment(read, "local-extra-wrk_1") == {}
    assert read.pool_file is not None
    assert read.pool_file.usage_of("wide") == ("big", 0.5)
    assert read.pool_file.usage_of("tiny") == ("small", 1.0)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("[kinds.big]", "[kinds.big", "no TOML: "),
        ("price = 4.0", "price = -1", "kinds.big.price: "),
        ("price = 4.0", "price = nan", "kinds.big.price: "),
        ("gpus = 0.5", "gpus = nan", "kinds.big.gpus: "),
        ("most = 2", "", "kinds.big.most: Field required"),
        ("most = 2", "most = 2\nleast = 1", "kinds.big.least: Extra inputs"),
        ("TURBOSERVE_WORKER_MAX_SESSIONS", "TURBOSERVE_MODEL", "kinds.big: settings: TURBOSERVE_MODEL is no"),
        ("TURBOSERVE_WORKER_MAX_SESSIONS", "PATH", "kinds.big: settings: PATH is no setting"),
        ('kind = "small"', 'kind = "tall"', "offers: tiny is of the kind tall, which"),
        ('name = "tiny"', 'name = "wide"', "offers: names differ"),
        ('name = "tiny"', 'name = "extra"', "offers: names differ, and none is 'extra'"),
        ('name = "tiny"', 'name = "no-dash"', "offers.1.name: "),
        ('kind = "small"\nmodel = "toyworld-small"', 'kind = "big"\nmodel = "toyworld"', "offers: two have"),
        ("least = 1", "least = 3", "offers: the minimum of the kind big is 3, its maximum 2"),
        ('model = "toyworld-small"', 'model = "toyworld,toyworld-small"', "offers.1.model: "),
    ],
)
def test_a_wrong_file_is_refused_with_the_field(tmp_path: Path, old: str, new: str, fault: str) -> None:
    assert old in TWO
    path = tmp_path / "pool.toml"
    path.write_text(TWO.replace(old, new, 1))
    with pytest.raises(ValidationError) as error:
        AutoscalerSettings(pool_file=path)  # type: ignore[arg-type]
    assert f"{path}: {fault}" in str(error.value)


def test_what_cannot_have_several_offers_refuses_them() -> None:
    with pytest.raises(ValidationError, match="only the provider local starts"):
        settings(TWO, provider="ray")
    with pytest.raises(ValidationError, match="absorb nothing"):
        settings(TWO, quality_debt_limit=0.1)


def test_a_file_of_one_offer_is_a_plain_pool_with_its_limits() -> None:
    one = settings(ONE)
    first = first_size(one, [], ())
    assert first == SizeWanted(1, "configured")
    control = control_of(one, first, POOL, lambda event: None)
    assert type(control) is ControlLoop
    assert (control.model, control.controller.policy.most, control.further_models) == ("toyworld", 2, {})
    assert member_environment(one, "local-0")["OMP_NUM_THREADS"] == "2"


def test_a_pool_of_several_offers_begins_with_what_runs() -> None:
    two = settings(TWO)
    assert first_size(two, [], ()) == SizesWanted({"wide": 1, "tiny": 0}, "configured")
    running = [ProviderWorker(f"local-tiny-{n}", f"wrk_{n}") for n in range(5)]
    found = first_size(two, [*running, ProviderWorker("local-0", "wrk_9")], {"wrk_0"})
    # At most three of the kind, and at least one of the other.
    assert found == SizesWanted({"wide": 1, "tiny": 3}, "5 already running")
    control = control_of(two, found, POOL, lambda event: None)
    assert isinstance(control, CompositionLoop)
    assert (control.model, control.maximum) == ("toyworld", 2)
    assert control.further_models == {"tiny": ("toyworld-small", 3)}


def test_the_documented_file_is_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "scale-the-pool.md").read_text()
    file = PoolFile.parse(page.partition("```toml\n")[2].partition("```")[0])
    assert file.composed
    assert file.limits == (1, 6)
