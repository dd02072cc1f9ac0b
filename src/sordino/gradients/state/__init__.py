"""What a pass may leave outside of its results: put back, compared, or refused."""
