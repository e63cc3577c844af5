"""Deliveries from a session's change to a real receiver, on real servers: failures, kills, rotation."""

from __future__ import annotations

import asyncio
import base64
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ports import free_ports
from tests.helpers.service_process import Service, connected
from tests.helpers.waiting import LIMIT_S, eventually
from tests.state_store.state_store_harness import Harness, Store
from tests.webhooks.crashing_sender import POINTS
from tests.webhooks.receiver import Received, Receiver, Reply, receiving
from turboserve import subjects, webhook_subjects
from turboserve.bus import Bus
from turboserve.cli.embedded import NatsServer
from turboserve.contracts.audit import ListAudit
from turboserve.contracts.errors import ConflictError, InvalidInputError, NotFoundError, UnavailableError
from turboserve.contracts.webhooks import (
    ChangeWebhook,
    CreateWebhook,
    DeliveryRecord,
    DeliveryRef,
    DeliveryState,
    DeriveSecret,
    ListDeliveries,
    RotateSecret,
    SendTestEvent,
    WebhookRecord,
    WebhookRef,
)
from turboserve.ids import new_id, random_token
from turboserve.state_store.core import webhooks as rules
from turboserve.state_store.settings import Settings
from turboserve.webhooks.core.signing import signatures

KEY = "the master key of these tests"
GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "webhooks.md"


@pytest.fixture
def claim_s() -> float:
    """Time for which a sender has a delivery. It is short only where a killed sender's claims have to end."""
    return 300.0


@pytest.fixture
def settings(nats_url: str, postgres_url: str, redis_url: str, claim_s: float) -> Settings:
    return Settings.model_validate(
        {
            "nats_url": nats_url,
            "postgres_url": postgres_url,
            "redis_url": redis_url,
            "transaction_deadline_s": 60.0,
            "request_deadline_s": 90.0,
            "canary_timeout_s": 60.0,
            "webhook_claim_s": claim_s,
            "purge_s": 0.5,
            "worker_timeout_s": 3_600.0,
            "log_level": "WARNING",
        }
    )


class Scene:
    """A state store in this process, a sender that may die, and a receiver."""

    def __init__(self, api: Harness, sender: Service, receiver: Receiver, gateway: Bus) -> None:
        self.api, self.sender, self.receiver, self.gateway = api, sender, receiver, gateway
        self.tenant = new_id("t")

    async def webhook(self, path: str = "/", **fields: Any) -> WebhookRecord:
        request = CreateWebhook.model_validate(
            {"id": new_id("wh"), "tenant": self.tenant, "url": self.receiver.url(path)}
            | {"salt": random_token(16)}
            | fields
        )
        return await self.gateway.call(webhook_subjects.CREATE_WEBHOOK, request)

    def ref(self, webhook: WebhookRecord) -> dict[str, str]:
        return {"webhook": webhook.id, "tenant": webhook.tenant}

    async def secret(self, webhook: WebhookRecord, salt: str | None = None) -> str:
        request = DeriveSecret(webhook=webhook.id, salt=salt or webhook.salt)
        made: list[str] = []

        async def derived() -> bool:
            try:
                found = await self.gateway.call(webhook_subjects.DERIVE_SECRET, request)
            except UnavailableError:
                # The sender is starting.
                return False
            made.append(found.secret.get_secret_value())
            return True

        await eventually(derived, what=self.sender.logged)
        return made[0]

    async def row(self, webhook: WebhookRecord) -> WebhookRecord:
        return await self.gateway.call(
            webhook_subjects.GET_WEBHOOK, WebhookRef.model_validate(self.ref(webhook))
        )

    async def deliveries(self, webhook: WebhookRecord) -> list[DeliveryRecord]:
        request = ListDeliveries.model_validate(self.ref(webhook) | {"limit": 1_000})
        return list((await self.gateway.call(webhook_subjects.LIST_DELIVERIES, request)).deliveries)

    async def until(
        self, webhook: WebhookRecord, *states: DeliveryState, count: int = 1
    ) -> list[DeliveryRecord]:
        """Wait until the webhook has `count` deliveries, all in one of these states."""

        async def reached() -> bool:
            found = await self.deliveries(webhook)
            return len(found) == count and all(one.state in states for one in found)

        await eventually(reached, what=self.sender.logged)
        return await self.deliveries(webhook)

    async def session(self, prompts: int = 0, ends: bool = True) -> list[str]:
        """Create a session, change its prompt, and end it. Returns the ids of its events, in their order."""
        record = await self.api.create("toy", tenant=self.tenant)
        for number in range(prompts):
            await self.api.prompt(record.id, f"prompt {number}")
        if ends:
            await self.api.end(record.id, self.tenant)
        types = ["session.created", *["prompt.accepted"] * prompts, *(["session.ended"] if ends else [])]
        return [event.id for event in await self.api.until_events(record.id, *types)]

    async def test_event(self, webhook: WebhookRecord) -> str:
        event = new_id("ev")
        request = SendTestEvent.model_validate(self.ref(webhook) | {"event": event})
        await self.gateway.call(webhook_subjects.SEND_TEST_EVENT, request)
        return event


