"""The part of a Kubernetes API server that pods need, with a kubelet that runs each pod as a real process.

It follows the recorded API: resource versions, conflicts, label selectors, pages, merge patches, deletion
with a grace period and a precondition, watches with bookmarks, and 410 Gone for versions that are compacted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import web

from turboserve.autoscaler.providers.kubernetes_pod import CONTAINER
from turboserve.free_ports import any_free
from turboserve.tasks import BackgroundTasks

Json = dict[str, Any]
PODS = "/api/v1/namespaces/{namespace}/pods"
KUBELET_S = 0.05
PAGE = 2
"""Largest page of a list, so that a list of three pods has two."""


class ApiServer:
    """State and faults. Everything runs on one event loop, so that each request is atomic."""

    def __init__(self) -> None:
        self.url = ""
        self.version = 100
        self.compacted = 0
        """Watches from an older version get 410 Gone."""
        self.pods: dict[str, Json] = {}
        self.requests: list[tuple[str, str]] = []
        self.quota: int | None = None
        self.refuse: int | None = None
        """Status of every answer, while it is set."""
        self.hang = False
        """While it is set, no request is answered. What it asks for happens."""
        self.unreachable_nodes = False
        """While it is set, kubelets do nothing, so that pods neither start nor end."""
        self._changes: list[tuple[int, str, Json]] = []
        self._changed = asyncio.Condition()
        self._watches: set[asyncio.Task[Any]] = set()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}
        self._kubelets = BackgroundTasks()

    # Requests

    async def create(self, request: web.Request) -> web.Response:
        pod = await request.json()
        name = pod["metadata"]["name"]
        if unknown := set(pod) - {"apiVersion", "kind", "metadata", "spec"}:
            return _status(400, "BadRequest", f'strict decoding error: unknown field "{min(unknown)}"')
        if name in self.pods:
            return _status(409, "AlreadyExists", f'pods "{name}" already exists')
        if self.quota is not None and len(self.pods) >= self.quota:
            return _status(403, "Forbidden", f'pods "{name}" is forbidden: exceeded quota: workers')
        pod["metadata"] |= {"uid": str(uuid4()), "namespace": request.match_info["namespace"]}
        pod["status"] = {"phase": "Pending"}
        self.pods[name] = pod
        await self._record("ADDED", pod)
        self._kubelets.create(self._run(pod))
        return await self._answer(pod, 201)

    async def read(self, request: web.Request) -> web.StreamResponse:
        pod = self.pods.get(request.match_info["name"])
        return await self._answer(pod) if pod else _status(404, "NotFound", "pods not found")

    async def patch(self, request: web.Request) -> web.Response:
        if request.content_type != "application/merge-patch+json":
            return _status(415, "UnsupportedMediaType", request.content_type)
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _status(404, "NotFound", "pods not found")
        pod["metadata"].setdefault("annotations", {}).update(
            (await request.json())["metadata"]["annotations"]
        )
        await self._record("MODIFIED", pod)
        return await self._answer(pod)

    async def delete(self, request: web.Request) -> web.Response:
        options = await request.json()
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _status(404, "NotFound", "pods not found")
        uid = options.get("preconditions", {}).get("uid")
        if uid not in (None, pod["metadata"]["uid"]):
            return _status(409, "Conflict", "the UID in the precondition does not match")
        if "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            pod["metadata"]["deletionGracePeriodSeconds"] = options["gracePeriodSeconds"]
            await self._record("MODIFIED", pod)
        return await self._answer(pod)

    async def list(self, request: web.Request) -> web.StreamResponse:
        wanted: dict[str, str | None] = {}
        for item in request.query["labelSelector"].split(","):
            name, _, value = item.partition("=")
            wanted[name] = value or None
        if request.query.get("watch") == "true":
            return await self._watch(request, wanted)
        pods = [pod for _, pod in sorted(self.pods.items()) if _matches(pod, wanted)]
        start, limit = int(request.query.get("continue", 0)), min(int(request.query["limit"]), PAGE)
        metadata: Json = {"resourceVersion": str(self.version)}
        if start + limit < len(pods):
            metadata["continue"] = str(start + limit)
        found = {"kind": "PodList", "metadata": metadata, "items": pods[start : start + limit]}
        return await self._answer(found)

    async def _watch(self, request: web.Request, wanted: dict[str, str | None]) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            bookmark = {"kind": "Pod", "metadata": {"resourceVersion": str(self.version)}}
            await _send(response, "BOOKMARK", bookmark)
            while True:
                if since < self.compacted:
                    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                    await _send(response, "ERROR", gone)
                    return response
                for version, kind, pod in [change for change in self._changes if change[0] > since]:
                    since = version
                    if _matches(pod, wanted):
                        await _send(response, kind, pod)
                async with self._changed:
                    if self.version <= since:
                        await self._changed.wait()
        except asyncio.CancelledError:
            # `drop_watches` ends the answer; a client that leaves needs none.
            return response
        finally:
            self._watches.discard(task)

    @web.middleware
    async def faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs))
        if self.refuse is not None:
            return _status(self.refuse, "ServiceUnavailable", "the server is currently unable to answer")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _answer(self, content: Json, status: int = 200) -> web.Response:
        while self.hang:
            await asyncio.sleep(KUBELET_S)
        return web.json_response(content, status=status)

    # Faults

    async def drop_watches(self, compact: bool = False) -> None:
        """End all watches. With `compact`, no watch can continue from an earlier version."""
        for task in list(self._watches):
            task.cancel()
        if compact:
            self.version += 1
            self.compacted = self.version

    def process_of(self, worker: str) -> int | None:
        """Return the process id of a worker, or None while its pod does not run."""
        for pod in self.pods.values():
            if pod["metadata"]["labels"]["turboserve.io/worker"] == worker:
                process = self._processes.get(pod["metadata"]["uid"])
                return None if process is None else process.pid
        return None

    def kill(self, worker: str) -> None:
        """Kill the process of a worker, whose pod runs."""
        pid = self.process_of(worker)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    async def vanish(self, name: str) -> None:
        """Remove a pod as a forced deletion does, without a change that a watch could see later."""
        pod = self.pods.pop(name)
        self._kill(pod["metadata"]["uid"])
        self.version += 1

    # Kubelets

    async def _run(self, pod: Json) -> None:
        """Run the pod's container until it ends or the pod is deleted."""
        metadata, uid = pod["metadata"], pod["metadata"]["uid"]
        await self._reachable()
        [container] = [item for item in pod["spec"]["containers"] if item["name"] == CONTAINER]
        # Each pod has a network of its own. Processes of one machine need different ports instead.
        self._ports[uid] = any_free("127.0.0.1")
        environment = {item["name"]: item["value"] for item in container.get("env", []) if "value" in item}
        environment["TURBOSERVE_HEALTH_PORT"] = str(self._ports[uid])
        command = [*container["command"], *container.get("args", [])]
        process = await asyncio.to_thread(subprocess.Popen, command, env=environment)
        self._processes[uid] = process
        pod["status"] = {"phase": "Running"}
        await self._record("MODIFIED", pod)
        asked = False
        while process.poll() is None:
            await asyncio.sleep(KUBELET_S)
            await self._reachable()
            if not pod["status"].get("conditions") and await asyncio.to_thread(_answers, self._ports[uid]):
                pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
                await self._record("MODIFIED", pod)
            if "deletionTimestamp" in metadata and not asked:
                asked = True
                process.send_signal(signal.SIGTERM)
                grace_s = metadata["deletionGracePeriodSeconds"]
                asyncio.get_running_loop().call_later(grace_s, self._kill, uid)
        ended = {"terminated": {"exitCode": process.returncode, "reason": "Error"}}
        phase = "Failed" if process.returncode else "Succeeded"
        pod["status"] = {"phase": phase, "containerStatuses": [{"name": CONTAINER, "state": ended}]}
        if self.pods.get(metadata["name"]) is not pod:
            return
        await self._record("MODIFIED", pod)
        while "deletionTimestamp" not in metadata:
            await asyncio.sleep(KUBELET_S)
        if self.pods.get(metadata["name"]) is pod:
            del self.pods[metadata["name"]]
            await self._record("DELETED", pod)

    async def _reachable(self) -> None:
        while self.unreachable_nodes:
            await asyncio.sleep(KUBELET_S)

    def _kill(self, uid: str) -> None:
        with suppress(KeyError, ProcessLookupError):
            self._processes[uid].kill()

    async def _record(self, kind: str, pod: Json) -> None:
        self.version += 1
        pod["metadata"]["resourceVersion"] = str(self.version)
        self._changes.append((self.version, kind, json.loads(json.dumps(pod))))
        async with self._changed:
            self._changed.notify_all()

    async def stop(self) -> None:
        await self._kubelets.stop()
        for process in self._processes.values():
            process.kill()
            await asyncio.to_thread(process.wait)


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    """Serve on a free port of loopback."""
    server = ApiServer()
    app = web.Application(middlewares=[server.faults])
    app.router.add_post(PODS, server.create)
    app.router.add_get(PODS, server.list)
    app.router.add_get(PODS + "/{name}", server.read)
    app.router.add_patch(PODS + "/{name}", server.patch)
    app.router.add_delete(PODS + "/{name}", server.delete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await server.drop_watches()
        await server.stop()
        await runner.cleanup()


def kubeconfig(folder: Path, url: str) -> Path:
    """Write a kubeconfig for `url` that authenticates with a token."""
    path = folder / "kubeconfig.json"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {"token": "secret"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    path.write_text(json.dumps(content))
    return path


def template(program: Path, mode: str = "good") -> Json:
    """A pod template whose container runs `program`."""
    command = [sys.executable, "-I", "-S", str(program), mode]
    path = {"name": "PATH", "value": os.environ["PATH"]}
    return {
        "spec": {"containers": [{"name": CONTAINER, "image": "worker", "command": command, "env": [path]}]}
    }


def _matches(pod: Json, wanted: dict[str, str | None]) -> bool:
    labels = pod["metadata"].get("labels", {})
    return all(name in labels and value in (None, labels[name]) for name, value in wanted.items())


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def _send(response: web.StreamResponse, kind: str, content: Json) -> None:
    await response.write(json.dumps({"type": kind, "object": content}).encode() + b"\n")


def _status(code: int, reason: str, message: str) -> web.Response:
    content = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return web.json_response(content, status=code)
