"""The elastic benchmark reports its windows, and they are the autoscaler's."""

from __future__ import annotations

import pytest

from turboserve.autoscaler.control.policy import default_table
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.experiments.elastic.command import ScaleIn, Windows


@pytest.mark.parametrize("windows", list(Windows))
def test_what_it_says_is_what_the_autoscaler_has(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_in = ScaleIn.of(windows, 7.0)
    for name, value in scale_in.environment.items():
        monkeypatch.setenv(name, value)
    policy = AutoscalerSettings().control_policy(default_table())
    found = (policy.in_cooldown_s, policy.in_window_s, policy.peak_window_s)
    assert found == (scale_in.in_cooldown_s, scale_in.in_window_s, scale_in.peak_window_s)
    assert ScaleIn(**scale_in.figures()) == scale_in
    assert windows.value in str(scale_in)


def test_the_shipped_ones_are_the_settings_and_short_ones_are_all_the_same() -> None:
    settings = AutoscalerSettings()
    shipped = ScaleIn.of(Windows.SHIPPED, 7.0)
    assert shipped.peak_window_s == settings.scale_peak_window_s
    assert shipped.in_window_s == settings.scale_in_window_s
    short = ScaleIn.of(Windows.SHORT, 7.0)
    assert {short.in_cooldown_s, short.in_window_s, short.peak_window_s} == {7.0}
