"""The controller's parts: measurement, table, feedback and forecast."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.autoscaler.control.budget import budget, would_hold
from turboserve.autoscaler.control.events import SessionChange
from turboserve.autoscaler.control.feedback_monitor import CONVINCED, FeedbackMonitor
from turboserve.autoscaler.control.policy import ControlPolicy, default_table
from turboserve.autoscaler.control.scale_in import FARTHEST, Peak, ScaleInBackoff
from turboserve.autoscaler.control.workload import Forecast, WorkloadDetector
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.contracts.autoscale import LevelParameters, ProfileTable
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.pool import LoadFeedback


def row(rho: float, weight: float = 0.2, level: int = 1) -> LevelParameters:
    return LevelParameters(level=level, volatility_from=0, latency_weight=weight, target_utilization=rho)


def load(required: int = 1, workers: int = 1, at: float = 0.0, **changed: object) -> LoadFeedback:
    values: dict[str, object] = {
        "model": "m", "rho_max": 0.5, "required": required, "waiting": 0, "capacity": 4 * workers,
        "workers": workers, "at": at,
    }  # fmt: skip
    return LoadFeedback.model_construct(None, **(values | changed))


class TestDetector:
    @settings(deadline=None)
    @given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
    def test_volatility_is_the_standard_deviation_over_the_window(self, counts: list[int]) -> None:
        detector = WorkloadDetector(epoch_s=1.0, window=10)
        for second, count in enumerate(counts):
            detector.advance(float(second))
            if count:
                detector.add(SessionChange.ARRIVAL, count, second + 0.5)
        detector.advance(float(len(counts)))
        window = ([0] * 10 + counts)[-10:]
        assert detector.volatility == pytest.approx(statistics.pstdev(window))

    def test_arrivals_and_activations_count_and_the_others_do_not(self) -> None:
        detector = WorkloadDetector(window=10)
        detector.add(SessionChange.DEPARTURE, 5, 0.5)
        detector.add(SessionChange.IDLING, 5, 0.6)
        assert detector.volatility == 0
        detector.add(SessionChange.ACTIVATION, 2, 0.7)
        detector.add(SessionChange.ARRIVAL, 2, 0.8)
        assert detector.volatility == pytest.approx(statistics.pstdev([4] + 9 * [0]))
        assert detector.activity == {"arrival": 2, "departure": 5, "activation": 2, "idling": 5}

    def test_a_burst_is_seen_before_its_epoch_is_over(self) -> None:
        detector = WorkloadDetector(window=30)
        detector.advance(0.0)
        detector.add(SessionChange.ARRIVAL, 20, 100.1)
        assert detector.volatility == pytest.approx(20 * math.sqrt(29) / 30)

    def test_a_window_of_silence_forgets(self) -> None:
        detector = WorkloadDetector(window=5)
        detector.add(SessionChange.ARRIVAL, 20, 0.1)
        detector.advance(1e6)
        assert detector.volatility == 0
        assert detector.activity["arrival"] == 0

    def test_a_clock_that_stands_still_or_goes_back_changes_nothing(self) -> None:
        detector = WorkloadDetector(window=5)
        detector.add(SessionChange.ARRIVAL, 3, 10.0)
        before = detector.volatility
        detector.advance(4.0)
        assert detector.volatility == before


class TestBudget:
    @settings(deadline=None)
    @given(st.integers(0, 500), st.integers(1, 16), st.sampled_from([0.25, 0.5, 0.65, 0.8, 0.95]))
    def test_is_the_formula_at_the_papers_weight(self, required: int, capacity: int, rho: float) -> None:
        found = budget(required, capacity, row(rho, weight=0.0))
        assert found == math.ceil(round(required / (capacity * rho), 6))

    def test_a_fifth_never_pays_for_a_worker_at_five_sessions(self) -> None:
        for required in range(1, 81):
            assert budget(required, 5, row(0.8, 0.2)) == budget(required, 5, row(0.8, 0.0))

    def test_a_heavier_weight_buys_workers_where_the_latency_falls(self) -> None:
        assert budget(20, 5, row(0.8, 0.0)) == 5
        # 5 workers hold 4 each, 10 hold 2 each: 5 more workers for 2 × λ.
        assert budget(20, 5, row(0.8, 3.5)) == 10

    def test_a_weight_does_not_buy_beyond_the_limit(self) -> None:
        assert budget(20, 5, row(0.8, 100.0), most=8) == 7
        assert budget(90, 5, row(0.8, 100.0), most=8) >= 23, "but what is needed is said"

    @settings(deadline=None)
    @given(st.integers(0, 100), st.integers(1, 8), st.integers(0, 30), st.integers(20, 100))
    def test_would_hold_means_an_even_spread_fits(
        self, required: int, capacity: int, workers: int, percent: int
    ) -> None:
        even = [required // workers + (index < required % workers) for index in range(workers)]
        fits = sum(even) == required and all(
            held <= capacity and 100 * held <= capacity * percent for held in even
        )
        assert would_hold(required, capacity, workers, percent / 100) == fits


class TestTable:
    def table(self, **second: object) -> dict[str, object]:
        first = {"level": 1, "volatility_from": 0, "volatility_to": 1.5,
                 "latency_weight": 0.2, "target_utilization": 0.8}  # fmt: skip
        last = {"level": 2, "volatility_from": 1.5, "latency_weight": 0.2, "target_utilization": 0.5}
        return {"levels": [first, last | second], "provenance": {"source": "test"}}

    def test_every_volatility_has_one_row(self) -> None:
        table = ProfileTable.parse(json.dumps(self.table()))
        assert [table.row(v).level for v in (0.0, 1.49, 1.5, 1e9, math.nan)] == [1, 1, 2, 2, 2]

    @pytest.mark.parametrize(
        ("second", "field", "limit"),
        [
            ({"volatility_from": 1.6}, "levels.1.volatility_from", 1.5),
            ({"volatility_from": 1.4}, "levels.1.volatility_from", 1.5),
            ({"volatility_to": 9.0}, "levels.1.volatility_to", "none"),
            ({"level": 3}, "levels.1.level", 2),
            ({"target_utilization": 0.0}, "levels.1.target_utilization", None),
            ({"target_utilization": 1.01}, "levels.1.target_utilization", None),
            ({"latency_weight": "x"}, "levels.1.latency_weight", None),
            ({"latency_weight": math.nan}, "levels.1.latency_weight", None),
            ({"target_utilization": math.nan}, "levels.1.target_utilization", None),
            ({"cost_s": math.inf}, "levels.1.cost_s", None),
            ({"target_utilization": 1e-320}, "levels.1.target_utilization", None),
            ({"latency_weight": 1e308}, "levels.1.latency_weight", None),
            ({"volatility_from": -1}, "levels.1.volatility_from", None),
        ],
    )
    def test_gaps_overlaps_and_wild_values_are_named(
        self, second: dict[str, object], field: str, limit: str | float | None
    ) -> None:
        with pytest.raises(InvalidInputError) as caught:
            ProfileTable.parse(json.dumps(self.table(**second)))
        assert (caught.value.field, caught.value.limit) == (field, limit)

    @pytest.mark.parametrize(
        ("given", "field"),
        [
            ({"epoch_s": math.inf}, "provenance.epoch_s"),
            ({"epoch_s": 1e-9}, "provenance.epoch_s"),
            ({"window": 10**9}, "provenance.window"),
            ({"start_up_s": math.inf}, "provenance.start_up_s"),
            ({"made_at": math.inf}, "provenance.made_at"),
            ({"controller": {"hysteresis": math.nan}}, "provenance.controller.hysteresis"),
        ],
    )
    def test_an_unusable_provenance_is_refused(self, given: dict[str, object], field: str) -> None:
        data = self.table()
        data["provenance"] = {"source": "test", **given}
        with pytest.raises(InvalidInputError) as caught:
            ProfileTable.parse(json.dumps(data))
        assert caught.value.field == field

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"levels": [], "provenance": {"source": "x"}}'])
    def test_what_is_no_table_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidInputError) as caught:
            ProfileTable.parse(text)
        assert caught.value.field

    def test_the_first_level_begins_at_zero(self) -> None:
        data = self.table()
        data["levels"] = [data["levels"][1] | {"level": 1}]  # type: ignore[index]
        with pytest.raises(InvalidInputError) as caught:
            ProfileTable.parse(json.dumps(data))
        assert caught.value.field == "levels.0.volatility_from"

    def test_the_shipped_table_is_sound_and_says_where_it_is_from(self) -> None:
        table = default_table()
        assert table.levels
        assert table.provenance.command.startswith("turboserve profile autoscaler")
        assert {row.pass_rate for row in table.levels if row.segments} == {1.0}
        assert ProfileTable.parse(table.to_bytes()) == table

    def test_a_file_has_its_time_as_rfc_3339(self) -> None:
        table = ProfileTable.parse(json.dumps(self.table()))
        made = table.provenance.model_copy(update={"made_at": 1_795_381_445.0})
        table = table.model_copy(update={"provenance": made})
        written = json.loads(table.to_file())
        assert written["provenance"]["made_at"] == "2026-11-22T21:04:05Z"
        assert ProfileTable.parse(table.to_file()) == table
        written["provenance"]["made_at"] = "2026-11-22T22:04:05+01:00"
        assert ProfileTable.parse(json.dumps(written)) == table

    @pytest.mark.parametrize("time", ["2026-11-22T21:04:05", "2026-11-22", "Tuesday", "1969-12-31T23:59:59Z"])
    def test_a_time_without_an_offset_or_before_1970_is_refused(self, time: str) -> None:
        data = self.table()
        data["provenance"] = {"source": "test", "made_at": time}
        with pytest.raises(InvalidInputError) as caught:
            ProfileTable.parse(json.dumps(data))
        assert caught.value.field == "provenance.made_at"

    def test_the_shipped_table_was_profiled_with_the_controller_that_ships(self) -> None:
        """Incident: the table was profiled with a cool-down that was no longer the setting's."""
        provenance = default_table().provenance
        policy = AutoscalerSettings().control_policy(default_table())
        assert provenance.controller == policy.dynamics
        assert (provenance.epoch_s, provenance.window) == (policy.epoch_s, policy.window)

    def test_limits_of_the_policy_are_named(self) -> None:
        for field, value in {
            "least": 3,
            "capacity": 0,
            "hysteresis": 1.0,
            "stale_s": 0.0,
            "window": 1,
        }.items():
            with pytest.raises(ValueError, match=field):
                ControlPolicy(**{field: value})  # type: ignore[arg-type]


