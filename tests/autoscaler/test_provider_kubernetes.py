"""The Kubernetes provider: pods and templates, and what happens when the API server fails or forgets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import turboserve.autoscaler.providers.kubernetes as provider_module
from tests.autoscaler.api_server import ApiServer, api_server, kubeconfig, template
from tests.autoscaler.provider_places import LIMIT_S, PROGRAM, Place, clear
from tests.helpers.waiting import eventually
from turboserve.autoscaler.providers.base import LaunchError, ProviderError, StuckError
from turboserve.autoscaler.providers.kubernetes import KubernetesProvider
from turboserve.autoscaler.providers.kubernetes_cluster import KubernetesCluster, read_template
from turboserve.autoscaler.providers.kubernetes_pod import (
    ALIKE,
    PodKind,
    checked_template,
    parsed,
    pod_name,
    pod_of,
)
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.broker_accounts import worker_user
from turboserve.contracts.errors import InvalidInputError

SPEC = {"containers": [{"name": "worker", "image": "w"}]}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as server:
        yield server


@pytest.fixture
async def place(server: ApiServer, tmp_path: Path) -> AsyncIterator[Place]:
    place = Place("kubernetes", str(kubeconfig(tmp_path, server.url)), server)
    yield place
    server.refuse, server.hang, server.unreachable_nodes = None, False, False
    await clear(place)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod of a busy machine is only slow to end."""
    monkeypatch.setattr(provider_module, "STUCK_S", LIMIT_S)


def cluster_of(place: Place) -> KubernetesCluster:
    return KubernetesCluster("workers", Path(place.address), LIMIT_S)


