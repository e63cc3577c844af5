"""Write the files that pods mount from their sources in this repository, as ConfigMaps in */files.yaml.

    python deploy/kubernetes/generate.py               write them
    python deploy/kubernetes/generate.py --check       fail if one is out of date
    python deploy/kubernetes/generate.py --workers 32  with so many identities of workers
    python deploy/kubernetes/generate.py --secrets     print Secrets with new passwords and a new API key

The broker's configuration has one user for each identity of a worker, and one for all decode workers. A pool
that replaces a worker needs one identity more than it has workers. The Secrets fit the identities of the same
call. They are for a new deployment: all their passwords are new.
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from turboserve.broker_accounts import account_of, worker_user
from turboserve.gateway.auth.hashing import new_key

HERE = Path(__file__).resolve().parent
DEPLOY = HERE.parent
TELEMETRY = DEPLOY / "telemetry"
SCRIPTS = ("watchdog.sh", "postgres_probe.sh", "postgres_role.sh")
SERVICES = ("gateway", "scheduler", "autoscaler", "state-store", "recorder", "webhooks")
MOST_WORKERS = 256
MOST_BYTES = 230_000
"""Size of a file with accounts. kubectl keeps an applied object in an annotation of 256 KiB at most."""
ACCOUNT_FILES = 6
"""Number of ConfigMaps with accounts that the broker's pods mount, where there are so many."""
OF_BROKER = ("SYS", "WATCHDOG")
"""Accounts that differ between one server and a cluster."""
DECODE = "decode"
"""Identity of the decode workers. No pool's worker has it."""
HEAD = "# Made by deploy/kubernetes/generate.py from files of deploy/: change those, then run it again.\n"


class _Literal(str):
    """Text that YAML shows as lines."""


yaml.SafeDumper.add_representer(
    _Literal, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")
)


def identities(count: int) -> list[str]:
    return [f"wk{number}" for number in range(count)]


def files(workers: int) -> dict[Path, str]:
    """Return the text of each file, by its path."""
    scripts = {name: (DEPLOY / name).read_text() for name in SCRIPTS}
    broker, accounts = divided(_broker(workers, "--workers"))
    cluster, same = divided(_broker(workers, "--cluster-workers"))
    assert same == accounts, "the accounts of a cluster are those of one server"
    return {
        HERE / "base" / "files.yaml": _text(
            _config_map("turboserve-files", {"nats.conf": broker, **scripts}),
            *(_config_map(f"turboserve-{Path(name).stem}", {name: text}) for name, text in accounts.items()),
        ),
        HERE / "nats-cluster" / "files.yaml": _text(
            _config_map("turboserve-nats-cluster", {"nats-cluster.conf": cluster})
        ),
        HERE / "telemetry" / "files.yaml": _text(
            _config_map("turboserve-collector", _read(TELEMETRY / "collector.yaml")),
            _config_map("turboserve-alerts", _read(TELEMETRY / "alerts.yaml")),
            # Grafana's sidecar reads the ConfigMaps with this label. An object of its own for each dashboard,
            # because kubectl keeps an applied object in an annotation of 256 KiB at most.
            *(
                _config_map(f"turboserve-dashboard-{path.stem}", _read(path), {"grafana_dashboard": "1"})
                for path in sorted((TELEMETRY / "grafana" / "dashboards").glob("*.json"))
            ),
        ),
    }


def divided(configuration: str) -> tuple[str, dict[str, str]]:
    """Return a broker's configuration, and the files with accounts that it includes. None if it is small."""
    if len(configuration) <= MOST_BYTES:
        return configuration, {}
    head, _, block = configuration.partition("\naccounts {\n")
    parts, own = [""], ""
    for account in re.split(r"(?m)^(?=  [A-Z0-9_]+ \{$)", block.removesuffix("}\n")):
        if account.startswith(tuple(f"  {name} {{" for name in OF_BROKER)):
            own += account
            continue
        if len(parts[-1]) + len(account) > MOST_BYTES:
            parts.append("")
        parts[-1] += account
    files = {f"accounts-{number}.conf": text for number, text in enumerate(parts, 1)}
    included = "".join(f'  include "{name}"\n' for name in files)
    return f"{head}\naccounts {{\n{own}{included}}}\n", files


