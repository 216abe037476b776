"""The sum over micro-batches, without any optimizer."""
