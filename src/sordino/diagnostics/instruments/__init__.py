"""Instruments that measure the effect of clipping on the gradient (Xiao et al. 2023), on public rows or marked as not
private.

`measure` returns sampling noise, norms, clipped share and cosine at the current weights; `p_averaged` returns the same
if means of groups are clipped; `noise_vectors` and `windowed_noise` show whether the noise repeats over iterations;
`Watch` measures during training without changing it. Nothing here releases anything, and no guarantee depends on it.
"""

from sordino.diagnostics.instruments.reading import Reading, measure, p_averaged
from sordino.diagnostics.instruments.watch import ReadingSteps, Watch
from sordino.diagnostics.instruments.window import noise_vectors, windowed_noise

__all__ = ["Reading", "ReadingSteps", "Watch", "measure", "noise_vectors", "p_averaged", "windowed_noise"]
