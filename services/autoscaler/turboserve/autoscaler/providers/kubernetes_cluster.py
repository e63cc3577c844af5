"""Access to one namespace's pods: every call has a deadline and raises typed errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from turboserve.autoscaler.providers.base import ProviderError
from turboserve.autoscaler.providers.kubernetes_pod import Json, checked_template
from turboserve.contracts.errors import InvalidInputError

MISSING = "the provider needs `pip install turboserve-autoscaler[kubernetes]`"
CALL_S = 10.0
RETRY_S = 2.0
PAGE = 500
"""Pods in one answer of a list."""
WATCH_S = 240
"""Time after which the API server ends a watch, seconds. The client then begins the next one."""
SILENCE_S = 30.0
"""Additional time until a watch that did not end counts as lost, seconds."""


class KubernetesError(ProviderError):
    """The API server cannot be reached, does not answer in time or refuses a call."""

    code, title = "kubernetes", "Kubernetes"

    status_code: int | None = None
    """HTTP status of the API server's answer. None: there was no answer, so the outcome is unknown."""


class KubernetesMissingError(ProviderError):
    """The package `kubernetes` is not installed."""

    code, title = "kubernetes_missing", "The Kubernetes client is not installed"


class KubernetesCluster:
    """The pods of one namespace, through the official client.

    `config` is the path of a kubeconfig file. Without it, the service account of the autoscaler's own pod is
    used; outside a cluster, the user's default kubeconfig.
    """

    def __init__(self, namespace: str, config: Path | None = None, call_s: float = CALL_S) -> None:
        self.namespace, self._config, self._call_s = namespace, config, call_s
        self._connecting = asyncio.Lock()
        self._client: Any = None

    async def create(self, pod: Json) -> Json:
        """Create a pod. A field that the API server does not know is refused, with its name."""
        return await self._json("POST", "", {"fieldValidation": "Strict"}, pod, what="the creation of a pod")

    async def get(self, name: str) -> Json | None:
        """Return the pod, or None if it does not exist."""
        try:
            return await self._json("GET", name, what=f"pod {name}")
        except KubernetesError as error:
            if error.status_code == 404:
                return None
            raise

    async def list(self, selector: str) -> tuple[list[Json], str]:
        """Return all pods that match, and the resource version from which to watch."""
        pods: list[Json] = []
        query = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            page = await self._json("GET", "", query, what="the list of pods")
            pods += page.get("items") or []
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return pods, metadata.get("resourceVersion", "")
            query["continue"] = metadata["continue"]

    async def watch(self, selector: str, version: str) -> AsyncGenerator[tuple[str, Json], None]:
        """Yield `(type, pod)` of each change since `version`, until the API server ends the watch.

        Raises KubernetesError, with status 410 if the server no longer knows the changes since `version`.
        """
        query = {
            "labelSelector": selector,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        try:
            answer = await self._request("GET", "", query, limit_s=WATCH_S + SILENCE_S)
            async with aclosing(_events(answer)) as events:
                async for event in events:
                    yield event
        except ProviderError:
            raise
        except Exception as error:
            raise self._failed(error, "the watch of pods") from None

    async def annotate(self, name: str, annotations: dict[str, str]) -> None:
        """Set annotations of a pod. A pod that does not exist is no error."""
        try:
            await self._json(
                "PATCH", name, body={"metadata": {"annotations": annotations}}, what=f"pod {name}"
            )
        except KubernetesError as error:
            if error.status_code != 404:
                raise

    async def delete(self, name: str, uid: str, grace_s: float) -> None:
        """Ask for the end of the pod with this uid. If there is no such pod, do nothing."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": max(round(grace_s), 1),
            "preconditions": {"uid": uid},
        }
        try:
            await self._json("DELETE", name, body=options, what=f"the deletion of {name}")
        except KubernetesError as error:
            if error.status_code not in (404, 409):
                raise

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _json(
        self,
        method: str,
        name: str,
        query: dict[str, str] | None = None,
        body: Json | None = None,
        *,
        what: str,
    ) -> Json:
        try:
            async with asyncio.timeout(self._call_s):
                answer = await self._request(method, name, query, body)
                content = await answer.read()
        except ProviderError:
            raise
        except TimeoutError:
            raise KubernetesError(
                f"{what}: no answer within {self._call_s:g} s",
                field=self.namespace,
                limit=self._call_s,
                retry_after_s=RETRY_S,
            ) from None
        except Exception as error:
            raise self._failed(error, what) from None
        if answer.status >= 400:
            raise _refused(answer.status, content, what)
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise KubernetesError(
                f"{what}: the answer is no object", field=self.namespace, retry_after_s=RETRY_S
            )
        return found

    async def _request(
        self,
        method: str,
        name: str,
        query: dict[str, str] | None = None,
        body: Json | None = None,
        limit_s: float | None = None,
    ) -> Any:
        """Send one request about pods. The client's generic call keeps the JSON of pods as it is.

        The client's models would drop the fields that its version does not know.
        """
        client = await self._connected()
        patch = {"Content-Type": "application/merge-patch+json"} if method == "PATCH" else {}
        request = await client.param_serialize(
            method,
            "/api/v1/namespaces/{namespace}/pods" + ("/{name}" if name else ""),
            {"namespace": self.namespace, **({"name": name} if name else {})},
            list((query or {}).items()),
            {"Accept": "application/json", **patch},
            body,
            auth_settings=["BearerToken"],
        )
        return await client.call_api(*request, _request_timeout=limit_s or self._call_s)

    async def _connected(self) -> Any:
        async with self._connecting:
            if self._client is None:
                self._client = await _client(self._config)
            return self._client

    def _failed(self, error: Exception, what: str) -> KubernetesError:
        return KubernetesError(f"{what}: {_brief(error)}", field=self.namespace, retry_after_s=RETRY_S)


def read_template(path: Path) -> Json:
    """Read the operator's pod template. Raises InvalidInputError that names the file or the field."""
    try:
        import yaml
    except ImportError as error:
        raise InvalidInputError(f"{MISSING}: {error}", field="provider") from None
    try:
        template = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        detail = f"{path} is not a readable YAML file: {_brief(error)}"
        raise InvalidInputError(detail, field="kubernetes_pod_template") from None
    return checked_template(template)


async def _client(path: Path | None) -> Any:
    """Connect with the kubeconfig at `path`, the pod's service account, or the user's kubeconfig."""
    try:
        from kubernetes.aio import client, config
    except ImportError as error:
        raise KubernetesMissingError(f"{MISSING}: {error}", field="provider") from None
    configuration = client.Configuration()
    try:
        if path is not None:
            await config.load_kube_config(str(path), client_configuration=configuration)
        else:
            try:
                config.load_incluster_config(client_configuration=configuration)
            except config.ConfigException:
                await config.load_kube_config(client_configuration=configuration)
    except Exception as error:
        detail = f"no access to a cluster: {_brief(error)}"
        raise KubernetesError(detail, field="kubernetes_config", retry_after_s=RETRY_S) from None
    # The autoscaler's core repeats calls.
    configuration.retries = None
    return client.ApiClient(configuration)


def _refused(status: int, content: bytes, what: str) -> KubernetesError:
    try:
        message = str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        message = ""
    return _with_status(status, f"{what}: {status} {message}".strip())


async def _events(answer: Any) -> AsyncGenerator[tuple[str, Json], None]:
    try:
        if answer.status >= 400:
            raise _refused(answer.status, await answer.read(), "the watch of pods")
        while line := await answer.response.content.readline():
            event = json.loads(line)
            kind, found = event["type"], event["object"]
            if kind == "ERROR":
                raise _with_status(
                    int(found.get("code") or 500), f"the watch of pods: {found.get('message', '')}"
                )
            yield kind, found
    finally:
        answer.response.close()


def _with_status(status: int, detail: str) -> KubernetesError:
    error = KubernetesError(detail[:400], retry_after_s=RETRY_S)
    error.status_code = status
    return error


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