class TestHearing:
    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            ({"rho_max": math.nan}, "rho_max_not_a_number"),
            ({"rho_max": math.inf}, "rho_max_not_a_number"),
            ({"rho_max": -1.0}, "rho_max_not_a_number"),
            ({"at": math.nan}, "time_not_a_number"),
            ({"waiting": 2}, "more_wait_than_are_required"),
            ({"own_required": 2}, "own_sessions_implausible"),
            ({"capacity": 0}, "workers_without_capacity"),
            ({"required": -1}, "below_zero"),
        ],
    )
    def test_nonsense_is_counted_and_not_believed(self, changed: dict[str, object], why: str) -> None:
        hearing = FeedbackMonitor(stale_s=10.0)
        assert not hearing.update(load(**changed), 1.0)  # type: ignore[arg-type]
        assert hearing.refused == {why: 1}
        assert hearing.feedback is None
        assert hearing.is_stale(1.0)

    def test_a_message_from_the_past_is_not_believed(self) -> None:
        hearing = FeedbackMonitor(stale_s=10.0)
        hearing.update(load(9, at=100.0), 0.0)
        assert not hearing.update(load(1, at=99.0), 1.0)
        assert hearing.feedback is not None
        assert hearing.feedback.required == 9
        assert hearing.refused == {"from_the_past": 1}

    def test_a_clock_that_was_set_back_is_believed_in_the_end(self) -> None:
        hearing = FeedbackMonitor(stale_s=10.0)
        hearing.update(load(9, at=1000.0), 0.0)
        believed = [hearing.update(load(1, at=10.0 + i), 1.0 + i) for i in range(CONVINCED)]
        assert believed == [False] * (CONVINCED - 1) + [True]

    def test_one_old_message_repeated_is_never_believed(self) -> None:
        hearing = FeedbackMonitor(stale_s=10.0)
        hearing.update(load(9, at=1000.0), 0.0)
        assert not any(hearing.update(load(1, at=10.0), 1.0 + i) for i in range(5 * CONVINCED))

    def test_a_gap_begins_the_hearing_anew(self) -> None:
        hearing = FeedbackMonitor(stale_s=10.0)
        hearing.update(load(), 0.0)
        hearing.update(load(), 9.0)
        assert hearing.since == 0.0
        hearing.update(load(), 19.5)
        assert hearing.since == 19.5


