"""Dashboards and alert rules name metrics that exist; alerts fire when they should, and not otherwise."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest
import yaml
from fastapi import FastAPI
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, CollectorRegistry

from turboserve.cli.reference import tables_in
from turboserve.telemetry_names import COMPONENTS

ROOT = Path(__file__).resolve().parents[2]
TELEMETRY = ROOT / "deploy" / "telemetry"
DASHBOARDS = sorted((TELEMETRY / "grafana" / "dashboards").glob("*.json"))
MONITOR = ROOT / "docs" / "how-to" / "monitor.md"
SERVICES = {service for service in COMPONENTS.values() if service != "all"}
EVERY = {"job", "instance"}
"""Labels that Prometheus gives to every series."""

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing (Debian's package prometheus has it)"
)


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((TELEMETRY / "alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Yield (where, expression) of every panel and every alert."""
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{file.name}: {panel['title']}", target["expr"].replace("$__rate_interval", "1m")
    for rule in rules():
        yield rule["alert"], rule["expr"]


@cache
def declared() -> dict[str, set[str]]:
    """Series as Prometheus reads them → their labels.

    TurboServe's are those of the reference, which a test compares with what the services declare.
    """
    found: dict[str, set[str]] = {"up": set(), "ALERTS": {"alertname", "alertstate"}}
    table = tables_in((ROOT / "docs" / "reference" / "metrics.md").read_text())["metrics"]
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.split(" | ")]
        attributes = {name.replace(".", "_") for name in re.findall(r"`([^`]+)`", cells[4])}
        add(found, cells[1].strip("`"), cells[3], attributes)
    for family in REGISTRY.collect():
        if family.name.startswith("process_"):
            add(found, family.samples[0].name if family.samples else family.name, family.type, set())
    name, labels = asyncio.run(fastapi_histogram())
    add(found, name, "histogram", labels)
    return found


def add(found: dict[str, set[str]], name: str, kind: str, labels: set[str]) -> None:
    if kind == "histogram":
        found |= {f"{name}_sum": labels, f"{name}_count": labels, f"{name}_bucket": {*labels, "le"}}
    else:
        found[name] = labels


async def fastapi_histogram() -> tuple[str, set[str]]:
    """Return the name and the labels of the histogram of requests that FastAPI records, from one request."""
    registry = CollectorRegistry()
    reader = PrometheusMetricReader()
    app = FastAPI(telemetry={"meter_provider": MeterProvider([reader])})

    @app.get("/here/{name}")
    async def here(name: str) -> str:
        return name

    registry.register(reader._collector)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        await client.get("/here/x")
    for family in registry.collect():
        if family.name.startswith("http_server_request_duration"):
            return family.name, set(family.samples[0].labels) - {"le"}
    raise AssertionError("FastAPI records no duration of requests")


def selectors(expression: str) -> Iterator[tuple[promql.VectorSelector, set[str]]]:
    """Yield each selector of an expression, with the labels by which its aggregations group."""

    def walk(node: Any, grouped: set[str]) -> Iterator[tuple[promql.VectorSelector, set[str]]]:
        match node:
            case promql.VectorSelector():
                yield node, grouped
            case promql.MatrixSelector():
                yield node.vector_selector, grouped
            case promql.AggregateExpr():
                yield from walk(node.expr, grouped | set(node.modifier.labels if node.modifier else ()))
            case promql.BinaryExpr():
                yield from walk(node.lhs, grouped)
                yield from walk(node.rhs, grouped)
            case promql.Call():
                for argument in node.args:
                    yield from walk(argument, grouped)
            case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
                yield from walk(node.expr, grouped)
            case promql.NumberLiteral() | promql.StringLiteral():
                return
            case _:
                raise AssertionError(f"{type(node).__name__} is not known to this test")

    return walk(promql.parse(expression), set())


