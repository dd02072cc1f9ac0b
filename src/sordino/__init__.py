"""sordino: train PyTorch models with differential privacy, with an ε that is true."""
