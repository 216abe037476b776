"""What of a model will not be equal to the large batch: read, and measured."""
