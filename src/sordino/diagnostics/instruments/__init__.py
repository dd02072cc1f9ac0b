"""Instruments: what clipping does to the gradient, on public rows or flagged as not private (Xiao et al. 2023).

`measure` reads sampling noise, norms, clipped share and cosine at the present weights; `p_averaged` does so where means
of groups are clipped; `noise_vectors` and `windowed_noise` show how far noise repeats over iterations; `Watch` reads
during training without disturbing it. Nothing here releases anything, and no guarantee depends on it.
"""

from sordino.diagnostics.instruments.reading import Reading, measure, p_averaged
from sordino.diagnostics.instruments.watch import ReadingSteps, Watch
from sordino.diagnostics.instruments.window import noise_vectors, windowed_noise

__all__ = ["Reading", "ReadingSteps", "Watch", "measure", "noise_vectors", "p_averaged", "windowed_noise"]
