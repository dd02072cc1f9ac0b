"""Which row each position of an activation belongs to, followed operation by operation."""
