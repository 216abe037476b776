"""One Keras training step over micro-batches."""
