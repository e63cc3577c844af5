"""Write Grafana's dashboards from dashboards.yaml.

python deploy/telemetry/generate.py          write grafana/dashboards/*.json
python deploy/telemetry/generate.py --check  fail if a file is out of date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
TABLE = HERE / "dashboards.yaml"
FOLDER = HERE / "grafana" / "dashboards"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
"""Size of a panel in the 24 columns of Grafana's grid, and panels in a row."""
SOURCE = {"type": "prometheus", "uid": "prometheus"}


def rendered(dashboard: dict[str, Any]) -> dict[str, Any]:
    """Return the dashboard in Grafana's JSON model, schema version 39."""
    variables = []
    if "job" in dashboard:
        job = dashboard["job"]
        query = f'label_values(up{{job="{job}"}}, instance)'
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
        "uid": dashboard["uid"],
        "title": dashboard["title"],
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
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard["panels"])],
    }


def _panel(number: int, panel: dict[str, Any]) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
    defaults: dict[str, Any] = {"unit": panel["unit"], "custom": custom}
    if not panel.get("negative"):
        defaults["min"] = 0
    if panel.get("stacked"):
        custom |= {"fillOpacity": 30, "stacking": {"mode": "normal", "group": "A"}}
    return {
        "id": number + 1,
        "title": panel["title"],
        "description": panel["meaning"],
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
                "expr": line["expr"],
                "legendFormat": line["legend"],
                "range": True,
                "exemplar": False,
            }
            for index, line in enumerate(panel["lines"])
        ],
    }


def main(words: list[str]) -> int:
    wanted = {
        FOLDER / f"{dashboard['uid'].removeprefix('turboserve-')}.json": json.dumps(
            rendered(dashboard), indent=2, ensure_ascii=False
        )
        + "\n"
        for dashboard in yaml.safe_load(TABLE.read_text(encoding="utf-8"))
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