def test_the_dashboards_are_those_of_the_generator() -> None:
    done = subprocess.run(
        [sys.executable, str(TELEMETRY / "generate.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_expression_names_series_and_labels_that_exist() -> None:
    wrong = []
    for where, expression in expressions():
        for selector, grouped in selectors(expression):
            if selector.name not in declared():
                wrong.append(f"{where}: no series {selector.name}")
                continue
            labels = grouped | {matcher.name for matcher in selector.matchers.matchers}
            if surplus := labels - declared()[selector.name] - EVERY:
                wrong.append(f"{where}: {selector.name} has no label {', '.join(sorted(surplus))}")
            for matcher in selector.matchers.matchers:
                if matcher.name == "job" and matcher.value not in SERVICES:
                    wrong.append(f"{where}: no job {matcher.value}")
    assert not wrong


def test_every_legend_names_labels_that_its_expression_keeps() -> None:
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                expression = target["expr"].replace("$__rate_interval", "1m")
                for selector, grouped in selectors(expression):
                    kept = grouped or declared()[str(selector.name)] | EVERY
                    assert shown <= kept, f"{file.name}: {panel['title']}: {target['legendFormat']}"


def test_each_dashboard_has_its_own_place_and_a_source_that_is_provisioned() -> None:
    sources = yaml.safe_load((TELEMETRY / "grafana" / "datasources.yaml").read_text())["datasources"]
    boards = [json.loads(file.read_text()) for file in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len(boards) == 5
    for board in boards:
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        for panel in board["panels"]:
            assert panel["datasource"]["uid"] in {source["uid"] for source in sources}
            assert panel["description"]
        for one, other in combinations([panel["gridPos"] for panel in board["panels"]], 2):
            apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        picks = {variable["name"] for variable in board["templating"]["list"]}
        used = set(re.findall(r"\$(\w+)", " ".join(t["expr"] for p in board["panels"] for t in p["targets"])))
        assert used - {"__rate_interval"} <= picks


def test_the_containers_are_pinned_and_closed_to_other_machines() -> None:
    ours = yaml.safe_load((TELEMETRY / "compose.yaml").read_text())
    stack = yaml.safe_load((ROOT / "compose.yaml").read_text())
    scraped = {
        job["job_name"]: job["dns_sd_configs"][0]["names"]
        for job in yaml.safe_load((TELEMETRY / "prometheus.yaml").read_text())["scrape_configs"]
    }
    assert scraped == {service: [service] for service in SERVICES}
    assert set(stack["services"]) >= SERVICES
    for name, service in ours["services"].items():
        if name in SERVICES:
            assert service == {"environment": {"TURBOSERVE_OTLP_ENDPOINT": "http://collector:4318"}}
            continue
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in ours["volumes"] or (ROOT / source).exists(), volume


def test_every_alert_has_a_section_of_the_runbook() -> None:
    headings = set(re.findall(r"^#+ (.+)$", MONITOR.read_text(), re.MULTILINE))
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert ROOT / page == MONITOR
        assert anchor == rule["alert"].lower()
        assert rule["alert"] in headings, f"{rule['alert']} has no heading"
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"]


LATE = "turboserve_worker_session_lateness_seconds_count"
CHUNKS = "turboserve_worker_chunks_total"
STALLS, DELIVERED = "turboserve_gateway_stalls_total", "turboserve_gateway_chunks_delivered_total"
MIGRATIONS = "turboserve_state_store_migrations_total"
COMMITS = f'{MIGRATIONS}{{turboserve_migration_step="commit"}}'
ABANDONS = f'{MIGRATIONS}{{turboserve_migration_step="abandon"}}'
HTTP = 'http_server_request_duration_seconds_count{job="gateway", http_response_status_code="%s"}'
POOL = 'turboserve_autoscaler_%s{instance="a"}'
SKIPPED = 'turboserve_bus_messages_skipped_total{job="worker", turboserve_reason="%s"}'
UP = {f'up{{job="{job}", instance="{job}:1"}}': "1x80" for job in sorted(SERVICES)}


def slow(metric: str, below: str, above: str, *, late: bool) -> dict[str, str]:
    """A histogram of which half of the values, or none, lie above the bound `below`."""
    return {
        f'{metric}_bucket{{le="{below}"}}': "0+1x80" if late else "0+2x80",
        f'{metric}_bucket{{le="{above}"}}': "0+2x80",
        f'{metric}_bucket{{le="+Inf"}}': "0+2x80",
    }


TTFC = "turboserve_gateway_time_to_first_chunk_seconds"
PROMPT = "turboserve_state_store_prompt_duration_seconds"
REQUEST = "turboserve_state_store_request_duration_seconds"

# Alert → series with which it fires, and series with which it does not. One value each 15 s.
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "ServiceAbsent": ({'up{job="worker", instance="worker:1"}': "_x80"}, {}),
    "ProcessDown": (
        {'up{job="worker", instance="worker:2"}': "0x80"},
        # A process that left is no longer listed.
        {'up{job="worker", instance="worker:2"}': "1x40 stale"},
    ),
    "NotReady": (
        {'turboserve_process_condition{turboserve_condition="postgres"}': "0x80"},
        {'turboserve_process_condition{turboserve_condition="postgres"}': "1x77 0x3"},
    ),
    "WarningGiven": (
        {'turboserve_process_warning{turboserve_warning="redis"}': "1x80"},
        {'turboserve_process_warning{turboserve_warning="redis"}': "1x40 stale"},
    ),
    "ViewersStall": (
        {STALLS: "0+2x80", DELIVERED: "0+200x80"},
        {STALLS: "0+0x60 2+0x20", DELIVERED: "0+20x80"},
    ),
    "ChunksLate": ({LATE: "0+2x80", CHUNKS: "0+100x80"}, {LATE: "0+1x80", CHUNKS: "0+200x80"}),
    "FirstChunkSlow": (slow(TTFC, "5.0", "10.0", late=True), slow(TTFC, "5.0", "10.0", late=False)),
    "PromptsSlow": (slow(PROMPT, "10.0", "30.0", late=True), slow(PROMPT, "10.0", "30.0", late=False)),
    "QualityLowered": (
        {"turboserve_worker_quality_debt": "0.4x80"},
        {"turboserve_worker_quality_debt": "0x50 0.4x30"},
    ),
    "SessionsWait": (
        {"turboserve_scheduler_sessions_waiting": "3x80"},
        {"turboserve_scheduler_sessions_waiting": "0x76 3x4"},
    ),
    "PoolAtMaximum": (
        {
            POOL % "sessions_required": "9x80",
            POOL % "sessions_capacity": "8x80",
            POOL % "workers_target": "2x80",
            POOL % "workers_maximum": "2x80",
        },
        {
            POOL % "sessions_required": "9x80",
            POOL % "sessions_capacity": "8x80",
            POOL % "workers_target": "2x80",
            POOL % "workers_maximum": "4x80",
        },
    ),
    "LoadFeedbackStale": ({POOL % "feedback_stale": "1x80"}, {POOL % "feedback_stale": "0x80"}),
    "WorkersLost": (
        {"turboserve_scheduler_workers_declared_gone_total": "0x50 1x30"},
        {"turboserve_scheduler_workers_declared_gone_total": "0x20 1x60"},
    ),
    "SessionsFail": (
        {"turboserve_worker_sessions_failed_total": "0x50 1x30"},
        {"turboserve_worker_sessions_failed_total": "1x80"},
    ),
    "MigrationsAbandoned": ({COMMITS: "0+1x80", ABANDONS: "0+1x80"}, {COMMITS: "0+9x80", ABANDONS: "0+1x80"}),
    "NoLeader": (
        {
            'turboserve_scheduler_leads{instance="a"}': "0x80",
            'turboserve_scheduler_leads{instance="b"}': "0x80",
        },
        {
            'turboserve_scheduler_leads{instance="a"}': "0x80",
            'turboserve_scheduler_leads{instance="b"}': "1x80",
        },
    ),
    "NoPoolLeader": (
        {
            # Another pool has a leader.
            'turboserve_autoscaler_leads{instance="a",turboserve_pool="one"}': "0x80",
            'turboserve_autoscaler_leads{instance="b",turboserve_pool="one"}': "0x80",
            'turboserve_autoscaler_leads{instance="c",turboserve_pool="two"}': "1x80",
        },
        {
            'turboserve_autoscaler_leads{instance="a",turboserve_pool="one"}': "0x80",
            'turboserve_autoscaler_leads{instance="b",turboserve_pool="one"}': "1x80",
            'turboserve_autoscaler_leads{instance="c",turboserve_pool="two"}': "1x80",
        },
    ),
    "OutboxLags": (
        {"turboserve_state_store_outbox_lag_seconds": "8x80"},
        {"turboserve_state_store_outbox_lag_seconds": "0.2x80"},
    ),
    "LogRefusesAppends": (
        {'turboserve_state_store_log_accepts{turboserve_log_stream="CHUNKS"}': "0x80"},
        {'turboserve_state_store_log_accepts{turboserve_log_stream="CHUNKS"}': "1x80"},
    ),
    "LogSpaceLow": (
        {"turboserve_state_store_log_space": "1x80"},
        {"turboserve_state_store_log_space": "0x80"},
    ),
    "StateStoreSlow": (slow(REQUEST, "1.0", "2.0", late=True), slow(REQUEST, "1.0", "2.0", late=False)),
    "RequestsFail": (
        {HTTP % "200": "0+100x80", HTTP % "503": "0+5x80"},
        {HTTP % "200": "0+100x80", HTTP % "404": "0+5x80"},
    ),
    "KeysGuessed": (
        {'turboserve_gateway_keys_refused_total{turboserve_reason="throttled"}': "_x70 1x10"},
        {'turboserve_gateway_keys_refused_total{turboserve_reason="unknown"}': "0+1x80"},
    ),
    "SchemaVersionsDiffer": (
        {SKIPPED % "version": "_x70 1x10"},
        {SKIPPED % "version": "1x80", SKIPPED % "content": "0+1x80"},
    ),
}


def unit(name: str, series: dict[str, str], firing: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "interval": "15s",
        "input_series": [{"series": key, "values": values} for key, values in (UP | series).items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "19m30s",
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in firing],
            }
        ],
    }


def test_every_alert_has_a_case_with_series_that_exist() -> None:
    assert list(CASES) == [rule["alert"] for rule in rules()]
    for series in (one for case in CASES.values() for each in case for one in each):
        [(selector, _)] = selectors(series)
        assert {matcher.name for matcher in selector.matchers.matchers} <= declared()[
            str(selector.name)
        ] | EVERY


@needs_promtool
def test_alerts_fire_when_they_should_and_not_otherwise(tmp_path: Path) -> None:
    units = [unit(f"{alert} fires", fires, [alert]) for alert, (fires, _) in CASES.items()]
    units += [unit(f"{alert} does not fire", quiet, []) for alert, (_, quiet) in CASES.items()]
    file = tmp_path / "cases.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(TELEMETRY / "alerts.yaml")],
                "evaluation_interval": "15s",
                "tests": units,
            }
        )
    )
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_its_configuration() -> None:
    command = ["promtool", "check", "config", str(TELEMETRY / "prometheus.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
