"""`turboserve bench state-store`: its figures, and one short block on real servers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from turboserve.bench.migration.stack import STORE
from turboserve.bench.state_store import command
from turboserve.bench.state_store.command import (
    REQUESTS,
    BlockCosts,
    ProcessorTime,
    Used,
    block,
    figures,
    processor_s,
    ratios,
)


def costs(store_ms: float, postgres_ms: float = 1.0, answer_s: float = 0.01) -> BlockCosts:
    return BlockCosts(
        dict.fromkeys(REQUESTS, store_ms), dict.fromkeys(REQUESTS, postgres_ms), 0.1, [answer_s]
    )


def test_each_block_is_compared_with_the_one_beside_it() -> None:
    found = {
        "batched": [costs(1.0), costs(2.0), costs(9.0)],
        "one_by_one": [costs(2.0), costs(4.0), costs(9.0)],
    }
    assert ratios(found, with_postgres=False) == dict.fromkeys(REQUESTS, 0.5)
    assert ratios(found, with_postgres=True) == dict.fromkeys(REQUESTS, 0.667)


def test_what_the_idle_store_uses_is_no_cost_of_a_renewal() -> None:
    used, idle = ProcessorTime(5.0, 2.0), ProcessorTime(3.0, 0.3).over(3.0)
    left = used.less(idle, 2.0).over(3.0)
    assert (left.store_s, left.postgres_s) == pytest.approx((1.0, 0.6))


def test_no_cost_is_negative_and_no_ratio_has_a_cost_of_zero() -> None:
    left = ProcessorTime(1.0, 0.1).less(ProcessorTime(0.6, 0.1), 2.0)
    assert left == ProcessorTime(0.0, 0.0)
    found = {"batched": [costs(1.0), costs(1.0)], "one_by_one": [costs(0.0), costs(2.0)]}
    assert ratios(found, with_postgres=False) == dict.fromkeys(REQUESTS, 0.5)
    found = {"batched": [costs(1.0)], "one_by_one": [costs(0.0)]}
    assert ratios(found, with_postgres=False) == dict.fromkeys(REQUESTS)


def test_processor_time_is_exact_and_a_process_that_has_ended_uses_none() -> None:
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        # It has run now: a process that has just been made has used nothing.
        assert child.stdout is not None
        child.stdout.readline()
        process = psutil.Process(child.pid)
        used = Used(process)
        assert used.next().store_s > 0.0
        before = time.process_time()
        assert before <= processor_s(psutil.Process()) <= time.process_time()
    assert used.next().store_s == 0.0


def test_a_process_that_ends_while_it_is_looked_at_uses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(process: psutil.Process) -> str:
        raise psutil.NoSuchProcess(process.pid)

    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE):
        monkeypatch.setattr(psutil.Process, "name", gone)
        assert Used(psutil.Process()).next() == ProcessorTime(0.0, 0.0)


def test_the_table_has_a_row_for_each_request() -> None:
    found = {"batched": [costs(1.0, answer_s=0.004)], "one_by_one": [costs(2.0)]}
    result = {
        **{mode: figures(made) for mode, made in found.items()},
        "ratio": ratios(found, with_postgres=False),
        "ratio_with_postgres": ratios(found, with_postgres=True),
    }
    console = Console(width=200)
    with console.capture() as captured:
        console.print(command.table(result))
    lines = captured.get().splitlines()
    assert [line.split()[0] for line in lines[1:4]] == [*REQUESTS]
    assert lines[1].split() == [
        "renewal",
        "1.00",
        "+",
        "1.00",
        "ms",
        "2.00",
        "+",
        "1.00",
        "ms",
        "0.50",
        "0.67",
    ]
    assert "4.0 ms" in lines[4]


def test_a_block_measures_what_each_request_costs() -> None:
    found = block(STORE, workers=3, sessions=3, seconds=1.0)
    assert found.store_ms.keys() == found.postgres_ms.keys() == {*REQUESTS}
    assert found.store_ms["creation"] > 0.0
    assert found.idle_share > 0.0
    assert len(found.answers_s) >= 3


@pytest.mark.parametrize("module", [module for module, _ in command.modes(None).values()])
def test_each_mode_is_a_program(module: str) -> None:
    from importlib.util import find_spec

    assert find_spec(module) is not None


def test_the_store_of_another_checkout_is_the_second_mode(tmp_path: Path) -> None:
    package = tmp_path / "turboserve" / "state_store"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("print('another')")
    (batched, same), (before, another) = command.modes(tmp_path).values()
    assert (batched, before, same) == (STORE, STORE, {})
    found = subprocess.run(
        [sys.executable, "-c", f"import {before}"], env={**os.environ, **another}, capture_output=True
    )
    assert found.stdout.decode().strip() == "another"
