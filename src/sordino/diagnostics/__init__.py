"""What clipping and noise do to a training, measured on rows that may be looked at: instruments, doctor, threshold."""
