"""Secrets, signatures and payloads."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from turboserve.clock import SystemClock
from turboserve.contracts.events import PromptApplied
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.webhooks import TakenDelivery
from turboserve.service import Runtime
from turboserve.webhooks.client import WebhookClient
from turboserve.webhooks.core.payloads import payload
from turboserve.webhooks.core.signing import derive_key, secret_text, signatures
from turboserve.webhooks.sender import Sender
from turboserve.webhooks.settings import Settings

SALT = "0123456789abcdef" * 2


def test_the_signature_is_that_of_the_specification() -> None:
    """The example of the Standard Webhooks libraries."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    found = signatures([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    two = signatures([key, b"other"], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert two.split(" ")[0] == found
    assert len(two.split(" ")) == 2


@given(st.binary(min_size=16, max_size=64), st.text("0123456789abcdef", min_size=32, max_size=32))
def test_secrets_differ_by_master_salt_and_webhook(master: bytes, salt: str) -> None:
    key = derive_key(master, salt, "wh_1")
    assert len(key) == 32
    assert key == derive_key(master, salt, "wh_1")
    others = {
        derive_key(master + b"x", salt, "wh_1"),
        derive_key(master, f"{int(salt, 16) ^ 1:032x}", "wh_1"),
        derive_key(master, salt, "wh_2"),
    }
    assert len(others | {key}) == 4
    text = secret_text(key)
    assert text.startswith("whsec_")
    assert base64.b64decode(text.removeprefix("whsec_")) == key


def taken(kind: str, body: bytes) -> TakenDelivery:
    return TakenDelivery(
        claim="c",
        webhook="wh_1",
        url="https://a.example/",
        salts=(SALT,),
        event="ev_1",
        type=kind,
        session="ses_1",
        attempt=1,
        body=body.decode(),
        created_at=1_000_000_000.25,
    )


async def test_an_error_of_the_service_itself_counts_as_an_attempt() -> None:
    """A report that is missing would make every claim begin anew, without end."""

    class BrokenClient:
        async def post(self, *_: Any) -> None:
            raise RuntimeError("a secret of this process")

    runtime = SimpleNamespace(bus=None, clock=SystemClock())
    sender = Sender(cast(Runtime, runtime), Settings(), cast(WebhookClient, BrokenClient()), b"m" * 16)
    outcome, report = await sender._send(taken("webhook.test", b"{}"))
    assert (outcome, report.status) == ("failed", None)
    assert report.error == "the attempt broke in the service itself"


def test_the_payload_is_the_public_event() -> None:
    record = SessionRecord.model_validate(
        {
            "id": "ses_1",
            "tenant": "acme",
            "model": "m",
            "prompt": "p",
            "seed": 1,
            "version": 1,
            "phase": Phase.ACTIVE,
            "activity": Activity.WATCHING,
            "epoch": 1,
            "worker": "wk_1",
            "created_at": 1.0,
            "updated_at": 1.0,
            "event_sequence": 4,
            "control_seq": 1,
            "key": "k",
        }
    )
    event = PromptApplied(
        id="ev_1",
        at=1_000_000_000.25,
        record=record,
        prompt_id="p1",
        control_seq=1,
        prompt="é",
        chunk_index=5,
    )
    body = payload(taken("prompt.applied", event.to_bytes()))
    assert body.decode() == (
        '{"type":"prompt.applied","version":1,"timestamp":"2001-09-09T01:46:40.250000Z","data":'
        '{"session":"ses_1","type":"prompt.applied","sequence":4,"id":"ev_1",'
        '"at":"2001-09-09T01:46:40.250000Z","phase":"active","activity":"watching","epoch":1,'
        '"worker":"wk_1","control_seq":1,"prompt_id":"p1","prompt":"é","chunk_index":5}}'
    )
    own = payload(taken("webhook.test", b'{"webhook": "wh_1"}'))
    assert own.decode() == (
        '{"type":"webhook.test","version":1,"timestamp":"2001-09-09T01:46:40.250000Z",'
        '"data":{"webhook":"wh_1"}}'
    )
