"""The optional parts of the manifests: telemetry, a cluster of NATS servers, and decode workers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.test_kubernetes_manifests import FOLDER, ROOT, SETTINGS, TEMPLATES, VERSIONS
from tests.deploy.test_kubernetes_manifests import made_secrets as made_secrets
from turboserve.cli.embedded.binaries import nats_server
from turboserve.config import Settings
from turboserve.failover import Failover

COMPONENTS = ("telemetry", "nats-cluster", "decode-workers")
TELEMETRY = ROOT / "deploy" / "telemetry"
DECODE_WORKER = "decode-worker"
POINTS = "turboserve-settings"
"""ConfigMap of which all services read addresses."""
Json = dict[str, Any]
Key = tuple[str, str]


def documents(path: Path) -> list[Json]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def key_of(document: Json) -> Key:
    return document["kind"], document["metadata"]["name"]


def kustomization(folder: str) -> Json:
    [content] = documents(FOLDER / folder / "kustomization.yaml")
    return content


def merged(into: Json, patch: Json) -> Json:
    """Merge as kustomize does, for patches without lists, whose merge depends on the kind."""
    result = dict(into)
    for name, value in patch.items():
        assert not isinstance(value, list), "a list in a patch"
        nested = isinstance(value, dict) and isinstance(into.get(name), dict)
        result[name] = merged(into[name], value) if nested else value
    return result


def rendered(*components: str) -> dict[Key, Json]:
    """Return all objects of the base with these components."""
    found: dict[Key, Json] = {}
    for folder in ("base", *components):
        for name in kustomization(folder)["resources"]:
            for document in documents(FOLDER / folder / name):
                assert key_of(document) not in found
                found[key_of(document)] = document
        for patch in kustomization(folder).get("patches", []):
            for change in documents(FOLDER / folder / patch["path"]):
                key = key_of(change)
                assert key in found, f"{folder}: {patch['path']} changes nothing"
                if change.pop("$patch", None) == "delete":
                    del found[key]
                else:
                    found[key] = merged(found[key], change)
    return found


def pods_of(found: dict[Key, Json]) -> dict[str, Json]:
    """Return the template of each workload's pods, by the label that selects them."""
    return {
        document["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]: document["spec"][
            "template"
        ]
        for (kind, _), document in found.items()
        if kind in ("Deployment", "StatefulSet")
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_with_all_components_is_valid(version: str) -> None:
    for key, document in rendered(*COMPONENTS).items():
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            pytest.fail(f"{key}, {version}: {error}")


@pytest.mark.parametrize("components", [(), *((one,) for one in COMPONENTS), COMPONENTS])
def test_kustomize_renders_the_same(components: tuple[str, ...], tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is missing")
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(FOLDER / "base", tmp_path)],
        "components": [os.path.relpath(FOLDER / component, tmp_path) for component in components],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    done = subprocess.run([kubectl, "kustomize", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = {key_of(document): document for document in yaml.safe_load_all(done.stdout)}
    wanted = rendered(*components)
    assert shown.keys() == wanted.keys()
    for key in shown:
        for part in ("data", "spec"):
            # kustomize adds the tag of images.
            text = json.dumps(shown[key].get(part), sort_keys=True)
            text = re.sub(r'("image": "turboserve-[a-z-]+):dev"', r'\1"', text)
            assert json.loads(text) == wanted[key].get(part), key


def test_a_component_names_every_file() -> None:
    for component in COMPONENTS:
        content = kustomization(component)
        named = {*content["resources"], *(patch["path"] for patch in content["patches"])}
        assert named == {path.name for path in (FOLDER / component).glob("*.yaml")} - {"kustomization.yaml"}


def test_pods_of_components_follow_the_restricted_policy_and_are_reached() -> None:
    found = rendered(*COMPONENTS)
    pods = pods_of(found)
    for template in pods.values():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] in (False, spec.get("serviceAccountName") == "autoscaler")
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
    labels = {name: template["metadata"]["labels"] for name, template in pods.items()}
    labels["worker"] = TEMPLATES["base"]["metadata"]["labels"]
    for (kind, name), document in found.items():
        if kind in ("Service", "PodDisruptionBudget"):
            selector = document["spec"]["selector"]
            assert selector.get("matchLabels", selector).items() <= labels[name].items()
        if kind == "NetworkPolicy":
            selectors = re.findall(r"'app.kubernetes.io/name': '([a-z-]+)'", str(document["spec"]))
            values = re.findall(r"'values': \[([^]]+)\]", str(document["spec"]))
            assert {*selectors, *re.findall(r"[a-z-]+", " ".join(values))} <= labels.keys()
    replicated = {
        template["metadata"]["labels"]["app.kubernetes.io/name"]
        for (kind, _), document in found.items()
        if kind in ("Deployment", "StatefulSet") and document["spec"]["replicas"] > 1
        for template in [document["spec"]["template"]]
    }
    budgets = {name for kind, name in found if kind == "PodDisruptionBudget"}
    several = {"gateway", "scheduler", "autoscaler", "nats", "state-store", "decode-worker"}
    assert budgets == replicated == several


def given(variable: Json, found: dict[Key, Json]) -> str | None:
    """Return the value of a container's variable; None if it is not set."""
    reference = variable.get("valueFrom", {}).get("configMapKeyRef")
    if reference is None:
        return str(variable["value"]) if "value" in variable else None
    data = found["ConfigMap", reference["name"]]["data"]
    assert reference["key"] in data or reference.get("optional")
    return None if reference["key"] not in data else str(data[reference["key"]])


def environments(found: dict[Key, Json]) -> dict[str, dict[str, str]]:
    """Return what each service, and the workers of each kind, read of values that are no secrets."""
    pods = pods_of(found)
    specs = {name: pods[name]["spec"] for name in (*SETTINGS, "recorder") if name in pods}
    specs |= {f"worker {folder}": template["spec"] for folder, template in TEMPLATES.items()}
    if DECODE_WORKER in pods:
        specs[DECODE_WORKER] = pods[DECODE_WORKER]["spec"]
    return {
        name: {
            variable["name"]: value
            for variable in spec["containers"][0]["env"]
            if (value := given(variable, found)) is not None
        }
        for name, spec in specs.items()
    }


def test_every_service_and_worker_sends_telemetry_to_the_collector() -> None:
    assert not any("TURBOSERVE_OTLP_ENDPOINT" in found for found in environments(rendered()).values())
    found = rendered("telemetry", "decode-workers")
    read = environments(found)
    assert len(read) == 9
    assert {name: one.get("TURBOSERVE_OTLP_ENDPOINT") for name, one in read.items()} == dict.fromkeys(
        read, "http://collector:4318"
    )
    [port] = found["Service", "collector"]["spec"]["ports"]
    receiver = yaml.safe_load(found["ConfigMap", "turboserve-collector"]["data"]["collector.yaml"])
    assert receiver["receivers"]["otlp"]["protocols"]["http"]["endpoint"] == f"0.0.0.0:{port['port']}"
    exporter = receiver["exporters"]["otlp/jaeger"]["endpoint"]
    ports = [port["port"] for port in found["Service", "jaeger"]["spec"]["ports"]]
    assert exporter == "jaeger:4317"
    assert 4317 in ports
    collector = found["Deployment", "collector"]["spec"]["template"]["spec"]["containers"][0]
    [mount], [argument] = collector["volumeMounts"], collector["args"]
    assert argument == f"--config={mount['mountPath']}/collector.yaml"


def test_dashboards_alerts_and_images_are_those_of_compose() -> None:
    found = rendered("telemetry")
    for path in (TELEMETRY / "grafana" / "dashboards").glob("*.json"):
        shown = found["ConfigMap", f"turboserve-dashboard-{path.stem}"]
        assert shown["data"] == {path.name: path.read_text()}
        assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(json.dumps(shown)) < 256 * 1024
    boards = sum(name.startswith("turboserve-dashboard-") for _, name in found)
    assert boards == len(list((TELEMETRY / "grafana" / "dashboards").glob("*.json")))
    for name, file in (("alerts", "alerts.yaml"), ("collector", "collector.yaml")):
        data = found["ConfigMap", f"turboserve-{name}"]["data"]
        assert data == {file: (TELEMETRY / file).read_text()}
    compose = yaml.safe_load((TELEMETRY / "compose.yaml").read_text())["services"]
    for name in ("collector", "jaeger"):
        [container] = found["Deployment", name]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == compose[name]["image"]


def test_the_cluster_replaces_the_server_and_every_service_knows_it(
    made_secrets: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    found = rendered("nats-cluster")
    [(_, name)] = [key for key in found if key[0] == "StatefulSet" and key[1].startswith("nats")]
    cluster = found["StatefulSet", name]["spec"]
    service = found["Service", cluster["serviceName"]]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    hosts = [f"{name}-{number}.{cluster['serviceName']}" for number in range(cluster["replicas"])]
    assert len(hosts) == 3
    read = environments(found)
    urls = ",".join(f"nats://{host}:4222" for host in hosts)
    for one in read.values():
        assert one["TURBOSERVE_NATS_URL"] == urls
        assert Failover(one["TURBOSERVE_FAILOVER"]) is Failover.SHORT
    assert Settings(nats_url=urls).nats_url == urls
    assert read["state-store"]["TURBOSERVE_LOG_REPLICAS"] == "3"
    assert {name for name, one in read.items() if "TURBOSERVE_LOG_REPLICAS" in one} == {"state-store"}
    pods = cluster["template"]["spec"]
    [apart] = pods["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"].items() <= cluster["template"]["metadata"]["labels"].items()
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    routes = found["NetworkPolicy", "nats-routes"]["spec"]["ingress"][0]
    assert routes["ports"] == [{"port": 6222}]
    [container] = pods["containers"]
    text = found["ConfigMap", "turboserve-nats-cluster"]["data"]["nats-cluster.conf"]
    check_configuration(text, container, hosts, made_secrets, tmp_path)


def check_configuration(
    text: str, container: Json, hosts: list[str], secrets: dict[str, dict[str, str]], folder: Path
) -> None:
    """Check that a real server takes the configuration with these variables, and needs the routes."""
    given = {**secrets[container["envFrom"][0]["secretRef"]["name"]]}
    given |= dict.fromkeys(("NATS_HEALTH_PASSWORD", "NATS_WATCHDOG_PASSWORD"), "p0123456789abcdef")
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            given[variable["name"]] = secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        elif "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "metadata.name"
            given[variable["name"]] = "nats-cluster-0"
        else:
            # As Kubernetes does, with the variables that come before, and with none of `envFrom`.
            given[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], variable["value"])
    password = given["NATS_ROUTE_PASSWORD"]
    for number, host in enumerate(hosts, 1):
        assert given[f"NATS_ROUTE_{number}"] == f"nats-route://route:{password}@{host}:6222"
    file = folder / "nats-cluster.conf"
    file.write_text(text)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NATS_")}
    command = [str(nats_server()), "-t", "-c", str(file)]
    done = subprocess.run(command, env={**inherited, **given}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert container["args"] == ["-c", "/etc/turboserve/nats-cluster.conf"]
    del given["NATS_ROUTE_3"]
    assert subprocess.run(command, env={**inherited, **given}, capture_output=True).returncode != 0


def ports_between(found: dict[Key, Json], source: str, target: str) -> set[int]:
    """Return the ports of one kind of pods that another kind reaches, by the policies."""
    ports: set[int] = set()
    for (kind, _), policy in found.items():
        if kind != "NetworkPolicy" or "Ingress" not in policy["spec"]["policyTypes"]:
            continue
        if policy["spec"]["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/name") != target:
            continue
        for rule in policy["spec"].get("ingress", []):
            if source in re.findall(r"'([a-z-]+)'", str(rule.get("from"))):
                ports |= {port["port"] for port in rule.get("ports", [])}
    return ports


def test_decode_workers_and_workers_have_what_they_need_of_each_other(
    made_secrets: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rendered("decode-workers")
    workload = found["StatefulSet", DECODE_WORKER]["spec"]
    [container] = workload["template"]["spec"]["containers"]
    read = environments(found)
    own = read[DECODE_WORKER]
    variables = {variable["name"] for variable in container["env"]}
    assert variables <= {f"TURBOSERVE_{name.upper()}" for name in SETTINGS["worker"].model_fields}
    secrets = secrets_of(container)
    # Both have a value, and the broker's users have the same.
    assert {where for where, _ in secrets.values()} == {"turboserve-decode"}
    decode = made_secrets["turboserve-decode"]
    assert {key for _, key in secrets.values()} == decode.keys()
    assert made_secrets["turboserve-nats"]["NATS_WORKER_DECODE_PASSWORD"] == decode["nats-password"]
    broker = found["ConfigMap", "turboserve-files"]["data"]["nats.conf"]
    assert f'user: "{own["TURBOSERVE_NATS_USER"]}"' in broker
    # Every decode worker has a name, which every worker knows.
    service = found["Service", workload["serviceName"]]["spec"]
    assert service["clusterIP"] == "None"
    port = int(own["TURBOSERVE_TRANSFER_PORT"])
    assert {one["port"] for one in service["ports"]} == {port}
    hosts = [f"{DECODE_WORKER}-{n}.{workload['serviceName']}" for n in range(workload["replicas"])]
    addresses = ",".join(f"tcp://{host}:{port}" for host in hosts)
    assert ports_between(found, "worker", DECODE_WORKER) == {port}
    assert 4222 in ports_between(found, DECODE_WORKER, "nats")
    for folder, template in TEMPLATES.items():
        given = read[f"worker {folder}"]
        assert given["TURBOSERVE_DECODE_WORKERS"] == addresses
        assert given["TURBOSERVE_MODEL"] == own["TURBOSERVE_MODEL"]
        [worker] = template["spec"]["containers"]
        assert secrets_of(worker) == {"TURBOSERVE_DECODE_KEY": ("turboserve-decode", "key")}
        roles(monkeypatch, given | {"TURBOSERVE_DECODE_KEY": decode["key"]}, "denoise")
    roles(monkeypatch, own | {"TURBOSERVE_DECODE_KEY": decode["key"]}, "decode")


def secrets_of(container: Json) -> dict[str, Key]:
    """Return the variables that are keys of Secrets."""
    references = {one["name"]: one.get("valueFrom", {}).get("secretKeyRef") for one in container["env"]}
    return {name: (one["name"], one["key"]) for name, one in references.items() if one}


def roles(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], wanted: str) -> None:
    """Check that a worker starts with these variables, in this role."""
    with monkeypatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        assert SETTINGS["worker"]().roles == wanted


def test_without_the_component_every_worker_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rendered()
    for folder in TEMPLATES:
        given = environments(found)[f"worker {folder}"]
        assert not {"TURBOSERVE_ROLES", "TURBOSERVE_DECODE_WORKERS"} & given.keys()
        # The Secret may be there.
        roles(monkeypatch, given | {"TURBOSERVE_DECODE_KEY": "k" * 32}, "denoise,decode")
    [reference] = [
        variable["valueFrom"]["secretKeyRef"]
        for variable in TEMPLATES["base"]["spec"]["containers"][0]["env"]
        if variable["name"] == "TURBOSERVE_DECODE_KEY"
    ]
    assert reference["optional"] is True
