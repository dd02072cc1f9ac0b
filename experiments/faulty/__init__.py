"""Faults on purpose: bad input, damaged files, failing disks, kills. `experiments/faults.py` counts what they do."""
