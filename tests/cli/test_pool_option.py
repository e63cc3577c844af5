"""`turboserve up --pool FILE`: what the services get of it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from turboserve.cli.embedded import Layout
from turboserve.cli.stack.options import InvalidOptionError, Options, PoolOption
from turboserve.cli.stack.plan import Plan

POOL = """
[kinds.any]
price = 1
most = 3
[[offers]]
name = "tiny"
kind = "any"
model = "toyworld-small"
least = 1
[[offers]]
name = "world"
kind = "any"
model = "toyworld"
"""


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "data")
    layout.create()
    return layout


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pool.toml"
    path.write_text(POOL)
    return path


def test_the_services_get_the_file_its_limits_and_its_first_model(layout: Layout, file: Path) -> None:
    pool = PoolOption.read(file, workers=None, model=None)
    plan = Plan(Options(layout.data, pool.workers, pool=pool), layout)
    given = {spec.name: spec.environment for spec in plan.processes()}
    assert given["autoscaler"]["TURBOSERVE_POOL_FILE"] == str(file)
    assert (given["autoscaler"]["TURBOSERVE_POOL_MIN"], given["autoscaler"]["TURBOSERVE_POOL_MAX"]) == (
        "1",
        "3",
    )
    assert given["gateway"]["TURBOSERVE_DEFAULT_MODEL"] == "toyworld-small"
    assert len(plan.identities) == 6


def test_wrong_files_and_options_beside_a_file_are_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(InvalidOptionError, match="--workers: the file of --pool says it"):
        PoolOption.read(file, workers="2", model=None)
    with pytest.raises(InvalidOptionError, match="--model: the file of --pool says it"):
        PoolOption.read(file, workers=None, model="toyworld")
    with pytest.raises(InvalidOptionError, match=r"--pool: .*none\.toml: .*No such file"):
        PoolOption.read(tmp_path / "none.toml", workers=None, model=None)
    file.write_text(POOL.replace("toyworld-small", "toyworld-none"))
    with pytest.raises(InvalidOptionError, match="--pool: no model 'toyworld-none' is installed"):
        PoolOption.read(file, workers=None, model=None)
    file.write_text(POOL.replace("most = 3", "most = 300"))
    with pytest.raises(InvalidOptionError, match="the maximum of all kinds is 300, above 256"):
        PoolOption.read(file, workers=None, model=None)
    file.write_text(POOL)
    pool = PoolOption.read(file, workers=None, model=None)
    with pytest.raises(InvalidOptionError, match="--decode-workers"):
        Options(tmp_path, pool.workers, decode_workers=1, pool=pool)