class TestPeak:
    @settings(deadline=None)
    @given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9)), min_size=1, max_size=30))
    def test_is_the_largest_value_that_held_in_the_window(self, steps: list[tuple[float, int]]) -> None:
        peak, now, known = Peak(4.0), 0.0, []
        for wait, value in steps:
            now += wait
            known.append((now, value))
            peak.add(value, now)
            ends = [at for at, _ in known[1:]] + [now]
            expected = max(v for (_, v), end in zip(known, ends, strict=True) if end >= now - 4.0)
            assert peak.value == expected
            lately = [v for (_, v), end in zip(known, ends, strict=True) if end >= now - 1.5]
            assert peak.over(1.5, now) == max(lately)


class TestPatience:
    def test_a_mistake_doubles_it_up_to_a_limit_and_good_ones_halve_it(self) -> None:
        backoff = ScaleInBackoff(pays_s=10.0)
        for mistake in range(6):
            backoff.shrank(100.0 * mistake)
            backoff.grew(100.0 * mistake + 9.0)
        assert backoff.factor == FARTHEST
        backoff.shrank(1000.0)
        backoff.grew(1011.0)
        backoff.shrank(1100.0)
        assert backoff.factor == FARTHEST // 2

    def test_growing_long_after_is_no_mistake(self) -> None:
        backoff = ScaleInBackoff(pays_s=10.0)
        backoff.shrank(0.0)
        backoff.grew(10.0)
        assert backoff.factor == 1