class TestPods:
    @given(st.text("abcXYZ_0-", min_size=1, max_size=64), st.text("abcXYZ_0-", min_size=1, max_size=64))
    def test_a_name_is_a_dns_label_and_differs_with_the_member(self, one: str, other: str) -> None:
        name = pod_name("pool", one)
        assert len(name) <= 63
        assert name == name.lower().strip("-")
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        assert (name == pod_name("pool", other)) == (one == other)
        assert name != pod_name("another", one)

    def test_the_template_is_kept_and_the_identity_added(self) -> None:
        given: dict[str, Any] = {
            "metadata": {"labels": {"team": "video"}, "namespace": "other", "generateName": "x-"},
            "spec": {
                "nodeSelector": {"gpu": "h200"},
                "containers": [
                    {
                        "name": "worker",
                        "image": "w",
                        "env": [{"name": "TURBOSERVE_WORKER_ID", "value": "no"}],
                    },
                    {"name": "sidecar", "image": "s"},
                ],
            },
        }
        secrets = {"TURBOSERVE_NATS_PASSWORD": ("identities", "wk0")}
        pod = pod_of(given, "p", "local-0", "wk0_1", {"TURBOSERVE_WORKER_ID": "wk0_1"}, secrets)
        assert pod["spec"]["nodeSelector"] == {"gpu": "h200"}
        assert pod["spec"]["restartPolicy"] == "Never"
        assert pod["metadata"]["labels"] == {
            "team": "video",
            "turboserve.io/pool": "p",
            "turboserve.io/member": "local-0",
            "turboserve.io/worker": "wk0_1",
        }
        assert not {"namespace", "generateName"} & pod["metadata"].keys()
        reference = {"secretKeyRef": {"name": "identities", "key": "wk0"}}
        assert pod["spec"]["containers"][0]["env"] == [
            {"name": "TURBOSERVE_WORKER_ID", "value": "wk0_1"},
            {"name": "TURBOSERVE_NATS_PASSWORD", "valueFrom": reference},
        ]
        assert pod["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/readyz"
        assert pod["spec"]["containers"][1] == {"name": "sidecar", "image": "s"}
        # The template stays what it is for the next worker.
        assert given["spec"]["containers"][0]["env"] == [{"name": "TURBOSERVE_WORKER_ID", "value": "no"}]

    def test_a_kind_adds_nodes_and_limits_to_the_template(self) -> None:
        worker = {"name": "worker", "resources": {"limits": {"memory": "8Gi", "nvidia.com/gpu": "1"}}}
        given: dict[str, Any] = {"spec": {"nodeSelector": {"zone": "a"}, "containers": [worker]}}
        spec = PodKind({"gpu": "h200"}, {"nvidia.com/gpu": "2"}, {}).applied_to(given)["spec"]
        assert spec["nodeSelector"] == {"zone": "a", "gpu": "h200"}
        assert spec["containers"][0]["resources"] == {
            "limits": {"memory": "8Gi", "nvidia.com/gpu": "2"},
            "requests": {"nvidia.com/gpu": "2"},
        }
        assert given["spec"]["nodeSelector"] == {"zone": "a"}
        assert given["spec"]["containers"] == [worker]
        assert ALIKE.applied_to(given) == given

    def test_a_worker_that_ended_beside_a_sidecar_has_ended(self) -> None:
        ended = {"name": "worker", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}}
        sidecar = {"name": "sidecar", "state": {"running": {}}}
        status = {"phase": "Running", "containerStatuses": [sidecar, ended]}
        assert not parsed({"metadata": {}, "status": status}).living
        assert parsed({"metadata": {}, "status": {**status, "containerStatuses": [sidecar]}}).living

    def test_a_container_that_cannot_start_has_a_reason(self) -> None:
        def waits(reason: str) -> str:
            waiting = {"name": "worker", "state": {"waiting": {"reason": reason, "message": "no such image"}}}
            return parsed({"status": {"phase": "Pending", "containerStatuses": [waiting]}}).waits

        assert waits("ImagePullBackOff") == "ImagePullBackOff: no such image"
        assert waits("ContainerCreating") == ""

    @pytest.mark.parametrize("worker", ["", "wrk a", "x" * 64, "-a", "a_"])
    def test_an_id_that_no_label_can_have_is_refused(self, worker: str) -> None:
        with pytest.raises(InvalidInputError) as caught:
            pod_of({"spec": SPEC}, "p", "m", worker, {}, {})
        assert (caught.value.field, caught.value.limit) == ("worker", 63)

    @pytest.mark.parametrize(
        ("content", "field"),
        [
            ([], "template"),
            ({"metadata": {}}, "template.spec"),
            ({"spec": {**SPEC, "restartPolicy": "Always"}}, "template.spec.restartPolicy"),
            ({"spec": {}}, "template.spec.containers"),
            ({"spec": {"containers": [{"name": "other"}]}}, "template.spec.containers"),
            ({"spec": {"containers": ["worker"]}}, "template.spec.containers"),
            ({"spec": SPEC, "metadata": "x"}, "template.metadata"),
            ({"spec": SPEC, "metadata": {"labels": []}}, "template.metadata.labels"),
            (
                {"spec": {"containers": [{"name": "worker", "env": {}}]}},
                "template.spec.containers[worker].env",
            ),
        ],
    )
    def test_a_template_that_cannot_be_used_is_refused_by_field(self, content: object, field: str) -> None:
        with pytest.raises(InvalidInputError) as caught:
            checked_template(content)
        assert caught.value.field == field

    def test_a_template_is_read_from_yaml(self, tmp_path: Path) -> None:
        file = tmp_path / "pod.yaml"
        file.write_text("spec:\n  containers:\n    - {name: worker, image: w}\n")
        assert read_template(file) == {"spec": SPEC}
        for content in ("a: [", "\x00"):
            file.write_text(content)
            with pytest.raises(InvalidInputError) as caught:
                read_template(file)
            assert caught.value.field == "kubernetes_pod_template"


