"""sordino: train PyTorch models with differential privacy, with an ε that is true."""

__version__ = "0.1.0"
