"""The pool file, the environment of its workers, and what a pool begins with."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from turboserve.autoscaler.composition_loop import CompositionLoop
from turboserve.autoscaler.control_loop import ControlLoop
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.messages import SizesWanted, SizeWanted
from turboserve.autoscaler.model_memory import OfferMemoryError
from turboserve.autoscaler.pool_file import PoolFile
from turboserve.autoscaler.pool_start import control_of, first_size
from turboserve.autoscaler.providers.base import ProviderWorker
from turboserve.autoscaler.providers.kubernetes_pod import ALIKE
from turboserve.autoscaler.providers.member_kinds import member_environment, member_needs, member_pod
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
    own = (
        'sessions = 3\nsettings = { TURBOSERVE_WEIGHTS_DIGEST = "ab", TURBOSERVE_WORKER_MAX_SESSIONS = "2" }'
    )
    common = TWO.replace("most = 3", 'most = 3\nsettings = { TURBOSERVE_WORKER_MAX_SESSIONS = "9" }')
    tiny = PoolFile.parse(common.replace("sessions = 3", own)).environment_of("tiny")
    assert (tiny["TURBOSERVE_WEIGHTS_DIGEST"], tiny["TURBOSERVE_WORKER_MAX_SESSIONS"]) == ("ab", "2")
    assert PoolFile.parse(common).environment_of("tiny")["TURBOSERVE_WORKER_MAX_SESSIONS"] == "9"
    switches = TWO.replace("gpus = 0.5", "start_s = 40\nswitch_s = 9")
    terms = PoolFile.parse(switches).terms
    assert (terms["big"].start_s, terms["big"].switch_s) == (40, 9)
    assert (terms["small"].start_s, terms["small"].switch_s) == (30, 30)


def test_each_kind_takes_its_own_part_of_a_cluster() -> None:
    text = TWO.replace(
        "gpus = 0.5",
        "gpus = 0.5\ncpus = 3\nresources = { h100 = 2.0 }\n"
        'node_selector = { gpu = "h100" }\nlimits = { "nvidia.com/gpu" = "2" }',
    )
    ray = settings(text, provider="ray", ray_cpus=7, ray_resources={"h100": 1.0, "site": 1.0})
    needs = member_needs(ray)
    large = {"CPU": 3, "GPU": 0.5, "h100": 2.0, "site": 1.0}
    small = {"CPU": 7, "GPU": 1, "h100": 1.0, "site": 1.0}
    assert needs.of("local-wide-0").bundle == large
    assert needs.of("local-tiny-1").bundle == small
    assert [one.bundle for one in needs.every] == [large, small]
    assert needs.variables("local-wide-0")["TURBOSERVE_WORKER_MAX_SESSIONS"] == "4"
    pod = member_pod(ray, "local-wide-0")
    assert (pod.node_selector, pod.limits) == ({"gpu": "h100"}, {"nvidia.com/gpu": "2"})
    assert pod.variables["TURBOSERVE_MODEL"] == "toyworld"
    assert (member_pod(ray, "local-tiny-0").limits, member_pod(ray, "local-gone-0")) == ({}, ALIKE)
    plain = AutoscalerSettings(pool_worker_gpus=2, ray_cpus=4)
    assert member_needs(plain).of("local-0").bundle == {"CPU": 4, "GPU": 2}


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("[kinds.big]", "[kinds.big", "no TOML: "),
        ("price = 4.0", "price = -1", "kinds.big.price: "),
        ("price = 4.0", "price = nan", "kinds.big.price: "),
        ("gpus = 0.5", "gpus = nan", "kinds.big.gpus: "),
        ("most = 2", "", "kinds.big.most: Field required"),
        ("most = 2", "most = 2\nleast = 1", "kinds.big.least: Extra inputs"),
        ("TURBOSERVE_WORKER_MAX_SESSIONS", "TURBOSERVE_MODEL", "kinds.big.settings: TURBOSERVE_MODEL is no"),
        ("TURBOSERVE_WORKER_MAX_SESSIONS", "PATH", "kinds.big.settings: PATH is no setting"),
        (
            "sessions = 3",
            "settings = { TURBOSERVE_MODEL = 'x' }",
            "offers.1.settings: TURBOSERVE_MODEL is no",
        ),
        ('kind = "small"', 'kind = "tall"', "offers: tiny is of the kind tall, which"),
        ('name = "tiny"', 'name = "wide"', "offers: names differ"),
        ('name = "tiny"', 'name = "extra"', "offers: names differ, and none is 'extra'"),
        ('name = "tiny"', 'name = "no-dash"', "offers.1.name: "),
        (
            'kind = "small"\nmodel = "toyworld-small"',
            'kind = "big"\nmodels = ["toyworld"]',
            "offers: two have",
        ),
        ('model = "toyworld-small"', "", "offers.1: tiny needs either model or models"),
        ('model = "toyworld-small"', 'model = "a"\nmodels = ["b"]', "offers.1: tiny needs either"),
        ('model = "toyworld-small"', 'models = ["a", "a"]', "offers.1: tiny: a model appears twice"),
        ('model = "toyworld-small"', "models = []", "offers.1.models: "),
        ("sessions = 3", "sessions = { toyworld = 1 }", "offers.1: tiny: sessions has other models"),
        (
            'settings = { TURBOSERVE_WORKER_MAX_SESSIONS = "4" }',
            'memory_bytes = 9\nsettings = { TURBOSERVE_MEMORY_BYTES = "4" }',
            "offers: wide has memory_bytes of its kind and TURBOSERVE_MEMORY_BYTES",
        ),
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
    with pytest.raises(ValidationError, match="another system starts the workers"):
        settings(TWO, provider="external")
    with pytest.raises(ValidationError, match="absorb nothing"):
        settings(TWO, quality_debt_limit=0.1)


def test_a_file_of_one_offer_is_a_plain_pool_with_its_limits() -> None:
    one = settings(ONE)
    first = first_size(one, [], ())
    assert first == SizeWanted(1, "configured")
    control = control_of(one, first, POOL, lambda event: None, lambda *_: None)
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
    control = control_of(two, found, POOL, lambda event: None, lambda *_: None)
    assert isinstance(control, CompositionLoop)
    assert (control.model, control.maximum) == ("toyworld", 2)
    assert control.further_models == {"tiny": ("toyworld-small", 3)}


def test_a_new_minimum_starts_no_worker_in_the_place_of_one_that_runs() -> None:
    """Incident: both offers' workers ran on one GPU until the first one had drained."""
    one_kind = settings(TWO.replace('"small"\nmodel', '"big"\nmodel'))
    running = [ProviderWorker(f"local-tiny-{n}", f"wrk_{n}") for n in range(2)]
    assert first_size(one_kind, running, ()) == SizesWanted({"wide": 0, "tiny": 2}, "2 already running")
    assert first_size(one_kind, running[:1], ()) == SizesWanted({"wide": 1, "tiny": 1}, "1 already running")


