"""One migration in a calm world, with a process that dies or is frozen at a given moment of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest

from tests.simulation.simulate_scene import LIMIT_S, scene
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.scheduler.messages import CommitMigration
from turboserve.simulation.service import ServiceProcess

FREEZE_S = 12.0
"""Longer than a standby waits."""

MOMENTS = ("begun", "copying", "verified", "commit sent", "committed")
VICTIMS = ("leader", "source", "target", "state-store", "autoscaler")


@dataclass(frozen=True)
class Played:
    """Result of one migration."""

    committed_by: set[str]
    """Scheduler processes that tried to commit a migration."""
    leader: str
    """Leader when the migration began."""
    epoch: int
    """Epoch when the migration began."""
    row: SessionRecord
    """Row before the session was ended."""
    source: str
    target: str


def played(moment: str, who: str, harm: Callable[[ServiceProcess], None]) -> Played:
    with scene() as one:
        one.migration_begins()
        source, target, epoch = str(one.row.worker), str(one.row.target), one.row.epoch
        leader = one.leader().process.name
        one.comes_to(moment, source, target)
        harm(one.victim(who, source, target))
        row = one.rests()
        return Played(one.those_that_said(CommitMigration), leader, epoch, row, source, target)


@cache
def killed(moment: str, who: str) -> Played:
    return played(moment, who, lambda victim: victim.kill("kill -9"))


DEATHS = [(who, moment) for who in VICTIMS for moment in MOMENTS]
LATER = {
    (who, moment) for who in ("state-store", "autoscaler") for moment in ("begun", "verified", "committed")
}
"""Deaths of processes that take no part in the copy, at moments next to those in `make test`."""


@pytest.mark.parametrize(
    ("who", "moment"),
    [pytest.param(*death, marks=pytest.mark.soak) if death in LATER else death for death in DEATHS],
)
def test_a_migration_survives_a_death_at_every_stage(who: str, moment: str) -> None:
    end = killed(moment, who)
    decided = moment in ("commit sent", "committed")
    if who == "source":
        # Dead before the state had arrived: another worker continues from the latents.
        assert end.row.worker != end.source
        assert not decided or (end.row.worker, end.row.epoch) == (end.target, end.epoch + 1)
    elif who == "target":
        assert end.row.worker != end.target
        # It may have migrated later, to the replacement of the dead worker.
        assert end.committed_by or end.row.epoch == end.epoch
    else:
        assert (end.row.worker, end.row.epoch) == (end.target, end.epoch + 1)


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_standby_finishes_what_a_dead_leader_had_begun(moment: str) -> None:
    end = killed(moment, "leader")
    assert (end.row.worker, end.row.epoch) == (end.target, end.epoch + 1)
    by_the_first = moment in ("commit sent", "committed")
    assert (end.leader in end.committed_by) == by_the_first


def test_the_standby_undoes_a_migration_that_does_not_end() -> None:
    """The target is frozen and not declared gone yet: only the rows record the migration."""
    with scene() as one:
        one.migration_begins()
        source, target, epoch = str(one.row.worker), str(one.row.target), one.row.epoch
        one.comes_to("copying", source, target)
        one.leader().kill("kill -9")
        one.victim("target", source, target).freeze(LIMIT_S)
        one.until(lambda: one.row.migration is None)
        assert (one.row.worker, one.row.epoch, one.row.phase) == (source, epoch, Phase.ACTIVE)
        assert not one.those_that_said(CommitMigration)
        one.rests()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_leader_that_was_frozen_meanwhile_does_no_harm(moment: str) -> None:
    """The process resumes in the middle of an action, in a term that is over."""
    end = played(moment, "leader", lambda victim: victim.freeze(FREEZE_S))
    assert (end.row.worker, end.row.epoch) == (end.target, end.epoch + 1)
