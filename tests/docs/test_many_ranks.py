"""The arithmetic of the page on many ranks, computed again."""

from __future__ import annotations

from pathlib import Path

import pytest

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "howto" / "many_ranks.md").read_text(encoding="utf8").split())
RANKS, WHOLE, TRAINED = 64, 7e9, 40e6
GBIT10 = 10e9 / 8
GATHERED = (RANKS - 1) / RANKS * 8 * (WHOLE - WHOLE / 32)
"""Bytes that one chunk's pass receives: each parameter twice in single precision, but for one of 32 blocks."""


def test_lora_of_rank_16_on_seven_billion_has_about_forty_million_parameters() -> None:
    layers, width, inner, rank = 32, 4096, 11008, 16  # Llama 7B: q, k, v, o and gate, up, down
    each = 4 * (width + width) * rank + 3 * (width + inner) * rank
    assert layers * each == pytest.approx(TRAINED, rel=0.01)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ((RANKS - 1) * 12 * TRAINED / 1e9, "30 GB a step"),
        ((RANKS - 1) * 12 * TRAINED / GBIT10, "24 s at 10 Gbit/s"),
        (6 * 4 * TRAINED / 1e9, "0.96 GB"),
        (6 * 4 * TRAINED / GBIT10, "0.8 s"),
        (8 * TRAINED / 1e9, "0.32 GB"),
        (2 * 8 * TRAINED / GBIT10, "0.5 s"),
        (4 * WHOLE / 1e9, "28 GB of them"),
        (4 * WHOLE / RANKS / 1e9, "0.44 GB of weights"),
        (8 * TRAINED / RANKS / 1e6, "5 MB of sums"),
        (4 * WHOLE / 32 / 1e9, "0.9 GB each"),
        (GATHERED / 1e9, "53 GB"),
        (GATHERED / GBIT10, "43 s at 10 Gbit/s"),
        (GATHERED / (10 * GBIT10), "4.3 s at 100 Gbit/s"),
    ],
)
def test_the_numbers_for_64_ranks_are_right(value: float, said: str) -> None:
    assert said in PAGE
    digits = len(said.split()[0].replace(".", "").lstrip("0"))
    assert float(f"{value:.{digits}g}") == float(said.split()[0])
