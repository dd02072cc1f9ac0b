"""Code whose only purpose is speed: C loops with NumPy equivalents that return the same bits, reused memory,
threads."""
