"""Write Grafana's dashboards from the table in this file.

    python deploy/telemetry/generate.py          write grafana/dashboards/*.json
    python deploy/telemetry/generate.py --check  fail if a file is out of date

A test compares each expression with the metrics that the services declare. Every expression names a metric as
Prometheus reads it from `/metrics`. `$instance` is the list of processes that a dashboard's user picked.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("grafana") / "dashboards"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
SOURCE = {"type": "prometheus", "uid": "prometheus"}


@dataclass(frozen=True)
class Panel:
    """One plot: its title, what it means, its unit in Grafana, and (expression, legend) of each line."""

    title: str
    meaning: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    stacked: bool = False
    negative: bool = False
    """Whether values may be below 0."""


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    job: str | None
    """The job among whose instances the user may pick. None: no such choice."""
    panels: tuple[Panel, ...]


def quantiles(metric: str, by: str = "", where: str = "") -> tuple[tuple[str, str], ...]:
    """The median and the 99th percentile of a histogram, by the label `by` if it is given."""
    group = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    rate = f"sum by ({group}) (rate({metric}_bucket{where}[$__rate_interval]))"
    return tuple(
        (f"histogram_quantile({q}, {rate})", f"{name}{legend}") for q, name in ((0.5, "p50"), (0.99, "p99"))
    )


def per_second(metric: str, by: str = "", where: str = "") -> tuple[str, str]:
    """The rate of a counter, by the label `by` if it is given."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({metric}{where}[$__rate_interval]))", f"{{{{{by}}}}}" if by else "all"


PICKED = '{instance=~"$instance"}'

