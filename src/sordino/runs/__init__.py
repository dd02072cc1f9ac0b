"""Recipes, runs in their directories, sweeps over settings, private selection, comparison and verification."""
