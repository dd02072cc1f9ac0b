"""What only buys speed: C loops with NumPy equivalents that give the same bits, memory that is overwritten, threads."""