@pytest.fixture
async def scene(settings: Settings, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Scene]:
    sender = Service(
        "webhooks",
        str(Path(__file__).with_name("crashing_sender.py")),
        nats_server,
        tmp_path / "webhooks.log",
        TURBOSERVE_WEBHOOK_KEY=KEY,
        TURBOSERVE_WEBHOOK_HTTP_LOOPBACK="1",
        TURBOSERVE_WEBHOOK_POLL_S="0.05",
        TURBOSERVE_WEBHOOK_TIMEOUT_S="30",
        TURBOSERVE_REQUEST_DEADLINE_S="30",
    )
    gateway = await connected(nats_server, "gateway", 90.0)
    async with Store.running(settings), Harness.connected(settings) as api, receiving() as receiver:
        await api.worker("toy", 64)
        yield Scene(api, sender, receiver, gateway)
        sender.end()
        await gateway.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other quickly."""
    monkeypatch.setattr(rules, "RETRY_AFTER_S", (0.05,) * 10)


@pytest.mark.parametrize("claim_s", [6.0])
@pytest.mark.usefixtures("soon")
async def test_kill_9_at_every_step_loses_nothing_and_changes_no_id(scene: Scene) -> None:
    webhook = await scene.webhook()
    wanted: list[list[str]] = []
    for point in POINTS:
        wanted.append(await scene.session(prompts=1))
        scene.sender.start(CRASH=point)
        process = scene.sender._process
        assert process is not None
        await eventually(lambda process=process: process.poll() is not None, what=scene.sender.logged)  # type: ignore[misc]
        scene.sender.end()
    scene.sender.start()
    events = [event for session in wanted for event in session]
    found = await scene.until(webhook, DeliveryState.DELIVERED, count=len(events))
    assert sorted(one.event for one in found) == sorted(events)
    counts = Counter(scene.receiver.ids())
    assert counts.keys() == set(events)
    # Twice only where a sender died between the answer and its report.
    assert sum(counts.values()) <= len(events) + 2 * rules.WebhookRules().concurrency
    first = list(dict.fromkeys(scene.receiver.ids()))
    for session in wanted:
        assert [event for event in first if event in session] == session
    bodies: dict[str, set[bytes]] = {}
    for one in scene.receiver.got:
        bodies.setdefault(one.id, set()).add(one.body)
    assert all(len(same) == 1 for same in bodies.values())


@pytest.mark.usefixtures("soon")
async def test_failures_are_repeated_in_order_and_delay_no_other_webhook(scene: Scene) -> None:
    failures: Counter[str] = Counter()
    release = asyncio.Event()

    def reply(one: Received) -> Reply:
        if one.path == "/slow":
            return Reply(after=release)
        failures[one.id] += one.path == "/flaky"
        return Reply(503 if one.path == "/flaky" and failures[one.id] < 3 else 200)

    scene.receiver.reply = reply
    flaky, slow, good = [await scene.webhook(path) for path in ("/flaky", "/slow", "/good")]
    events = await scene.session(prompts=2)
    # A busy machine answers the two others in this time, and the test waits for it once.
    scene.sender.start(TURBOSERVE_WEBHOOK_TIMEOUT_S="12")
    await scene.until(good, DeliveryState.DELIVERED, count=4)
    found = await scene.until(flaky, DeliveryState.DELIVERED, count=4)
    assert [one.attempts for one in found] == [3] * 4
    assert scene.receiver.ids("/good") == events
    # Each event until it was accepted, then the next of the session.
    assert scene.receiver.ids("/flaky") == [event for event in events for _ in range(3)]
    assert (await scene.row(flaky)).failures == 0

    async def timed_out() -> bool:
        first = (await scene.deliveries(slow))[-1]
        return first.attempts > 0 and "within 12 s" in (first.error or "")

    await eventually(timed_out, what=scene.sender.logged)
    assert (await scene.row(slow)).failures > 0
    release.set()
    await scene.until(slow, DeliveryState.DELIVERED, count=4)


async def test_gone_disables_with_an_audit_entry_and_an_event(scene: Scene) -> None:
    scene.receiver.reply = lambda one: Reply(410 if one.path == "/gone" else 200)
    gone = await scene.webhook("/gone", types=("session.*",), label="old")
    other = await scene.webhook("/other", types=("webhook.disabled",))
    await scene.session()
    scene.sender.start()
    await scene.until(gone, DeliveryState.FAILED, count=2)
    row = await scene.row(gone)
    assert (row.enabled, row.disabled_reason) == (False, "the receiver answered 410 Gone")
    assert len(scene.receiver.ids("/gone")) == 1
    await scene.until(other, DeliveryState.DELIVERED)
    [told] = [one for one in scene.receiver.got if one.path == "/other"]
    assert told.message["type"] == "webhook.disabled"
    assert told.message["data"] == {"webhook": gone.id, "label": "old", "reason": row.disabled_reason}
    page = await scene.gateway.call(
        subjects.LIST_AUDIT, ListAudit(tenant=scene.tenant, operation="disable_webhook")
    )
    assert [(entry.target, entry.status) for entry in page.entries] == [(gone.id, 200)]
    with pytest.raises(ConflictError):
        await scene.test_event(gone)
    # Nothing is sent until it is enabled again; then only new events are.
    enabled = ChangeWebhook.model_validate(scene.ref(gone) | {"enabled": True})
    scene.receiver.reply = lambda _: Reply()
    await scene.session()
    await scene.gateway.call(webhook_subjects.CHANGE_WEBHOOK, enabled)
    last = await scene.test_event(gone)
    await eventually(lambda: last in scene.receiver.ids("/gone"), what=scene.sender.logged)
    assert len(scene.receiver.ids("/gone")) == 2


async def test_rotation_redelivery_and_tenants(scene: Scene) -> None:
    scene.sender.start()
    began = int(time.time())
    webhook = await scene.webhook(types=("session.created",))
    [event, _] = await scene.session()
    await scene.until(webhook, DeliveryState.DELIVERED)
    old = await scene.secret(webhook)
    salt = random_token(16)
    rotate = RotateSecret.model_validate(scene.ref(webhook) | {"salt": salt})
    await scene.gateway.call(webhook_subjects.ROTATE_SECRET, rotate)
    new = await scene.secret(webhook, salt)
    assert old != new
    again = DeliveryRef.model_validate(scene.ref(webhook) | {"event": event})
    await scene.gateway.call(webhook_subjects.REDELIVER, again)
    await eventually(lambda: len(scene.receiver.got) == 2, what=scene.sender.logged)
    first, second = scene.receiver.got
    assert (first.id, first.body) == (second.id, second.body) == (event, first.body)
    for one, secrets in ((first, [old]), (second, [new, old])):
        keys = [base64.b64decode(secret.removeprefix("whsec_")) for secret in secrets]
        signed = signatures(keys, one.id, int(one.headers["webhook-timestamp"]), one.body)
        assert one.headers["webhook-signature"] == signed
        assert began <= int(one.headers["webhook-timestamp"]) <= one.at
        assert one.headers["content-type"] == "application/json"
    foreign = WebhookRef(webhook=webhook.id, tenant="other")
    with pytest.raises(NotFoundError):
        await scene.gateway.call(webhook_subjects.GET_WEBHOOK, foreign)
    with pytest.raises(NotFoundError):
        await scene.gateway.call(webhook_subjects.DELETE_WEBHOOK, foreign)
    wrong = DeriveSecret(webhook=webhook.id, salt=salt, url="https://169.254.169.254/latest")
    with pytest.raises(InvalidInputError):
        await scene.gateway.call(webhook_subjects.DERIVE_SECRET, wrong)
    await scene.gateway.call(webhook_subjects.DELETE_WEBHOOK, WebhookRef.model_validate(scene.ref(webhook)))
    with pytest.raises(NotFoundError):
        await scene.deliveries(webhook)


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def test_the_receiver_of_the_guide_accepts_what_is_signed(scene: Scene, tmp_path: Path) -> None:
    text = GUIDE.read_text()
    code = re.search(r"<!-- receiver -->\n```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    (tmp_path / "receiver.py").write_text(code[1])
    scene.sender.start()
    [port] = free_ports(1)
    webhook = await scene.webhook(url=f"http://127.0.0.1:{port}/", types=("session.created",))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(tmp_path / "receiver.py"),
        env={"WEBHOOK_SECRETS": await scene.secret(webhook), "PORT": str(port)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        # A delivery that finds no receiver is sent again only seconds later.
        await eventually(lambda: listens(port))
        record = await scene.api.create("toy", tenant=scene.tenant)
        line = (await asyncio.wait_for(process.stdout.readline(), LIMIT_S)).decode()
        assert line.startswith("session.created")
        assert record.id in line
        await scene.until(webhook, DeliveryState.DELIVERED)
        # Another secret signs nothing that this receiver accepts.
        rotate = RotateSecret.model_validate(scene.ref(webhook) | {"salt": random_token(16)})
        twice = RotateSecret.model_validate(scene.ref(webhook) | {"salt": random_token(16)})
        await scene.gateway.call(webhook_subjects.ROTATE_SECRET, rotate)
        await scene.gateway.call(webhook_subjects.ROTATE_SECRET, twice)
        event = await scene.test_event(webhook)

        async def refused() -> bool:
            return [one.status for one in await scene.deliveries(webhook) if one.event == event] == [400]

        await eventually(refused, what=scene.sender.logged)
    finally:
        process.kill()
        await process.wait()