class TestSettings:
    def test_a_template_and_the_secret_of_the_identities_are_needed(self, tmp_path: Path) -> None:
        with pytest.raises(ValidationError, match="kubernetes_pod_template"):
            AutoscalerSettings(provider="kubernetes")
        complete = {"provider": "kubernetes", "kubernetes_pod_template": tmp_path / "pod.yaml"}
        AutoscalerSettings.model_validate(complete)
        with pytest.raises(ValidationError, match="kubernetes_identity_secret"):
            AutoscalerSettings.model_validate({**complete, "worker_identities": {"wk0": "x"}})

    def test_the_service_names_the_template_that_it_refuses(self, tmp_path: Path) -> None:
        file = tmp_path / "pod.yaml"
        file.write_text("spec: {containers: []}")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURBOSERVE_")}
        environment = {"TURBOSERVE_PROVIDER": "kubernetes", "TURBOSERVE_KUBERNETES_POD_TEMPLATE": str(file)}
        ended = subprocess.run(
            [sys.executable, "-m", "turboserve.autoscaler"],
            env={**inherited, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ended.returncode == 78
        assert "TURBOSERVE_KUBERNETES_POD_TEMPLATE: template.spec.containers" in ended.stdout + ended.stderr


class TestFaults:
    async def test_an_identity_comes_from_its_secret_and_the_rest_from_its_kind(
        self, place: Place, server: ApiServer
    ) -> None:
        pods = cluster_of(place)
        provider = KubernetesProvider(
            place.pool,
            pods,
            template(PROGRAM),
            ["wk0"],
            "identities",
            lambda member: PodKind({"gpu": "h200"}, {}, {"TURBOSERVE_MODEL": member}),
        )
        await provider.launch("test-0", "wk0_a")
        [pod] = server.pods.values()
        assert pod["spec"]["nodeSelector"] == {"gpu": "h200"}
        environment = {item["name"]: item for item in pod["spec"]["containers"][0]["env"]}
        assert environment["TURBOSERVE_MODEL"]["value"] == "test-0"
        assert environment["TURBOSERVE_NATS_USER"]["value"] == worker_user("wk0")
        reference = environment["TURBOSERVE_NATS_PASSWORD"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "identities", "key": "wk0"}
        assert "value" not in environment["TURBOSERVE_NATS_PASSWORD"]
        await provider.close()

    async def test_a_quota_refuses_the_launch_by_its_text(self, place: Place, server: ApiServer) -> None:
        provider, exits = place.provider()
        server.quota = 1
        await provider.launch("test-0", "wrk_a")
        with pytest.raises(LaunchError, match="exceeded quota"):
            await provider.launch("test-1", "wrk_b")
        assert [found.worker for found in await provider.adopt()] == ["wrk_a"]
        assert exits == []

    async def test_a_launch_without_an_answer_is_found_later(self, place: Place, server: ApiServer) -> None:
        pods = cluster_of(place)
        provider = KubernetesProvider(place.pool, pods, template(PROGRAM))
        # The first request takes much longer than its answer on a busy machine: it creates the client.
        assert await provider.adopt() == []
        pods._call_s = 2.0
        server.hang = True
        # On a busy machine, 2 s may pass before the request has reached the server.
        while not server.pods:
            with pytest.raises(ProviderError, match="no answer within 2 s") as caught:
                await provider.launch("test-0", "wrk_a")
            # A LaunchError would mean that nothing was started.
            assert not isinstance(caught.value, LaunchError)
        server.hang = False
        # A server that answers is only slow on a busy machine.
        pods._call_s = LIMIT_S
        assert [found.worker for found in await provider.adopt()] == ["wrk_a"]
        assert (await provider.launch("test-0", "wrk_a")).worker == "wrk_a"
        assert len(server.pods) == 1
        await provider.close()

    async def test_an_unreachable_api_server_ends_nothing(self, place: Place, server: ApiServer) -> None:
        provider, exits = place.provider()
        await provider.launch("test-0", "wrk_a")
        server.refuse = 503
        await server.drop_watches()
        assert not (await provider.health()).ok
        with pytest.raises(ProviderError, match="503"):
            await provider.adopt()
        assert not await provider.ready("wrk_a")
        assert exits == []
        server.refuse = None
        assert (await provider.health()).ok
        await eventually(lambda: provider.ready("wrk_a"))
        await place.kill((await provider.adopt())[0])
        await eventually(lambda: [worker for worker, _ in exits] == ["wrk_a"])
        assert "code -9" in exits[0][1]

    @pytest.mark.parametrize("compact", [False, True])
    async def test_what_an_interrupted_watch_missed_is_seen_once(
        self, place: Place, server: ApiServer, compact: bool
    ) -> None:
        provider, exits = place.provider()
        for number in range(3):
            await provider.launch(f"test-{number}", f"wrk_{number}")
        for number in range(3):
            await eventually(partial(provider.ready, f"wrk_{number}"))
        server.refuse = 503
        await server.drop_watches(compact)
        await server.vanish(pod_name(place.pool, "test-1"))
        assert exits == []
        server.refuse = None
        await eventually(lambda: exits == [("wrk_1", "its pod no longer exists")])
        assert sorted(found.worker for found in await provider.adopt()) == ["wrk_0", "wrk_2"]
        await place.kill(next(found for found in await provider.adopt() if found.worker == "wrk_0"))
        await eventually(lambda: [worker for worker, _ in exits] == ["wrk_1", "wrk_0"])

    async def test_a_compacted_version_costs_a_list_and_no_worker(
        self, place: Place, server: ApiServer
    ) -> None:
        provider, exits = place.provider()
        await provider.launch("test-0", "wrk_a")
        await eventually(lambda: any("watch=true" in path for _, path in server.requests))
        lists = len([path for _, path in server.requests if "limit" in path])
        await server.drop_watches(compact=True)
        await eventually(lambda: len([path for _, path in server.requests if "limit" in path]) > lists)
        assert [found.worker for found in await provider.adopt()] == ["wrk_a"]
        assert exits == []

    async def test_a_pod_on_a_lost_node_is_stuck_and_not_given_up(
        self, place: Place, server: ApiServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        provider, exits = place.provider()
        await provider.launch("test-0", "wrk_a")
        await eventually(lambda: provider.ready("wrk_a"))
        server.unreachable_nodes = True
        with monkeypatch.context() as hasty:
            hasty.setattr(provider_module, "STUCK_S", 0.3)
            with pytest.raises(StuckError, match="wrk_a"):
                await provider.release("test-0", "wrk_a", 0.1)
        # Its worker may still run, so that its member stays taken.
        assert exits == []
        with pytest.raises(LaunchError):
            await provider.launch("test-0", "wrk_b")
        server.unreachable_nodes = False
        await eventually(lambda: [worker for worker, _ in exits] == ["wrk_a"])
        await eventually(lambda: not server.pods)

    async def test_a_worker_that_ignores_the_end_is_forced(self, place: Place, server: ApiServer) -> None:
        provider, exits = place.provider("deaf")
        await provider.launch("test-0", "wrk_a")
        await eventually(lambda: provider.ready("wrk_a"))
        await provider.release("test-0", "wrk_a", 1.0)
        assert [worker for worker, _ in exits] == ["wrk_a"]

    async def test_a_drain_is_annotated_and_a_late_release_spares_the_next_worker(
        self, place: Place, server: ApiServer
    ) -> None:
        provider, _ = place.provider()
        found = await provider.launch("test-0", "wrk_a")
        await provider.drain("wrk_a")
        [pod] = server.pods.values()
        assert pod["metadata"]["annotations"]["turboserve.io/draining"] == "true"
        await place.kill(found)
        await eventually(lambda: pod["status"]["phase"] == "Failed")
        # A worker id is used once.
        with pytest.raises(LaunchError, match="wrk_a has ended"):
            await provider.launch("test-0", "wrk_a")
        await provider.launch("test-0", "wrk_b")
        await provider.release("test-0", "wrk_a", 1.0)
        assert [found.worker for found in await provider.adopt()] == ["wrk_b"]
