"""Policies by name: built-in ones, installed ones, and names that no distribution offers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import forked_process
from turboserve.plugins import NotInstalledError, PluginLoadError
from turboserve.policies import GROUP, Policies
from turboserve.scheduler.placement import PLACEMENTS, REBALANCERS, SHARES
from turboserve.service import EXIT_SETTINGS
from turboserve.worker.engine.gather import GATHER_POLICIES


class BuiltIn:
    """The service's own policy."""


POLICIES: Policies[object] = Policies("test", {"own": BuiltIn})


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, policies: dict[str, str]) -> None:
    """Install a distribution in `folder`. `policies`: name of a policy of kind `test` → its object."""
    (folder / "other_policies.py").write_text("class Other:\n    pass\n")
    metadata = folder / "other_policies-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-policies\nVersion: 1.0\n")
    offered = "\n".join(f"test.{name} = {value}" for name, value in policies.items())
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{offered}\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install two policies of kind `test`, one of them under a built-in policy's name."""
    install(tmp_path, monkeypatch, dict.fromkeys(("other", "own"), "other_policies:Other"))


@pytest.mark.usefixtures("installed")
def test_an_installed_policy_is_made_by_its_name() -> None:
    assert POLICIES.names == ("own", "other")
    other = POLICIES.make("other")
    assert type(other).__module__ == "other_policies"
    assert POLICIES.make("other") is not other


@pytest.mark.usefixtures("installed")
def test_an_installed_policy_replaces_no_built_in_one() -> None:
    assert isinstance(POLICIES.make("own"), BuiltIn)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_policies:Other", "ModuleNotFoundError"),
        ("other_policies:Missing", "AttributeError"),
        ("failing_policies:Other", "ZeroDivisionError"),
    ],
)
def test_a_broken_distribution_is_named_with_its_entry_point(
    value: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_policies.py").write_text("1 / 0\n")
    install(tmp_path, monkeypatch, {"broken": value})
    assert POLICIES.check("broken") == "broken"
    with pytest.raises(PluginLoadError, match=f"distribution other-policies: .*{reason}") as raised:
        POLICIES.make("broken")
    assert raised.value.distribution == "other-policies"
    assert raised.value.entry_point == f"test.broken = {value}"
    assert isinstance(raised.value.__cause__, Exception)


def test_an_unknown_name_is_refused_with_the_names_that_are_installed() -> None:
    for use in (POLICIES.check, POLICIES.make):
        with pytest.raises(
            NotInstalledError, match="no test policy 'other' is installed; installed: own"
        ) as raised:
            use("other")
        assert (raised.value.kind, raised.value.name, raised.value.installed) == (
            "test policy",
            "other",
            ("own",),
        )


def test_the_baselines_are_installed() -> None:
    assert PLACEMENTS.names == (
        "min-max",
        "class-blind",
        "fewest-streams",
        "least-loaded",
        "load-aware",
        "memory-aware",
        "round-robin",
        "static-split",
    )
    assert SHARES.names == ("exact", "most-sessions", "oserve")
    assert REBALANCERS.names == ("min-max", "algorithm-1")
    assert GATHER_POLICIES.names == (
        "step", "chunk", "earliest-fluid-finish", "fcfs", "partial-deadlines", "stream-deadline", "tiers"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("service", "setting", "known"),
    [
        ("scheduler", "TURBOSERVE_PLACEMENT", PLACEMENTS.names),
        ("scheduler", "TURBOSERVE_REBALANCER", REBALANCERS.names),
        ("scheduler", "TURBOSERVE_SHARES", SHARES.names),
        ("worker", "TURBOSERVE_GATHER_POLICY", GATHER_POLICIES.names),
    ],
)
def test_a_service_refuses_an_unknown_policy_and_lists_the_installed_ones(
    service: str, setting: str, known: tuple[str, ...]
) -> None:
    done = forked_process.run(["-m", f"turboserve.{service}"], {setting: "lifo"})
    assert done.returncode == EXIT_SETTINGS, done.stderr
    assert f"{setting}: no" in done.stderr
    assert f"'lifo' is installed; installed: {', '.join(known)}" in done.stderr
    assert "Traceback" not in done.stderr
