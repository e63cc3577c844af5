"""OServe's search for a deployment (4.3, Algorithm 1), for workers of several kinds that change their models.

OServe merges, splits and resizes replicas of GPUs. Here a worker is one device, so the random change is that
a worker of an underloaded offer takes the models of another offer of its kind. As in the paper, a change
stays only if Φ, the value of the flow, rises; and the search neither knows prices nor what a change costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

from turboserve.allocation.classes import SessionClass
from turboserve.autoscaler.control.composition import Composition, Offer, OfferKey
from turboserve.baselines.oserve import FlowShares
from turboserve.scheduler.placement.shares import Kind, Shares

ROUNDS_WITHOUT_GAIN = 20
FULL = 0.999
"""Part of its capacity from which an offer counts as overloaded: its flow equals the capacity."""


class RandomSearch:
    """Searches the models of a fixed number of workers of each kind."""

    def __init__(self, seed: int = 0, most_rounds: int = 1000) -> None:
        self._source = Random(seed)
        self._most_rounds = most_rounds

    def __call__(
        self, offers: Sequence[Offer], workers: Mapping[str, int], demand: Mapping[SessionClass, float]
    ) -> Composition:
        """Return the composition. `workers`: number of workers of each kind."""
        by_key = {offer.key: offer for offer in offers}
        now = self._start(offers, workers)
        value, shares = _flow(by_key, now, demand)
        without = 0
        for _ in range(self._most_rounds):
            if without == ROUNDS_WITHOUT_GAIN:
                break
            changed = self._changed(by_key, now, shares)
            new_value, new_shares = _flow(by_key, changed, demand)
            if new_value > value * (1 + 1e-9):
                now, value, shares, without = changed, new_value, new_shares, 0
            else:
                without += 1
        return +now

    @staticmethod
    def _start(offers: Sequence[Offer], workers: Mapping[str, int]) -> Counter[OfferKey]:
        """Spread the workers of each kind equally over its offers."""
        now: Counter[OfferKey] = Counter()
        for kind, count in workers.items():
            keys = sorted(offer.key for offer in offers if offer.kind == kind)
            for place in range(count if keys else 0):
                now[keys[place % len(keys)]] += 1
        return now

    def _changed(
        self, offers: Mapping[OfferKey, Offer], now: Counter[OfferKey], shares: Shares
    ) -> Counter[OfferKey]:
        """Return a composition in which some workers of underloaded offers have other models."""
        after = now.copy()
        for key in sorted(key for key, count in now.items() if count):
            full = _used(offers[key], now[key], shares) >= FULL
            others = [other for other in sorted(offers) if other[0] == key[0] and other != key]
            if full or not others or after[key] < 1 or self._source.random() < 0.5:
                continue
            overloaded = [o for o in others if now[o] and _used(offers[o], now[o], shares) >= FULL]
            target = self._source.choice(overloaded or others)
            after[key] -= 1
            after[target] += 1
        return after


def _name(key: OfferKey) -> str:
    return f"{key[0]} {'+'.join(key[1])}"


def _used(offer: Offer, workers: int, shares: Shares) -> float:
    rates = offer.capability.sessions
    return sum(shares.of(_name(offer.key), one) / n for one, n in rates.items() if n > 0) / workers


def _flow(
    offers: Mapping[OfferKey, Offer], workers: Counter[OfferKey], demand: Mapping[SessionClass, float]
) -> tuple[float, Shares]:
    kinds = [Kind(_name(key), n, offers[key].capability) for key, n in sorted(workers.items()) if n]
    shares = FlowShares()(kinds, demand, {})
    return sum(shares.sessions.values()), shares
