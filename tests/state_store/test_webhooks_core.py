"""Rules of webhooks: schedule, order, disabling, secrets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboserve.contracts.errors import ConflictError, WebhookLimitError
from turboserve.contracts.webhooks import (
    WEBHOOKS_LIMIT,
    ChangeWebhook,
    CreateWebhook,
    DeliveryRecord,
    DeliveryState,
    ReportDelivery,
    RotateSecret,
    WebhookRecord,
)
from turboserve.state_store.core import webhooks as rules
from turboserve.state_store.core.webhooks import (
    ATTEMPTS,
    DISABLE_FAILURES,
    JITTER,
    RETRY_AFTER_S,
    WebhookRules,
)

RULES = WebhookRules(concurrency=4, overlap_s=100.0, disable_after_s=172_800.0)
SALTS = tuple(f"{number:032x}" for number in range(1, 5))


def webhook(**fields: object) -> WebhookRecord:
    values = {"id": "wh_1", "tenant": "acme", "url": "https://a.example/x", "salt": SALTS[0], "created_at": 1}
    return WebhookRecord.model_validate(values | fields)


def delivery(**fields: object) -> DeliveryRecord:
    values = {"webhook": "wh_1", "event": "ev_1", "type": "session.created", "session": "s", "created_at": 1}
    return DeliveryRecord.model_validate(values | {"due_at": 1} | fields)


def report(status: int | None, **fields: object) -> ReportDelivery:
    values = {"claim": "c", "webhook": "wh_1", "event": "ev_1", "status": status}
    return ReportDelivery.model_validate(values | fields)


@given(
    st.lists(st.floats(0, 1), min_size=ATTEMPTS, max_size=ATTEMPTS), st.sampled_from([None, 302, 404, 500])
)
def test_a_dead_receiver_gets_eleven_attempts_in_about_a_day(
    jitters: list[float], status: int | None
) -> None:
    hook, one, now = webhook(), delivery(), 1.0
    times: list[float] = []
    for jitter in jitters:
        assert one.state is DeliveryState.WAITING
        assert one.due_at == now or not times
        times.append(now)
        hook, one = RULES.attempted(hook, one, report(status), now, jitter)
        now = one.due_at
    assert one.state is DeliveryState.FAILED
    assert (one.attempts, hook.failures, hook.failing_since) == (ATTEMPTS, ATTEMPTS, 1.0)
    for before, after, planned in zip(times, times[1:], RETRY_AFTER_S, strict=False):
        assert planned * (1 - JITTER) - 1e-6 <= after - before <= planned * (1 + JITTER) + 1e-6
    assert 0.75 * 86_400 < times[-1] - times[0] < 1.25 * 86_400


@given(st.floats(0, 1e9), st.floats(0, 1), st.integers(1, ATTEMPTS - 1))
def test_a_receiver_may_ask_for_at_most_an_hour(asked: float, jitter: float, attempts: int) -> None:
    own = rules.delay_s(attempts, jitter)
    assert own <= rules.delay_s(attempts, jitter, asked) <= max(own, 3_600.0)
    if asked <= 3_600.0:
        assert rules.delay_s(attempts, jitter, asked) >= asked


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 40_000)), max_size=80))
def test_a_webhook_is_disabled_only_after_many_failures_in_a_row(steps: list[tuple[bool, float]]) -> None:
    hook, now, row, since = webhook(), 1.0, 0, 0.0
    for succeeds, gap in steps:
        now += gap
        hook, _ = RULES.attempted(hook, delivery(), report(200 if succeeds else 500), now, 0.5)
        row, since = (0, 0.0) if succeeds else (row + 1, since or now)
        assert hook.failures == row
        dead = row >= DISABLE_FAILURES and now - since >= RULES.disable_after_s
        assert hook.enabled is not dead
        if dead:
            assert hook.disabled_reason is not None
            return


def test_gone_disables_at_once_and_enabling_forgets_it() -> None:
    hook, one = RULES.attempted(webhook(), delivery(), report(410), 5.0, 0.5)
    assert (hook.enabled, one.state) == (False, DeliveryState.FAILED)
    assert "410" in (hook.disabled_reason or "")
    ref = {"webhook": "wh_1", "tenant": "acme"}
    again = rules.changed(hook, ChangeWebhook.model_validate(ref | {"enabled": True}))
    assert (again.enabled, again.disabled_reason, again.failures, again.failing_since) == (
        True,
        None,
        0,
        None,
    )
    other = hook.model_copy(update={"enabled": True, "disabled_reason": None})
    for url, failures in (("https://b.example/", 0), (hook.url, hook.failures)):
        moved = rules.changed(other, ChangeWebhook.model_validate(ref | {"url": url}))
        assert (moved.failures, moved.failing_since is None) == (failures, not failures)
    off = rules.changed(again, ChangeWebhook.model_validate(ref | {"enabled": False, "label": "x"}))
    assert (off.enabled, off.label, off.url) == (False, "x", again.url)


@pytest.mark.parametrize("status", [200, 204, 299])
def test_any_status_of_success_delivers(status: int) -> None:
    hook, one = RULES.attempted(
        webhook(failures=3, failing_since=1), delivery(attempts=2), report(status), 9, 0
    )
    assert (one.state, one.attempts, one.finished_at, one.status) == (DeliveryState.DELIVERED, 3, 9, status)
    assert (hook.failures, hook.failing_since) == (0, None)


@dataclass(frozen=True)
class Queued:
    number: int
    session: str | None
    attempts: int


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, ATTEMPTS)), min_size=1, max_size=12)
)
def test_of_one_session_the_oldest_goes_first_until_it_has_failed_often(
    rows: list[tuple[str | None, int]],
) -> None:
    queue = [Queued(number, session, attempts) for number, (session, attempts) in enumerate(rows)]
    ready = [one for one in queue if not any(rules.holds_back(other, one) for other in queue)]
    assert ready, "something can always be sent"
    assert all(one in ready for one in queue if one.session is None)
    for session in {one.session for one in queue} - {None}:
        of_session = [one for one in queue if one.session == session]
        fresh = [one for one in of_session if one.attempts < rules.ORDERED_ATTEMPTS]
        # All that have failed often, up to the first that has not.
        wanted = of_session[: of_session.index(fresh[0]) + 1] if fresh else of_session
        assert [one for one in ready if one.session == session] == wanted


@given(st.integers(0, 6), st.integers(0, 3), st.booleans())
def test_a_failing_receiver_gets_one_attempt_at_a_time(in_flight: int, failures: int, enabled: bool) -> None:
    hook = webhook(failures=failures, enabled=enabled)
    most = 0 if not enabled else 1 if failures else RULES.concurrency
    assert RULES.places(hook, in_flight) == max(0, most - in_flight)


def test_both_secrets_sign_until_the_overlap_ends() -> None:
    ref = {"webhook": "wh_1", "tenant": "acme"}
    rotated = RULES.rotated(webhook(), RotateSecret.model_validate(ref | {"salt": SALTS[1]}), 50.0)
    assert rules.signing_salts(rotated, 149.0) == (SALTS[1], SALTS[0])
    assert rules.signing_salts(rotated, 150.0) == (SALTS[1],)
    # A repeat, and then another rotation.
    assert RULES.rotated(rotated, RotateSecret.model_validate(ref | {"salt": SALTS[1]}), 90.0) == rotated
    twice = RULES.rotated(rotated, RotateSecret.model_validate(ref | {"salt": SALTS[2]}), 60.0)
    assert rules.signing_salts(twice, 70.0) == (SALTS[2], SALTS[1])


def test_creation_is_limited_and_repeatable() -> None:
    request = CreateWebhook(id="wh_1", tenant="acme", url="https://a.example/x", salt=SALTS[0])
    made = RULES.created(request, WEBHOOKS_LIMIT - 1, 7.0)
    with pytest.raises(WebhookLimitError) as full:
        RULES.created(request, WEBHOOKS_LIMIT, 7.0)
    assert full.value.limit == WEBHOOKS_LIMIT
    assert rules.repeated(made, request.model_copy(update={"salt": SALTS[1]})) == made
    for change in (
        {"tenant": "other"},
        {"url": "https://b.example"},
        {"types": ("prompt.*",)},
        {"label": "x"},
    ):
        with pytest.raises(ConflictError):
            rules.repeated(made, request.model_copy(update=change))


def test_filters_name_types_or_kinds() -> None:
    assert rules.wants((), "session.ended")
    assert rules.wants(("prompt.*", "session.ended"), "session.ended")
    assert rules.wants(("prompt.*",), "prompt.applied")
    assert not rules.wants(("prompt.*",), "session.ended")
    assert not rules.wants(("session.end",), "session.ended")
