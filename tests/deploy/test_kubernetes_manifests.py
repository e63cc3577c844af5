"""The manifests for Kubernetes: valid for two of its versions, and in agreement with the code."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.webhooks.test_webhooks_addresses import PUBLIC, SPECIAL
from turboserve.autoscaler.providers.kubernetes_pod import checked_template, pod_of
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.broker_accounts import worker_user
from turboserve.cli.embedded.binaries import nats_server
from turboserve.cli.stack.options import MOST_WORKERS
from turboserve.gateway.auth import key_list
from turboserve.gateway.auth.access import Keys
from turboserve.gateway.settings import Settings as GatewaySettings
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.state_store.settings import Settings as StateStoreSettings
from turboserve.webhooks.core.addresses import is_public
from turboserve.webhooks.settings import Settings as WebhooksSettings
from turboserve.worker.settings import Settings as WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
GENERATE = FOLDER / "generate.py"
VERSIONS = ("1.34", "1.37")
SETTINGS: dict[str, Any] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "autoscaler": AutoscalerSettings,
    "state-store": StateStoreSettings,
    "webhooks": WebhooksSettings,
    "worker": WorkerSettings,
}
Json = dict[str, Any]


def _load(path: Path) -> list[Json]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def _kustomization(folder: str) -> Json:
    [content] = _load(FOLDER / folder / "kustomization.yaml")
    return content


MANIFESTS = [
    (path, document) for path in sorted((FOLDER / "base").glob("*.yaml")) for document in _load(path)
    if path.name != "kustomization.yaml"
]  # fmt: skip
TEMPLATES = {
    folder: yaml.safe_load(document["data"]["pod.yaml"])
    for folder, file in (("base", "autoscaler.yaml"), ("gpu", "worker.yaml"))
    for document in _load(FOLDER / folder / file)
    if document["kind"] == "ConfigMap"
}


def _of_kind(kind: str) -> dict[str, Json]:
    return {document["metadata"]["name"]: document for _, document in MANIFESTS if document["kind"] == kind}


def _workloads() -> dict[str, Json]:
    return _of_kind("Deployment") | _of_kind("StatefulSet")


def _container(workload: Json) -> Json:
    [container] = workload["spec"]["template"]["spec"]["containers"]
    found: Json = container
    return found


@pytest.fixture(scope="module")
def made_secrets() -> dict[str, dict[str, str]]:
    done = subprocess.run(
        [sys.executable, str(GENERATE), "--secrets"], capture_output=True, text=True, check=True
    )
    return {
        document["metadata"]["name"]: document["stringData"] for document in yaml.safe_load_all(done.stdout)
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid(version: str) -> None:
    assert len(MANIFESTS) > 20
    for path, document in MANIFESTS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            pytest.fail(f"{path.name}, {document['kind']}, {version}: {error}")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_the_pod_of_a_worker_is_valid(folder: str, version: str) -> None:
    template = checked_template(TEMPLATES[folder])
    pod = pod_of(template, "pool", "local-0", "wk0_1", {"TURBOSERVE_WORKER_ID": "wk0_1"}, {"A": ("s", "wk0")})
    kubernetes_validate.validate(pod, version, strict=True)


def test_a_field_that_does_not_exist_is_found() -> None:
    broken = {**_of_kind("Service")["gateway"], "spec": {"port": 80}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_the_kustomizations_name_every_file() -> None:
    base = _kustomization("base")
    files = {path.name for path in (FOLDER / "base").glob("*.yaml")}
    assert set(base["resources"]) == files - {"kustomization.yaml"}
    used = {_container(workload)["image"] for workload in _workloads().values()}
    named = {image["name"] for image in base["images"]}
    assert used - named == {"redis:7", "postgres:17"}
    assert named <= used
    gpu = _kustomization("gpu")
    assert [patch["path"] for patch in gpu["patches"]] == ["worker.yaml"]
    [patched] = _load(FOLDER / "gpu" / "worker.yaml")
    assert (patched["kind"], patched["metadata"]["name"]) == ("ConfigMap", "turboserve-worker")


@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_gets_settings_that_it_has(service: str) -> None:
    known = {f"TURBOSERVE_{name.upper()}" for name in SETTINGS[service].model_fields}
    containers = (
        [template["spec"]["containers"][0] for template in TEMPLATES.values()]
        if service == "worker"
        else [_container(_workloads()[service])]
    )
    for container in containers:
        names = [variable["name"] for variable in container["env"]]
        assert len(names) == len(set(names))
        assert set(names) <= known, set(names) - known


def test_the_autoscaler_can_do_what_its_provider_does_and_no_more() -> None:
    [rule] = _of_kind("Role")["autoscaler"]["rules"]
    assert rule["resources"] == ["pods"]
    source = (ROOT / "services/autoscaler/turboserve/autoscaler/providers/kubernetes_cluster.py").read_text()
    verbs = {"GET": {"get", "list", "watch"}, "POST": {"create"}, "PATCH": {"patch"}, "DELETE": {"delete"}}
    methods = set(re.findall(r'"(GET|POST|PUT|PATCH|DELETE)"', source))
    assert set(rule["verbs"]) == set().union(*(verbs[method] for method in methods))
    with_token = {
        name
        for name, workload in _workloads().items()
        if workload["spec"]["template"]["spec"]["automountServiceAccountToken"]
    }
    assert with_token == {"autoscaler"}
    assert not any(template["spec"]["automountServiceAccountToken"] for template in TEMPLATES.values())


def test_the_autoscalers_settings_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in _container(_workloads()["autoscaler"])["env"]:
        # The base has no value for what components add.
        if not variable.get("valueFrom", {}).get("configMapKeyRef", {}).get("optional"):
            monkeypatch.setenv(variable["name"], variable.get("value", "turboserve"))
    settings = AutoscalerSettings()
    assert settings.provider == "kubernetes"
    # A worker that is replaced still has its identity while the next one starts.
    assert len(settings.worker_identities) > settings.limits[1]
    assert all(not password.get_secret_value() for password in settings.worker_identities.values())


def test_every_secret_that_is_used_is_made(made_secrets: dict[str, dict[str, str]]) -> None:
    used: dict[str, set[str]] = {}
    for name, workload in _workloads().items():
        container = _container(workload)
        for variable in container.get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference:
                assert reference["key"] in made_secrets[reference["name"]]
                used.setdefault(reference["name"], set()).add(name)
        for source in container.get("envFrom", []):
            used.setdefault(source["secretRef"]["name"], set()).add(name)
    # Each Secret belongs to one workload, or to the workers.
    assert {name: users for name, users in used.items() if len(users) > 1} == {}
    of_components = {"turboserve-nats-routes", "turboserve-decode"}
    assert made_secrets.keys() - used.keys() == {"turboserve-worker-identities", *of_components}
    identities = json.loads(
        next(
            variable["value"]
            for variable in _container(_workloads()["autoscaler"])["env"]
            if variable["name"] == "TURBOSERVE_WORKER_IDENTITIES"
        )
    )
    assert made_secrets["turboserve-worker-identities"].keys() == identities.keys()
    keys = Keys(key_list.parse(made_secrets["turboserve-gateway"]["api-keys"]), ["default"])
    assert keys.identify(made_secrets["turboserve-gateway"]["api-keys"].partition("=")[0]) is not None


def test_the_broker_takes_its_configuration_and_the_passwords(
    made_secrets: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    done = subprocess.run([sys.executable, str(GENERATE), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    configuration = _of_kind("ConfigMap")["turboserve-files"]["data"]["nats.conf"]
    assert f'user: "{worker_user("wk7")}"' in configuration
    file = tmp_path / "nats.conf"
    file.write_text(configuration)
    own = dict.fromkeys(("NATS_HEALTH_PASSWORD", "NATS_WATCHDOG_PASSWORD"), "p0123456789abcdef")
    given = {**made_secrets["turboserve-nats"], "NATS_MAX_FILE_STORE": "1048576", **own}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NATS_")}
    command = [str(nats_server()), "-t", "-c", str(file)]
    done = subprocess.run(command, env={**inherited, **given}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Without one of them it refuses, so that the check above shows that none is missing.
    del given["NATS_WORKER_WK7_PASSWORD"]
    assert subprocess.run(command, env={**inherited, **given}, capture_output=True).returncode != 0


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate", GENERATE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kubectl_can_apply_the_configuration_of_the_most_workers(tmp_path: Path) -> None:
    """kubectl keeps an applied object in an annotation. Incident: that of 96 workers had grown too large."""
    module = generator()
    most = module.MOST_WORKERS
    assert most == MOST_WORKERS
    made: dict[str, str] = {}
    for text in module.files(most).values():
        for document in yaml.safe_load_all(text):
            assert len(json.dumps(document)) < 256 * 1024 - 256, document["metadata"]["name"]
            made |= document["data"]
    for document in yaml.safe_load_all(module.secrets_text(most)):
        assert len(json.dumps(document)) < 256 * 1024 - 256, document["metadata"]["name"]
    # The pods mount all of it in one folder, in which the broker finds what its configuration includes.
    names = {f"turboserve-accounts-{number}" for number in range(1, module.ACCOUNT_FILES + 1)}
    files = {name: text for name, text in made.items() if name.endswith(".conf")}
    accounts = {f"turboserve-{name.removesuffix('.conf')}" for name in files if name.startswith("accounts-")}
    assert accounts <= names
    for folder in ("base", "nats-cluster"):
        for document in yaml.safe_load_all((FOLDER / folder / "nats.yaml").read_text()):
            if document["kind"] == "StatefulSet":
                [volume] = document["spec"]["template"]["spec"]["volumes"]
                sources = [one["configMap"] for one in volume["projected"]["sources"]]
                assert {one["name"] for one in sources if one.get("optional")} == names
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    given = module.made_secrets(most)["turboserve-nats"]
    given |= dict.fromkeys(("NATS_HEALTH_PASSWORD", "NATS_WATCHDOG_PASSWORD"), "p0123456789abcdef")
    given |= {"NATS_MAX_FILE_STORE": "1048576", "NATS_SERVER_NAME": "nats-cluster-0"}
    given |= {"NATS_ROUTE_PASSWORD": "p0123456789abcdef"}
    given |= {f"NATS_ROUTE_{number}": f"nats-route://route:p@h{number}:6222" for number in (1, 2, 3)}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NATS_")}
    for name in ("nats.conf", "nats-cluster.conf"):
        command = [str(nats_server()), "-t", "-c", str(tmp_path / name)]
        done = subprocess.run(
            command, env={**inherited, **given}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    # Every account is read: without a worker's password the broker refuses.
    del given[f"NATS_WORKER_WK{most - 1}_PASSWORD"]
    assert subprocess.run(command, env={**inherited, **given}, capture_output=True).returncode != 0


def test_secrets_differ_with_each_call() -> None:
    module = generator()
    values = [value for _ in range(2) for data in module.made_secrets(3).values() for value in data.values()]
    passwords = {found for value in values for found in re.findall(r"[a-z0-9_]{45,}", value)}
    # 6 services, 3 workers, Redis, 2 of Postgres, 1 API key, 1 of webhooks, 1 of routes, 2 of decode workers;
    # twice.
    assert len(passwords) == 2 * 17


def test_pods_follow_the_restricted_policy() -> None:
    [namespace] = _of_kind("Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    specs = [workload["spec"]["template"]["spec"] for workload in _workloads().values()]
    specs += [template["spec"] for template in TEMPLATES.values()]
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


def test_webhooks_reach_public_addresses_and_the_broker_alone() -> None:
    policy = _of_kind("NetworkPolicy")["webhooks"]["spec"]
    assert policy["policyTypes"] == ["Egress"]
    broker, names, public = policy["egress"]
    assert broker["to"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "nats"}}}]
    assert {entry["port"] for entry in names["ports"]} == {53}
    blocks = [
        (ip_network(peer["ipBlock"]["cidr"]), [ip_network(one) for one in peer["ipBlock"]["except"]])
        for peer in public["to"]
    ]

    def reached(address: str) -> bool:
        found = ip_address(address)
        return any(found in block and not any(found in one for one in but) for block, but in blocks)

    assert [address for address in SPECIAL if reached(address)] == []
    assert all(reached(address) for address in PUBLIC if not address.startswith("64:ff9b:"))
    for block, but in blocks:
        for one in but:
            assert one.version == block.version
            assert not is_public(one[0])
            assert not is_public(one[-1])
            assert not reached(str(one[0]))


def test_labels_select_what_they_are_for() -> None:
    pods = {
        name: workload["spec"]["template"]["metadata"]["labels"] for name, workload in _workloads().items()
    }
    pods["worker"] = TEMPLATES["base"]["metadata"]["labels"]
    for name, workload in _workloads().items():
        assert workload["spec"]["selector"]["matchLabels"].items() <= pods[name].items()
    for kind in ("Service", "PodDisruptionBudget"):
        for name, document in _of_kind(kind).items():
            selector = document["spec"]["selector"]
            assert selector.get("matchLabels", selector).items() <= pods[name].items()
    named = set(
        re.findall(r"io/name: ([a-z-]+)[,}]|\"([a-z-]+)\"", (FOLDER / "base/network-policy.yaml").read_text())
    )
    assert {first or second for first, second in named} <= pods.keys()
    replicated = {name for name, found in _workloads().items() if found["spec"]["replicas"] > 1}
    assert _of_kind("PodDisruptionBudget").keys() == replicated
