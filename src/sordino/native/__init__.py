"""Code whose only purpose is speed: C loops (each has a Python version that returns the same, in places up to
rounding), overwriting of memory that nothing else holds, threads."""
