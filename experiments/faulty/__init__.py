"""Deliberate faults: bad input, damaged files, failing disks, kills. `experiments/faults.py` counts their effects."""
