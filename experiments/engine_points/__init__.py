"""Programs that show a fault of the engine on the package of 2026-11-16, and its absence on today's (old_engine.py)."""
