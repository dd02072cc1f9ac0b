"""Comparisons of a model with itself: gradients with plain autograd, records in other groups."""
