"""Contributions of records to the gradient of a parameter: their forms, norms and sums, over memory in blocks."""