def test_the_documented_file_is_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "scale-the-pool.md").read_text()
    file = PoolFile.parse(page.partition("```toml\n")[2].partition("```")[0])
    assert file.composed
    assert file.limits == (1, 6)


SEVERAL = """
[kinds.big]
price = 4.0
most = 2
memory_bytes = 1000

[kinds.small]
price = 1.0
most = 3

[memory.toyworld]
weight_bytes = 300
workspace_bytes = 20
state_bytes = 80

[memory.toyworld-small]
weight_bytes = 200
state_bytes = 30

[[offers]]
name = "wide"
kind = "big"
model = "toyworld"
sessions = 4

[[offers]]
name = "both"
kind = "big"
models = ["toyworld-small", "toyworld"]
sessions = { toyworld-small = 6, toyworld = 4 }

[[offers]]
name = "free"
kind = "small"
models = ["toyworld", "toyworld-small"]
sessions = 5
"""


def test_workers_of_an_offer_serve_all_its_models_within_their_memory() -> None:
    read = settings(SEVERAL)
    assert read.pool_file is not None
    assert read.models == ("toyworld", "toyworld-small")
    offers = {offer.name: offer.sessions for offer in read.pool_file.pool_offers}
    # The weights leave 250 bytes to each model: 20 and two states, or eight states.
    assert offers["both"] == {"toyworld-small": 6, "toyworld": 2}
    assert tuple(offers["both"]) == ("toyworld-small", "toyworld")
    assert offers["wide"] == {"toyworld": 4}
    assert offers["free"] == {"toyworld": 5, "toyworld-small": 5}
    assert member_environment(read, "local-both-0")["TURBOSERVE_MODEL"] == "toyworld-small,toyworld"
    assert read.models_of("both") == ("toyworld-small", "toyworld")
    assert (read.models_of("wide"), read.models_of("gone")) == (("toyworld",), ())
    assert AutoscalerSettings(pool_model="toyworld").models_of("") == ("toyworld",)
    assert member_environment(read, "local-both-0")["TURBOSERVE_MEMORY_BYTES"] == "1000"
    assert "TURBOSERVE_MEMORY_BYTES" not in member_environment(read, "local-free-0")
    for provider in ("ray", "kubernetes"):
        more = {} if provider == "ray" else {"kubernetes_pod_template": "pod.yaml"}
        there = settings(SEVERAL, provider=provider, **more)
        assert member_pod(there, "local-both-1").variables["TURBOSERVE_MODEL"] == "toyworld-small,toyworld"
        needs = member_needs(there)
        assert needs.variables("local-free-1")["TURBOSERVE_MODEL"] == "toyworld,toyworld-small"
    control = control_of(read, first_size(read, [], ()), POOL, lambda event: None, lambda *_: None)
    # The rows of models are told apart, also if both are of one offer.
    assert control.further_models == {"both": ("toyworld-small", 5)}


def test_models_that_do_not_fit_into_a_worker_are_refused_with_the_bytes(tmp_path: Path) -> None:
    fault = "offers: both needs 700 bytes for its models and one session of each, with equal parts as large "
    fault += "as toyworld needs; memory_bytes of its kind is 699"
    text = SEVERAL.replace("memory_bytes = 1000", "memory_bytes = 699")
    with pytest.raises(OfferMemoryError) as error:
        PoolFile.parse(text)
    assert str(error.value) == fault
    assert (error.value.offer, error.value.needed, error.value.memory) == ("both", 700, 699)
    path = tmp_path / "pool.toml"
    path.write_text(text)
    with pytest.raises(OfferMemoryError) as of_file:
        PoolFile.read(path)
    assert str(of_file.value) == f"{path}: {fault}"
    path.write_text(text.replace("699", "700"))
    assert PoolFile.read(path).pool_offers[1].sessions == {"toyworld-small": 3, "toyworld": 1}


def test_a_file_of_one_offer_with_several_models_is_a_plain_pool_of_such_workers() -> None:
    text = SEVERAL[: SEVERAL.index("[[offers]]")] + SEVERAL[SEVERAL.rindex("[[offers]]") :]
    one = settings(text)
    control = control_of(one, first_size(one, [], ()), POOL, lambda event: None, lambda *_: None)
    assert type(control) is ControlLoop
    assert (control.model, one.models) == ("toyworld", ("toyworld", "toyworld-small"))
    assert member_environment(one, "local-0")["TURBOSERVE_MODEL"] == "toyworld,toyworld-small"
