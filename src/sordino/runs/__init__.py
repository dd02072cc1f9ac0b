"""Recipes and what is done with them: a run directory, a sweep over settings, a paid selection."""
