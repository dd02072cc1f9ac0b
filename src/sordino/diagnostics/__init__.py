"""Measures the effect of clipping and noise on rows that need no protection: instruments, doctor, threshold."""
