"""DP-MAC (Harder, Köhler, Welling, Park 2018): private per-layer objectives in the place of one deep gradient.

records ─► zsteps (auxiliary coordinates, not released) ─► taylor (coefficients per record and layer)
        ─► coefficients (bounded, scaled to sensitivity 1, one release) ─► optimise (W-steps on the noisy polynomial)

The guarantee and its proof: docs/guarantees/dp_mac.md.
"""
