"""Counts in texts for people: `1 session waits`, `2 sessions wait`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.keys import KeyLimits
from turboserve.scheduler.placement.interface import why_not
from turboserve.scheduler.placement.types import Demand
from turboserve.state_store.core import key_limits, tenants
from turboserve.state_store.core.workers import ModelCapacity
from turboserve.wording import counted

ROOT = Path(__file__).parents[2]
NOUNS = (
    "attempts|chunks|digests|events|files|frames|keys|lines|links|migrations|models|parts|places|recordings|"
    "samples|segments|sessions|slabs|slots|statistics|steps|streams|switches|values|viewers|webhooks|words|"
    "workers"
)
COUNT = re.compile(rf"\{{([^{{}}]*)\}} (?:[a-z-]+ ){{0,2}}?(?:{NOUNS})\b")
"""A value in a text, and behind it, perhaps after other words, many things."""
NEVER_ONE = {
    "absorption.py: feedback.deficit:.1f",
    "advisor.py: self.forecast.value:.1f",
    "classes.py: sessions",
    "fidelity.py: self.steps",
    "interface.py: candidates",
    "keys.py: valid",
    "lanes.js: bar.chunks",
    "links.py: found",
    "load.py: len(found)",
    "log_purge.py: subject!r",
    "models.py: len(each)",
    "models.py: wanted.model",
    "offer.py: LINE_LIMIT",
    "pool_history.py: made",
    "prompts.js: this.guide.words_limit",
    'scaling_schemas.py: "level": None, "table": None',
    "server.py: count",
    "server.py: room + settings.descriptor_reserve",
    "shares.py: self.workers",
    "trace.py: of",
    "watch.py: events",
    "webhooks.py: count",
    "webhooks.py: record.failures",
}
"""Those that are above 1 where the text is shown, have a decimal point, or are no count."""


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (0, ("session",), "0 sessions"),
        (1, ("session",), "1 session"),
        (2, ("session",), "2 sessions"),
        (0, ("session waits", "sessions wait"), "0 sessions wait"),
        (1, ("session waits", "sessions wait"), "1 session waits"),
        (12, ("session waits", "sessions wait"), "12 sessions wait"),
    ],
)
def test_a_count_has_its_noun(number: int, words: tuple[str, ...], text: str) -> None:
    assert counted(number, *words) == text


def test_no_text_of_services_and_pages_has_a_count_before_a_fixed_plural() -> None:
    files = [
        file
        for folder in ("services", "shared/turboserve", "cli/turboserve", "sdk")
        for kind in ("*.py", "*.js")
        for file in (ROOT / folder).rglob(kind)
        if "node_modules" not in file.parts
    ]
    found = {f"{file.name}: {match[1]}" for file in files for match in COUNT.finditer(file.read_text())}
    assert found == NEVER_ONE


def refusal(check: Callable[[], object]) -> str:
    with pytest.raises(TurboServeError) as caught:
        check()
    return caught.value.detail


def demand(digest: str | None) -> Demand:
    return Demand("ses_1", "toyworld", "place", weights_digest=digest)


ROOM = ModelCapacity("toyworld", known=True, capacity=1, demand=1)
ONE_SLOT = tenants.TenantLimits(sessions=1, suspended=1, slots=1)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (lambda: why_not(1, False, demand(None)), "the only worker that serves toyworld is full"),
        (lambda: why_not(2, False, demand(None)), "all 2 workers that serve toyworld are full"),
        (lambda: why_not(1, False, demand("w1")), "the only worker with the weights w1 is full"),
        (lambda: why_not(2, False, demand("w1")), "all 2 workers with the weights w1 are full"),
        (
            lambda: refusal(lambda: tenants.check_slot(tenants.TenantUse(slots=1), ROOM, ONE_SLOT, 1.0)),
            "1 session of this tenant runs or waits for a slot, the limit is 1",
        ),
        (
            lambda: refusal(lambda: tenants.check_sessions(tenants.TenantUse(live=1), ONE_SLOT, 1.0)),
            "this tenant has 1 session that has not ended, the limit is 1",
        ),
        (
            lambda: refusal(
                lambda: key_limits.check_slot(
                    key_limits.KeyUsage(KeyLimits(slots=2), slots=2), retry_s=1.0, now=0.0
                )
            ),
            "2 sessions of this key run or wait for a slot, the limit is 2",
        ),
        (lambda: refusal(lambda: ROOM.admit(1.0)), "no slot for toyworld is free (1 in all)"),
    ],
)
def test_a_refusal_counts_one_and_many(written: Callable[[], str], text: str) -> None:
    assert written() == text
