"""The table of subjects, and the accounts and permissions derived from it."""

from __future__ import annotations

import pytest

from turboserve import subjects
from turboserve.broker_accounts import Flow, account_of, flows, permissions
from turboserve.contracts.viewers import LeaveViewer
from turboserve.subject_types import Caller, Topic
from turboserve.subjects import ENDPOINTS, LOGS, SERVICES, TOPICS


def test_every_subject_stands_once_and_names_services_that_exist() -> None:
    names = [endpoint.subject for endpoint in ENDPOINTS]
    names += [topic.pattern for topic in TOPICS] + [log.pattern for log in LOGS]
    assert len(set(names)) == len(names)
    named = {endpoint.server for endpoint in ENDPOINTS}
    named |= {service for endpoint in ENDPOINTS for service in endpoint.callers}
    named |= {service for topic in TOPICS for service in (*topic.senders, *topic.readers)}
    named |= {service for log in LOGS for service in (*log.writers, *log.readers, *log.history_readers)}
    assert named <= set(SERVICES)


def test_only_one_user_listens_to_a_users_answers() -> None:
    for service in SERVICES:
        for other in (*SERVICES, subjects.ADMIN):
            prefix = subjects.inbox_prefix(other)
            listens = any(name.startswith(prefix) for name in permissions(service)["subscribe"])
            assert listens == (service == other)
    with pytest.raises(ValueError, match="stranger"):
        permissions("stranger")


def test_only_the_state_store_writes_the_fence_and_events() -> None:
    for service in SERVICES:
        publish = permissions(service)["publish"]
        writes = any(name in publish for name in ("own.*", "event.*", "worker-event.*"))
        assert writes == (service == "state-store")
        assert ("chunk.*.*" in publish) == (service == "worker")


def test_a_request_names_its_caller_and_nothing_else_does() -> None:
    endpoint = subjects.END_SESSION
    for caller in (Caller("gateway"), Caller("worker", "wk_1")):
        assert endpoint.caller_of(endpoint.request_subject(caller.token)) == caller
    for subject in (
        "state.session.end",
        "state.session.end.from.",
        "state.session.end.from.worker.a.b",
        "state.session.end.from.worker.",
        "state.session.get.from.gateway",
        "",
    ):
        with pytest.raises(ValueError, match=r"caller|subject"):
            endpoint.caller_of(subject)


def test_what_two_services_send_each_other_is_not_internal() -> None:
    gateway, both = ("gateway",), ("gateway", "worker")
    for senders, readers, internal in (
        (gateway, gateway, True),
        (gateway, ("worker",), False),
        # From each of them to the other, it passes between accounts.
        (both, both, False),
    ):
        assert Topic("leave.{id}", LeaveViewer, senders, readers).internal == internal


def test_what_passes_between_accounts() -> None:
    hub, found = account_of("state-store"), flows()
    assert len(set(found)) == len(found)
    for flow in found:
        assert flow.source != flow.target
        # A pattern of any length would let unforeseen subjects through.
        assert not flow.subject.endswith(">")
        assert not flow.subject.startswith("_")
    assert Flow("state.session.end.from.gateway", "GATEWAY", hub, "service") in found
    assert Flow("scheduler.session.migrate.from.gateway", "GATEWAY", "SCHEDULER", "service") in found
    assert Flow("live.event.*", hub, "SCHEDULER", "stream") in found
    assert Flow("load.*.*", "WORKER", "AUTOSCALER", "stream") in found
    assert not [flow for flow in found if flow.subject == "own.*"]


def test_a_log_takes_its_own_subjects_only() -> None:
    assert subjects.EVENT.takes("event.ses_1")
    for subject in ("worker-event.w", "event", "event.a.b", "canary.EVENTS", "live.event.a"):
        assert not subjects.EVENT.takes(subject)