def _broker(workers: int, option: str) -> str:
    command = [sys.executable, str(DEPLOY / "nats" / "generate.py"), option, *identities(workers), DECODE]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _read(path: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8")}


def _config_map(name: str, data: dict[str, str], labels: dict[str, str] | None = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name} | ({"labels": labels} if labels else {})
    literals = {file: _Literal(text) for file, text in data.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": literals}


def _text(*documents: dict[str, Any]) -> str:
    return HEAD + yaml.safe_dump_all(documents, sort_keys=False, width=200, allow_unicode=True)


def made_secrets(workers: int) -> dict[str, dict[str, str]]:
    """Return the data of each Secret, with new random passwords. Each service gets only what it needs."""
    broker = {name: _password() for name in SERVICES}
    of_worker = {name: _password() for name in identities(workers)}
    redis, postgres, services, decode = (_password() for _ in range(4))
    made = {f"turboserve-{name}": {"nats-password": password} for name, password in broker.items()}
    made["turboserve-gateway"]["api-keys"] = f"{new_key()[1]}=default"
    made["turboserve-state-store"] |= {
        "redis-url": f"redis://:{redis}@redis:6379/0",
        "postgres-url": f"postgresql://turboserve_services:{services}@postgres:5432/turboserve",
    }
    made["turboserve-nats"] = {
        f"NATS_{account_of(user)}_PASSWORD": password
        for user, password in [
            *broker.items(),
            *((worker_user(name), password) for name, password in {**of_worker, DECODE: decode}.items()),
        ]
    }
    # By which the servers of a cluster log in to each other.
    made["turboserve-nats-routes"] = {"password": _password()}
    made["turboserve-webhooks"]["key"] = _password()
    made["turboserve-redis"] = {"password": redis}
    made["turboserve-postgres"] = {"POSTGRES_PASSWORD": postgres, "POSTGRES_SERVICES_PASSWORD": services}
    made["turboserve-worker-identities"] = of_worker
    # By the key, workers and decode workers know each other.
    made["turboserve-decode"] = {"nats-password": decode, "key": _password()}
    return made


def _password() -> str:
    # It starts with a letter: the broker reads what looks like a number as one.
    return f"p{secrets.token_hex(24)}"


def secrets_text(workers: int) -> str:
    documents = [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": "turboserve"},
            "type": "Opaque",
            "stringData": data,
        }
        for name, data in made_secrets(workers).items()
    ]
    return yaml.safe_dump_all(documents, sort_keys=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate what the manifests need.")
    parser.add_argument("--workers", type=int, default=8, help="identities of workers (default: 8)")
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date")
    parser.add_argument("--secrets", action="store_true", help="print Secrets with new passwords")
    chosen = parser.parse_args()
    if not 1 <= chosen.workers <= MOST_WORKERS:
        # As many as a pool may have.
        parser.error(f"--workers: between 1 and {MOST_WORKERS}")
    if chosen.secrets:
        print(secrets_text(chosen.workers), end="")
        return 0
    wanted = files(chosen.workers)
    stale = [
        file for file, text in wanted.items() if not file.exists() or file.read_text(encoding="utf-8") != text
    ]
    if chosen.check:
        for file in stale:
            where = file.relative_to(HERE)
            print(f"{where} is out of date: run python {Path(__file__).name}", file=sys.stderr)
        return int(bool(stale))
    for file in stale:
        file.write_text(wanted[file], encoding="utf-8")
    names = json.dumps(dict.fromkeys(identities(chosen.workers), ""))
    print(f"files written: {len(stale)}; the autoscaler's TURBOSERVE_WORKER_IDENTITIES: {names}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
