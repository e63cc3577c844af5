"""The pods of workers: names, labels, and what the provider adds to the operator's template.

Pure functions over the API's JSON form. Nothing here needs the Kubernetes client.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from turboserve.contracts.errors import InvalidInputError

Json = dict[str, Any]

CONTAINER = "worker"
"""Name of the template's container that runs the worker. Other containers are sidecars."""
PORT = 8090
"""Port of the health server in the images of this project."""
POOL_LABEL = "turboserve.io/pool"
MEMBER_LABEL = "turboserve.io/member"
WORKER_LABEL = "turboserve.io/worker"
DRAINING = "turboserve.io/draining"
"""Annotation of a pod whose worker drains."""
KEEP = "cluster-autoscaler.kubernetes.io/safe-to-evict"
"""Annotation that keeps the cluster's autoscaler from removing the node of a living worker."""
OWN_FIELDS = ("restartPolicy",)
"""Fields of a pod's specification that the provider sets itself."""
_NAME = re.compile(r"[^a-z0-9]+")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
ENDED = ("Succeeded", "Failed")
STARTING = ("ContainerCreating", "PodInitializing")
"""Reasons for which each container waits for some time."""


@dataclass(frozen=True)
class Pod:
    """What the provider knows about one pod."""

    name: str
    uid: str
    member: str
    worker: str
    phase: str
    """Pending, Running, Succeeded, Failed or Unknown."""
    ready: bool
    end: str
    """How its worker ended, for people. Empty while it runs or waits."""
    waits: str
    """Why its container cannot start, such as ImagePullBackOff. Empty if it runs, or just has not yet."""

    @property
    def living(self) -> bool:
        """Whether the worker may run.

        A pod that is being deleted lives until it is gone. Sidecars may outlive the worker's container.
        """
        return self.phase not in ENDED and not self.end


@dataclass(frozen=True)
class PodKind:
    """What the pods of one kind of worker have beside the template."""

    node_selector: Mapping[str, str]
    """Labels of the nodes on which the pods run."""
    limits: Mapping[str, str]
    """Limits of the worker's container, such as `nvidia.com/gpu`. Its requests are the same."""
    variables: Mapping[str, str]
    """Variables of the worker's container."""

    def applied_to(self, template: Json) -> Json:
        """Return the template of this kind. What the kind names has priority."""
        if not self.node_selector and not self.limits:
            return template
        pod = deepcopy(template)
        spec = pod["spec"]
        if self.node_selector:
            spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **self.node_selector}
        [container] = [item for item in spec["containers"] if item["name"] == CONTAINER]
        if self.limits:
            resources = container.get("resources") or {}
            container["resources"] = resources | {
                name: {**(resources.get(name) or {}), **self.limits} for name in ("limits", "requests")
            }
        return pod


ALIKE = PodKind({}, {}, {})
"""Of a pool whose workers are alike."""


def pod_name(pool: str, member: str) -> str:
    """Return the name of the member's pod, a DNS label.

    It depends on the member alone, so that the API server itself refuses a second worker of a member.
    """
    readable = _NAME.sub("-", member.lower()).strip("-")[:32].strip("-")
    digest = hashlib.sha256(f"{pool}\0{member}".encode()).hexdigest()[:10]
    return "-".join(part for part in ("turboserve", readable, digest) if part)


def selector(pool: str) -> str:
    """Return the label selector of the pool's pods."""
    return f"{POOL_LABEL}={pool}"


