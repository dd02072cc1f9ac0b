"""What a forward pass records of the operations that use a trainable parameter."""