VIEWERS = Dashboard(
    "turboserve-viewers",
    "TurboServe: viewers",
    None,
    (
        Panel(
            "Time to first chunk",
            "From the request for a session to its first chunk sent to a viewer.",
            "s",
            quantiles("turboserve_gateway_time_to_first_chunk_seconds"),
        ),
        Panel(
            "Stalls",
            "Times per minute that a viewer ran out of video while it should play.",
            "short",
            (("60 * sum(rate(turboserve_gateway_stalls_total[$__rate_interval]))", "stalls a minute"),),
        ),
        Panel(
            "Length of a stall",
            "How long viewers had no video.",
            "s",
            quantiles("turboserve_gateway_stall_duration_seconds"),
        ),
        Panel(
            "Lateness",
            "How late the chunks were that were published too late for their viewer.",
            "s",
            quantiles("turboserve_worker_session_lateness_seconds"),
        ),
        Panel(
            "Share of late chunks",
            "Chunks that were published too late for their viewer, of all chunks.",
            "percentunit",
            (
                (
                    "sum(rate(turboserve_worker_session_lateness_seconds_count[$__rate_interval])) / "
                    "sum(rate(turboserve_worker_chunks_total[$__rate_interval]))",
                    "late",
                ),
            ),
        ),
        Panel(
            "Playout slack when a chunk is published",
            "What a viewer had left without the chunk. 0: the chunk was late.",
            "s",
            (
                (
                    "histogram_quantile(0.05, sum by (le) "
                    "(rate(turboserve_worker_session_slack_seconds_bucket[$__rate_interval])))",
                    "p5",
                ),
                (
                    "histogram_quantile(0.5, sum by (le) "
                    "(rate(turboserve_worker_session_slack_seconds_bucket[$__rate_interval])))",
                    "p50",
                ),
                ("min(turboserve_gateway_slack_min_seconds)", "smallest now"),
            ),
            negative=True,
        ),
        Panel(
            "Sessions by tier",
            "Running sessions by service credit: `urgent`, `normal`, `relaxed`.",
            "short",
            (
                (
                    "sum by (turboserve_session_tier) (turboserve_worker_sessions_tier)",
                    "{{turboserve_session_tier}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Prompt to receipt",
            "From the acceptance of a prompt to the chunk that shows it.",
            "s",
            quantiles("turboserve_state_store_prompt_duration_seconds"),
        ),
        Panel(
            "Prompt receipts",
            "Prompts per second by what became of them.",
            "short",
            (per_second("turboserve_state_store_prompts_total", "turboserve_prompt_outcome"),),
        ),
        Panel(
            "Viewers and new sessions",
            "Open video streams, and sessions created per minute.",
            "short",
            (
                ("sum(turboserve_gateway_viewers)", "viewers"),
                (
                    "60 * sum(rate(turboserve_gateway_sessions_created_total[$__rate_interval]))",
                    "sessions a minute",
                ),
            ),
        ),
        Panel(
            "Delivery",
            "From the worker's publication of a chunk to the end of its sending.",
            "s",
            quantiles("turboserve_gateway_delivery_duration_seconds"),
        ),
        Panel(
            "Video sent",
            "All gateways.",
            "Bps",
            (("sum(rate(turboserve_gateway_video_bytes_total[$__rate_interval]))", "video"),),
        ),
        Panel(
            "Refused and cut connections, gaps",
            "Per second, by reason.",
            "short",
            (
                (
                    "sum by (turboserve_reason) "
                    "(rate(turboserve_gateway_connections_refused_total[$__rate_interval]))",
                    "refused: {{turboserve_reason}}",
                ),
                (
                    "sum by (turboserve_reason) "
                    "(rate(turboserve_gateway_connections_cut_total[$__rate_interval]))",
                    "cut: {{turboserve_reason}}",
                ),
                ("sum(rate(turboserve_gateway_gaps_total[$__rate_interval]))", "gaps"),
            ),
        ),
    ),
)

WORKERS = Dashboard(
    "turboserve-workers",
    "TurboServe: workers and engine",
    "worker",
    (
        Panel(
            "Load",
            "Sessions in a slab, active sessions without one, and the number that may hold a slot.",
            "short",
            (
                (f"sum(turboserve_worker_sessions_resident{PICKED})", "in a slab"),
                (f"sum(turboserve_worker_sessions_offloaded{PICKED})", "offloaded"),
                (f"sum(turboserve_worker_capacity{PICKED})", "capacity"),
            ),
        ),
        Panel(
            "Load by worker",
            "Share of the capacity that is taken.",
            "percentunit",
            (
                (
                    f"(turboserve_worker_sessions_resident{PICKED} + "
                    f"turboserve_worker_sessions_offloaded{PICKED}) / turboserve_worker_capacity{PICKED}",
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Chunks",
            "Chunks accepted into the log, per second.",
            "short",
            (per_second("turboserve_worker_chunks_total", "instance", PICKED),),
        ),
        Panel(
            "Batch sizes",
            "Sessions computed at once, as of each chunk.",
            "short",
            quantiles("turboserve_worker_batch_sessions", where=PICKED),
        ),
        Panel(
            "L(b)",
            "Time of one chunk when b sessions are computed at once, at the best fidelity. The largest of "
            "the picked workers.",
            "s",
            (
                (
                    f"max by (turboserve_batch_size) (turboserve_worker_chunk_latency_seconds{PICKED})",
                    "b = {{turboserve_batch_size}}",
                ),
            ),
        ),
        Panel(
            "Computing a chunk",
            "First denoising step to packaging.",
            "s",
            quantiles("turboserve_worker_compute_duration_seconds", where=PICKED),
        ),
        Panel(
            "Appending a chunk",
            "Append to acknowledgement, and chunks that are generated and not acknowledged.",
            "s",
            quantiles("turboserve_worker_publish_duration_seconds", where=PICKED),
        ),
        Panel(
            "Unpublished chunks",
            "Generated and not acknowledged; appends whose outcome was not known.",
            "short",
            (
                (f"turboserve_worker_unpublished_chunks{PICKED}", "{{instance}}"),
                (
                    f"sum(rate(turboserve_worker_publish_retries_total{PICKED}[$__rate_interval]))",
                    "retries a second",
                ),
            ),
        ),
        Panel(
            "Smallest lead",
            "Smallest lead of a session over its playhead.",
            "s",
            ((f"turboserve_worker_lead_seconds{PICKED}", "{{instance}}"),),
        ),
        Panel(
            "Memory of sessions",
            "Slabs on the device, offloaded and suspended sessions on the host.",
            "bytes",
            (
                (f"sum(turboserve_worker_kv_bytes{PICKED})", "slabs"),
                (f"sum(turboserve_worker_offloaded_memory_bytes{PICKED})", "offloaded"),
                (f"sum(turboserve_worker_host_memory_bytes{PICKED})", "suspended"),
            ),
            stacked=True,
        ),
        Panel(
            "Offloaded sessions that return",
            "Per second; late: too late for the next chunk.",
            "short",
            (
                (
                    f"sum(rate(turboserve_worker_residency_returns_total{PICKED}[$__rate_interval]))",
                    "returns",
                ),
                (
                    f"sum(rate(turboserve_worker_residency_late_returns_total{PICKED}[$__rate_interval]))",
                    "late",
                ),
            ),
        ),
        Panel(
            "Fidelity",
            "Mean quality of the chunks of the last minute, and the share that the load has lowered.",
            "percentunit",
            (
                (f"min(turboserve_worker_quality{PICKED})", "lowest mean quality"),
                (f"max(turboserve_worker_quality_debt{PICKED})", "largest lowered share"),
            ),
        ),
        Panel(
            "Expected late chunks",
            "Chunks that will be late even at their lowest fidelity.",
            "short",
            ((f"sum(turboserve_worker_deficit{PICKED})", "chunks"),),
        ),
        Panel(
            "Failures",
            "Failed sessions, refused chunks and takeovers, in the last hour.",
            "short",
            (
                (f"sum(increase(turboserve_worker_sessions_failed_total{PICKED}[1h]))", "failed sessions"),
                (f"sum(increase(turboserve_worker_fenced_total{PICKED}[1h]))", "refused chunks"),
                (
                    "sum by (turboserve_takeover_context) "
                    f"(increase(turboserve_worker_takeovers_total{PICKED}[1h]))",
                    "takeovers: {{turboserve_takeover_context}}",
                ),
            ),
        ),
        Panel(
            "Processor and memory",
            "Of the worker's process on the host.",
            "short",
            (
                (f"rate(process_cpu_seconds_total{PICKED}[$__rate_interval])", "cores: {{instance}}"),
                (f"process_resident_memory_bytes{PICKED} / 1e9", "GB: {{instance}}"),
            ),
        ),
    ),
)

PLACEMENT = Dashboard(
    "turboserve-placement",
    "TurboServe: placement and migrations",
    None,
    (
        Panel(
            "Decisions",
            "Decisions of the scheduler per second, by kind.",
            "short",
            (per_second("turboserve_scheduler_decisions_total", "turboserve_decision_kind"),),
        ),
        Panel(
            "Time of a decision",
            "Time that the scheduler's core takes for one event.",
            "s",
            quantiles("turboserve_scheduler_decision_duration_seconds"),
        ),
        Panel(
            "Waiting sessions",
            "Sessions without a worker.",
            "short",
            (("max(turboserve_scheduler_sessions_waiting)", "waiting"),),
        ),
        Panel(
            "Migrations",
            "Steps per minute. An abandoned migration costs its copy, and the session stays.",
            "short",
            (
                (
                    "60 * sum by (turboserve_migration_step) "
                    "(rate(turboserve_state_store_migrations_total[$__rate_interval]))",
                    "{{turboserve_migration_step}}",
                ),
            ),
        ),
        Panel(
            "Length of a migration",
            "From its begin to its commit or abandonment.",
            "s",
            quantiles("turboserve_state_store_migration_duration_seconds", "turboserve_migration_step"),
        ),
        Panel(
            "Abandoned migrations",
            "Share of the migrations that ended, in the last 15 minutes.",
            "percentunit",
            (
                (
                    'sum(increase(turboserve_state_store_migrations_total{turboserve_migration_step="abandon"}'
                    "[15m])) / sum(increase(turboserve_state_store_migrations_total"
                    '{turboserve_migration_step=~"commit|abandon"}[15m]))',
                    "abandoned",
                ),
            ),
        ),
        Panel(
            "State copied",
            "Bytes per second that workers fetched, by backend.",
            "Bps",
            (per_second("turboserve_worker_transfer_received_bytes_total", "turboserve_transfer_backend"),),
        ),
        Panel(
            "Broken transfers",
            "In the last hour, by role and error.",
            "short",
            (
                (
                    "sum by (turboserve_transfer_role, error_type) "
                    "(increase(turboserve_worker_transfers_broken_total[1h]))",
                    "{{turboserve_transfer_role}}: {{error_type}}",
                ),
            ),
        ),
        Panel(
            "Refusals",
            "Commands and operators' requests that were refused, per second.",
            "short",
            (per_second("turboserve_scheduler_refusals_total", "error_type"),),
        ),
        Panel(
            "Workers known and declared gone",
            "Workers in the leader's view, and workers that exceeded the time-out in the last hour.",
            "short",
            (
                ("max(turboserve_scheduler_workers_known)", "known"),
                ("sum(increase(turboserve_scheduler_workers_declared_gone_total[1h]))", "declared gone"),
            ),
        ),
        Panel(
            "Idle sessions",
            "Sessions suspended because nobody watched them, per minute.",
            "short",
            (
                (
                    "60 * sum(rate(turboserve_scheduler_idle_suspensions_total[$__rate_interval]))",
                    "suspended",
                ),
            ),
        ),
    ),
)

POOL = Dashboard(
    "turboserve-pool",
    "TurboServe: pool and cost",
    "autoscaler",
    (
        Panel(
            "Demand and capacity",
            "Sessions that need a slot, and sessions that the ready workers may hold.",
            "short",
            (
                (f"sum(turboserve_autoscaler_sessions_required{PICKED})", "demand"),
                (f"sum(turboserve_autoscaler_sessions_capacity{PICKED})", "capacity"),
            ),
        ),
        Panel(
            "Workers",
            "By phase, with the target and the maximum.",
            "short",
            (
                (
                    f"sum by (turboserve_pool_member_phase) (turboserve_autoscaler_members{PICKED}) > 0",
                    "{{turboserve_pool_member_phase}}",
                ),
                (f"sum(turboserve_autoscaler_workers_target{PICKED})", "target"),
                (f"sum(turboserve_autoscaler_workers_maximum{PICKED})", "maximum"),
            ),
        ),
        Panel(
            "ρ",
            "Load of the busiest worker, and the share for which the pool is sized.",
            "percentunit",
            (
                (f"max(turboserve_autoscaler_utilization_max{PICKED})", "ρ"),
                (f"max(turboserve_autoscaler_utilization_target{PICKED})", "ρ̂"),
            ),
        ),
        Panel(
            "GPU-seconds",
            "In the last hour, from each worker's launch to its end. `GET /v1/cost` has the money.",
            "s",
            (
                (
                    f"3600 * sum(avg_over_time(turboserve_autoscaler_gpus{PICKED}[1h]))",
                    "in the last hour",
                ),
            ),
        ),
        Panel(
            "GPUs",
            "GPUs of all workers, from their launch to their end.",
            "short",
            ((f"sum(turboserve_autoscaler_gpus{PICKED})", "GPUs"),),
        ),
        Panel(
            "Use of the capacity",
            "Demand as a share of the capacity of the ready workers.",
            "percentunit",
            (
                (
                    f"sum(turboserve_autoscaler_sessions_required{PICKED}) / "
                    f"sum(turboserve_autoscaler_sessions_capacity{PICKED})",
                    "use",
                ),
            ),
        ),
        Panel(
            "Volatility",
            "Standard deviation of new activations per second, in the detector's window.",
            "short",
            ((f"max(turboserve_autoscaler_volatility{PICKED})", "volatility"),),
        ),
        Panel(
            "Actions",
            "Actions of the autoscaler in the last hour.",
            "short",
            (
                (
                    "sum by (turboserve_pool_action) "
                    f"(increase(turboserve_autoscaler_actions_total{PICKED}[1h]))",
                    "{{turboserve_pool_action}}",
                ),
            ),
        ),
        Panel(
            "Stale load feedback",
            "1: the feedback is missing or too old, and the pool does not shrink.",
            "short",
            ((f"max(turboserve_autoscaler_feedback_stale{PICKED})", "stale"),),
        ),
    ),
)

CONTROL = Dashboard(
    "turboserve-control-plane",
    "TurboServe: control plane",
    None,
    (
        Panel(
            "Processes",
            "Processes that Prometheus reaches, by service.",
            "short",
            (("sum by (job) (up)", "{{job}}"),),
        ),
        Panel(
            "Conditions that do not hold",
            "Conditions of readiness: `broker` is NATS, `postgres` the database, `log_…` a stream.",
            "short",
            (
                (
                    "sum by (job, turboserve_condition) (1 - turboserve_process_condition) > 0",
                    "{{job}}: {{turboserve_condition}}",
                ),
            ),
        ),
        Panel(
            "Warnings",
            "Warnings of `/readyz`: `redis`, `log_space`, `schema_version`, `worker_releases`.",
            "short",
            (
                (
                    "sum by (job, turboserve_warning) (turboserve_process_warning)",
                    "{{job}}: {{turboserve_warning}}",
                ),
            ),
        ),
        Panel(
            "Leadership",
            "Schedulers that lead (1 is right), and the number of the term.",
            "short",
            (
                ("sum(turboserve_scheduler_leads)", "leaders"),
                ("max(turboserve_scheduler_term)", "term"),
            ),
        ),
        Panel(
            "HTTP requests",
            "Per second, by status. Streams count when they end.",
            "short",
            (
                per_second(
                    "http_server_request_duration_seconds_count",
                    "http_response_status_code",
                    '{job="gateway"}',
                ),
            ),
        ),
        Panel(
            "Time of an HTTP request",
            "By route, without streams.",
            "s",
            (
                (
                    "histogram_quantile(0.99, sum by (le, http_route) (rate("
                    'http_server_request_duration_seconds_bucket{job="gateway", '
                    'http_route!~".*/(stream|events|stream.mp4)"}[$__rate_interval])))',
                    "p99 {{http_route}}",
                ),
            ),
        ),
        Panel(
            "Time of a request to the state store",
            "99th percentile by endpoint. Most of it is Postgres.",
            "s",
            (
                (
                    "histogram_quantile(0.99, sum by (le, messaging_destination_name) "
                    "(rate(turboserve_state_store_request_duration_seconds_bucket[$__rate_interval])))",
                    "{{messaging_destination_name}}",
                ),
            ),
        ),
        Panel(
            "Refusals of the state store",
            "Requests with an error per second, by its code; compare-and-sets that lost.",
            "short",
            (
                (
                    "sum by (error_type) "
                    '(rate(turboserve_state_store_requests_total{error_type!=""}[$__rate_interval]))',
                    "{{error_type}}",
                ),
                ("sum(rate(turboserve_state_store_conflicts_total[$__rate_interval]))", "lost"),
            ),
        ),
        Panel(
            "Outbox",
            "How long the oldest event has waited for the log, and from commit to log.",
            "s",
            (
                ("max(turboserve_state_store_outbox_lag_seconds)", "oldest"),
                *quantiles("turboserve_state_store_outbox_delay_seconds"),
            ),
        ),
        Panel(
            "Events that wait",
            "Events that are committed and not in the log yet.",
            "short",
            (("max(turboserve_state_store_outbox_backlog)", "events"),),
        ),
        Panel(
            "Room for the log",
            "Share of each stream's maximum that is taken.",
            "percentunit",
            (
                (
                    "max by (turboserve_log_stream) (turboserve_state_store_log_fill)",
                    "{{turboserve_log_stream}}",
                ),
            ),
        ),
        Panel(
            "Free disk of the broker",
            "Free space of the disk of the broker's store.",
            "bytes",
            (("min(turboserve_state_store_log_disk_free_bytes)", "free"),),
        ),
        Panel(
            "Fence",
            "Owners written to the log per second, and those that the broker refused.",
            "short",
            (
                ("sum(rate(turboserve_state_store_fence_writes_total[$__rate_interval]))", "written"),
                ("sum(rate(turboserve_state_store_fence_refused_total[$__rate_interval]))", "refused"),
            ),
        ),
        Panel(
            "Messages that were not read",
            "In the last hour, by reason: `version` is another MAJOR schema version.",
            "short",
            (
                (
                    "sum by (job, turboserve_reason) (increase(turboserve_bus_messages_skipped_total[1h]))",
                    "{{job}}: {{turboserve_reason}}",
                ),
            ),
        ),
        Panel(
            "Refused API keys",
            "Per second, by reason.",
            "short",
            (per_second("turboserve_gateway_keys_refused_total", "turboserve_reason"),),
        ),
        Panel(
            "Processor",
            "Cores that each service uses.",
            "short",
            (per_second("process_cpu_seconds_total", "job"),),
        ),
        Panel(
            "Memory",
            "Resident memory of each service.",
            "bytes",
            (("sum by (job) (process_resident_memory_bytes)", "{{job}}"),),
        ),
    ),
)

DASHBOARDS = (VIEWERS, WORKERS, PLACEMENT, POOL, CONTROL)


def rendered(dashboard: Dashboard) -> dict[str, Any]:
    """Return the dashboard in Grafana's JSON model, schema version 39."""
    variables = []
    if dashboard.job is not None:
        query = f'label_values(up{{job="{dashboard.job}"}}, instance)'
        variables.append(
            {
                "name": "instance",
                "label": "Process",
                "type": "query",
                "datasource": SOURCE,
                "query": {"query": query, "refId": "instance"},
                "definition": query,
                "refresh": 2,
                "includeAll": True,
                "allValue": ".*",
                "multi": True,
                "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            }
        )
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["turboserve"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {
                "title": "TurboServe",
                "type": "dashboards",
                "tags": ["turboserve"],
                "asDropdown": True,
                "includeVars": False,
                "keepTime": True,
            }
        ],
        "templating": {"list": variables},
        "annotations": {"list": []},
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": custom}
    if not panel.negative:
        defaults["min"] = 0
    if panel.stacked:
        custom |= {"fillOpacity": 30, "stacking": {"mode": "normal", "group": "A"}}
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.meaning,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "range": True,
                "exemplar": False,
            }
            for index, (expression, legend) in enumerate(panel.lines)
        ],
    }


def main(words: list[str]) -> int:
    wanted = {
        FOLDER / f"{dashboard.uid.removeprefix('turboserve-')}.json": json.dumps(
            rendered(dashboard), indent=2, ensure_ascii=False
        )
        + "\n"
        for dashboard in DASHBOARDS
    }
    stale = [
        path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    surplus = [path for path in sorted(FOLDER.glob("*.json")) if path not in wanted]
    if words == ["--check"]:
        for path in (*stale, *surplus):
            print(f"{path.name} is out of date: run python deploy/telemetry/generate.py", file=sys.stderr)
        return 1 if stale or surplus else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    for path in surplus:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
