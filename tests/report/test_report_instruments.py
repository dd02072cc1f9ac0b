"""The plots of what clipping did: from rows of the metrics, whatever else stands in them."""

from __future__ import annotations

import math
from typing import Any

from sordino.report.instruments import instrument_figures


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "sampling_noise": 4.0, "gradient_norm": 0.5, "norm_quantile_0.25": 1.0, "norm_quantile_0.75": 3.0,
        "clipped_share": 0.9, "clip_cosine": -0.25, **more,
    }  # fmt: skip


def test_noise_is_drawn_as_tau_beside_the_norms() -> None:
    norms, effect = instrument_figures([row(0), row(10), {"step": 10, "epsilon": 1.0}])
    assert norms.columns == (
        "step",
        "sampling noise τ",
        "25 % quantile of ‖g‖",
        "75 % quantile of ‖g‖",
        "‖mean gradient‖",
    )
    assert norms.rows == (("0", "2", "1", "3", "0.5"), ("10", "2", "1", "3", "0.5"))
    assert "sampling noise τ from 2 to 2" in norms.svg
    assert effect.rows[0] == ("0", "0.9", "-0.25"), "a cosine may be negative"


def test_without_readings_there_are_no_figures() -> None:
    assert instrument_figures([]) == []
    assert instrument_figures([{"step": 5, "epsilon": 1.0, "test_accuracy": 0.5}]) == []


def test_a_reading_without_direction_leaves_a_gap_and_no_error() -> None:
    blank = row(10)
    del blank["clip_cosine"]
    _, effect = instrument_figures([row(0), blank, row(20, clip_cosine=math.nan), row(30)])
    assert [values[0] for values in effect.rows] == ["0", "30"]


def test_windows_are_drawn_in_the_order_of_their_length() -> None:
    readings = [row(4, noise_window_1=2.0, noise_window_16=1.0, noise_window_4=1.5)]
    *_, window = instrument_figures([row(0), *readings])
    assert window.columns == ("step", "K₀ = 1", "K₀ = 4", "K₀ = 16")
    assert window.rows == (("4", "2", "1.5", "1"),)