def checked_template(template: object) -> Json:
    """Return the pod template if the provider can use it.

    A template has the form of a Deployment's `spec.template`. Raises InvalidInputError that names the field.
    """
    if not isinstance(template, dict):
        raise InvalidInputError("a pod template is a mapping with `spec`", field="template")
    spec = template.get("spec")
    if not isinstance(spec, dict):
        raise InvalidInputError("a pod template has a mapping `spec`", field="template.spec")
    for field in OWN_FIELDS:
        if field in spec:
            raise InvalidInputError("the provider sets this field", field=f"template.spec.{field}")
    containers = spec.get("containers")
    if not isinstance(containers, list) or not all(isinstance(item, dict) for item in containers):
        raise InvalidInputError("a list of containers is needed", field="template.spec.containers")
    named = [item for item in containers if item.get("name") == CONTAINER]
    if len(named) != 1:
        detail = f"exactly one container is named {CONTAINER!r}; found {len(named)}"
        raise InvalidInputError(detail, field="template.spec.containers", limit=CONTAINER)
    if not isinstance(named[0].get("env", []), list):
        raise InvalidInputError("`env` is a list", field=f"template.spec.containers[{CONTAINER}].env")
    metadata = template.get("metadata", {})
    if not isinstance(metadata, dict):
        raise InvalidInputError("`metadata` is a mapping", field="template.metadata")
    for name in ("labels", "annotations"):
        if not isinstance(metadata.get(name, {}), dict):
            raise InvalidInputError(f"`{name}` is a mapping", field=f"template.metadata.{name}")
    return template


def pod_of(
    template: Json,
    pool: str,
    member: str,
    worker: str,
    variables: Mapping[str, str],
    secrets: Mapping[str, tuple[str, str]],
) -> Json:
    """Return the pod of a worker, in the API's JSON form.

    `variables` are set in the worker's container. `secrets` are variables whose values are keys of Secrets:
    `{variable: (secret, key)}`. Both replace variables of the template. Raises InvalidInputError for ids that
    a label cannot have.
    """
    for field, value in (("pool", pool), ("member", member), ("worker", worker)):
        if not _LABEL.fullmatch(value):
            raise InvalidInputError(f"{value!r} cannot be a label of a pod", field=field, limit=63)
    pod = deepcopy(template)
    metadata = pod.setdefault("metadata", {})
    metadata["name"] = pod_name(pool, member)
    # The namespace is the request's.
    for field in ("namespace", "generateName"):
        metadata.pop(field, None)
    labels = {POOL_LABEL: pool, MEMBER_LABEL: member, WORKER_LABEL: worker}
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    metadata["annotations"] = {KEEP: "false", **metadata.get("annotations", {})}
    # A worker id is used once, so that a worker never starts again in the same pod.
    pod["spec"]["restartPolicy"] = "Never"
    [container] = [item for item in pod["spec"]["containers"] if item["name"] == CONTAINER]
    kept = [item for item in container.get("env", []) if item.get("name") not in {*variables, *secrets}]
    plain = [{"name": name, "value": value} for name, value in variables.items()]
    secret = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": where, "key": key}}}
        for name, (where, key) in secrets.items()
    ]
    container["env"] = [*kept, *plain, *secret]
    container.setdefault("readinessProbe", {"httpGet": {"path": "/readyz", "port": PORT}, "periodSeconds": 2})
    return {"apiVersion": "v1", "kind": "Pod", **pod}


def parsed(found: Json) -> Pod:
    """Return what the provider needs of a pod that the API server returned."""
    metadata, status = found.get("metadata", {}), found.get("status", {})
    labels = metadata.get("labels") or {}
    conditions = status.get("conditions") or []
    return Pod(
        metadata.get("name", ""),
        metadata.get("uid", ""),
        labels.get(MEMBER_LABEL, ""),
        labels.get(WORKER_LABEL, ""),
        status.get("phase") or "Pending",
        any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions),
        _end(status),
        _waits(status),
    )


def _end(status: Json) -> str:
    for container in status.get("containerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated")
        if container.get("name") == CONTAINER and ended:
            code, reason = ended.get("exitCode"), ended.get("reason")
            return f"its container ended with code {code}" + (f" ({reason})" if reason else "")
    if status.get("phase") in ENDED:
        # The node may have ended the pod before its container had a status.
        return ": ".join(part for part in (status.get("reason"), status.get("message")) if part) or (
            f"its pod is {status['phase']}"
        )
    return ""


def _waits(status: Json) -> str:
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting")
        if container.get("name") == CONTAINER and waiting and waiting.get("reason") not in STARTING:
            return ": ".join(part for part in (waiting.get("reason"), waiting.get("message")) if part)
    return ""
