"""What one record contributes: readers of datasets, views, momentum, companions, and the gradient sums."""
