"""The wheels of all distributions, in an environment without the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest

from tests.helpers.ports import free_ports

ROOT = Path(__file__).parents[2]
PROJECTS = sorted(
    path.parent for pattern in ("*", "services/*", "sdk/*") for path in ROOT.glob(f"{pattern}/pyproject.toml")
)
PATIENCE_S = 120.0
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""Variables of processes that must not find the source tree."""

BUILD = """
import importlib, os, sys, tomllib
from pathlib import Path

_, folder, *projects = sys.argv
for project in projects:
    os.chdir(project)
    backend = tomllib.loads(Path("pyproject.toml").read_text())["build-system"]["build-backend"]
    importlib.import_module(backend).build_wheel(folder)
"""
"""Builds each wheel as pip does without build isolation, but without three processes for each."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run([sys.executable, "-c", BUILD, str(folder), *map(str, PROJECTS)], check=True)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheels. Other packages are those of this environment."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", *map(str, wheels)], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    others = [entry for entry in sys.path if Path(entry).name == "site-packages"]
    # Path files in them are not read this way, so that the editable distributions stay unknown.
    (packages / "others.pth").write_text("\n".join(others))
    return folder


def test_every_wheel_has_its_code_and_its_license(wheels: list[Path]) -> None:
    assert len(wheels) == len(PROJECTS)
    for wheel in wheels:
        with ZipFile(wheel) as archive:
            names = archive.namelist()
            [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
            assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()
            assert {name.split("/")[0] for name in names} == {"turboserve", metadata.split("/")[0]}


def test_the_clients_wheel_has_its_types_its_license_and_its_readme(wheels: list[Path]) -> None:
    [wheel] = [wheel for wheel in wheels if wheel.name.startswith("turboserve_client-")]
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        assert "turboserve/client/py.typed" in names
        assert f"{metadata.removesuffix('METADATA')}licenses/LICENSE" in names
        assert "## Record ten seconds" in archive.read(metadata).decode()


def test_the_gateways_wheel_has_the_javascript_client(wheels: list[Path]) -> None:
    [wheel] = [wheel for wheel in wheels if wheel.name.startswith("turboserve_gateway-")]
    folder = "turboserve/gateway/page/static/client"
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith(folder)}
        sources = {f"{folder}/{file.name}": file.read_bytes() for file in (ROOT / "sdk/js/dist").iterdir()}
        assert names == set(sources)
        assert all(archive.read(name) == content for name, content in sources.items())


def test_policies_from_wheels_are_found_by_name(environment: Path) -> None:
    """The baselines are found by the wheel's entry points, without an import."""
    code = """
from turboserve.scheduler.placement import PLACEMENTS, REBALANCERS, SHARES
from turboserve.worker.engine.gather import GATHER_POLICIES
for policies in (PLACEMENTS, GATHER_POLICIES, REBALANCERS, SHARES):
    print(*(f"{name}={type(policies.make(name)).__module__}" for name in policies.names))
"""
    python = str(environment / "bin" / "python")
    found = subprocess.run([python, "-c", code], env=OUTSIDE, capture_output=True, text=True, check=True)
    placements, gathering, rebalancers, shares = (
        dict(each.split("=") for each in line.split()) for line in found.stdout.splitlines()
    )
    assert {name for name, module in placements.items() if module.startswith("turboserve.baselines.")} == {
        "class-blind", "fewest-streams", "least-loaded", "load-aware", "memory-aware", "round-robin",
        "static-split",
    }  # fmt: skip
    assert gathering == {
        "step": "turboserve.worker.engine.gather",
        "chunk": "turboserve.baselines.gather",
        "earliest-fluid-finish": "turboserve.baselines.neustream",
        "fcfs": "turboserve.baselines.gather",
        "partial-deadlines": "turboserve.baselines.neustream",
        "stream-deadline": "turboserve.baselines.gather",
        "tiers": "turboserve.baselines.gather",
    }
    assert rebalancers == {
        "min-max": "turboserve.scheduler.placement.rebalance",
        "algorithm-1": "turboserve.baselines.rehoming",
    }
    assert {name for name, module in shares.items() if module.startswith("turboserve.baselines.")} == {
        "most-sessions", "oserve"
    }  # fmt: skip


@pytest.fixture
def address(environment: Path, tmp_path: Path) -> Iterator[str]:
    """A stack from the wheels."""
    [port] = free_ports(1)
    command = [
        str(environment / "bin" / "turboserve"),
        "up",
        "--port",
        str(port),
        "--data",
        str(tmp_path / "data"),
    ]
    # The broker's binary is among the scripts of this environment.
    variables = {**OUTSIDE, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (tmp_path / "up.log").open("wb") as log:
        stack = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + PATIENCE_S
            while True:
                assert stack.poll() is None, (tmp_path / "up.log").read_text()
                with suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/readyz", timeout=PATIENCE_S).status_code == 200:
                        break
                assert time.monotonic() < deadline, (tmp_path / "up.log").read_text()
                time.sleep(0.2)
            yield url
        finally:
            stack.terminate()
            stack.wait(PATIENCE_S)


@pytest.mark.soak
@pytest.mark.stack
def test_a_stack_from_wheels_serves_video_and_its_pages(address: str, environment: Path) -> None:
    found = subprocess.run(
        [str(environment / "bin" / "python"), "-c", "import turboserve.worker as w; print(w.__file__)"],
        env=OUTSIDE,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()).is_relative_to(environment)
    for page in ("/", "/pool", "/docs"):
        answer = httpx.get(address + page, timeout=PATIENCE_S)
        assert answer.status_code == 200, page
        assert answer.headers["content-type"].startswith("text/html")
    answer = httpx.get(f"{address}/docs/swagger-ui/swagger-ui.css", timeout=PATIENCE_S)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/css")
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = httpx.post(f"{address}/v1/sessions", json={"prompt": "a red circle"}, timeout=PATIENCE_S)
        if answer.status_code == 201:
            break
        # The worker comes last.
        assert answer.json()["code"] in ("unknown_model", "no_capacity"), answer.text
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.5)
    video = address + answer.json()["links"]["video"]
    received = 0
    with httpx.stream("GET", video, timeout=PATIENCE_S) as stream:
        assert stream.headers["content-type"] == "video/mp4"
        for part in stream.iter_bytes():
            received += len(part)
            if received > 50_000:
                break
    assert received > 50_000
