"""Makes kymatio_reference.npz. Run once, in an environment of its own (kymatio 0.3.0 needs scipy < 1.14):

pip install kymatio==0.3.0 "scipy<1.14" "numpy<2" && python make_kymatio_reference.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from kymatio.numpy import Scattering2D

arrays = {}
for side in (28, 32):
    i = np.arange(3 * side * side, dtype=np.float64)  # a formula: no generator whose stream could change
    x = np.sin(i * 0.37 + np.cos(i * 0.011) * 3) + ((i * 7919) % 251) / 251
    arrays[f"x{side}"] = x.reshape(3, side, side).astype(np.float32)
    arrays[f"s{side}"] = Scattering2D(J=2, shape=(side, side), L=8)(arrays[f"x{side}"])
arrays["x24x40"] = np.sin(np.arange(2 * 24 * 40) * 0.9).reshape(2, 24, 40).astype(np.float32)
arrays["s24x40"] = Scattering2D(J=3, shape=(24, 40), L=6)(arrays["x24x40"])
np.savez_compressed(Path(__file__).with_name("kymatio_reference.npz"), **arrays)