class TestForecast:
    def test_nothing_is_expected_of_nothing(self) -> None:
        assert Forecast(5.0, 0.9).value is None

    def test_what_is_constant_stays(self) -> None:
        forecast = Forecast(5.0, 0.9)
        for second in range(60):
            forecast.observe(12, float(second))
        assert forecast.value == pytest.approx(12)

    def test_a_ramp_is_expected_to_go_on(self) -> None:
        forecast = Forecast(5.0, 0.9)
        for second in range(40):
            forecast.observe(2 * second, float(second))
        # 78 now, 88 in five seconds.
        assert forecast.value is not None
        assert 86 <= forecast.value <= 92

    def test_its_own_errors_widen_the_margin(self) -> None:
        calm, wild = Forecast(3.0, 0.9), Forecast(3.0, 0.9)
        for second in range(300):
            calm.observe(20, float(second))
            wild.observe(20 + (15 if second % 20 == 0 else 0), float(second))
        assert calm.value is not None
        assert wild.value is not None
        assert wild.value > calm.value

    def test_silence_is_not_a_change(self) -> None:
        forecast = Forecast(5.0, 0.9)
        for second in range(30):
            forecast.observe(7, float(second))
        forecast.observe(7, 10_000.0)
        forecast.observe(7, 10_001.0)
        assert forecast.value == pytest.approx(7)
