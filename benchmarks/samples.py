"""Data of noise for the workloads, in NumPy alone."""

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray]


def sample_vectors(rows: int, rng: np.random.Generator, width: int = 1024) -> Arrays:
    """Draws input and target vectors of `width` standard normal values."""
    x, y = rng.standard_normal((2, rows, width), dtype=np.float32)
    return x, y


def sample_images(rows: int, rng: np.random.Generator) -> Arrays:
    """Draws 32 x 32 colour images of noise and one of ten labels for each."""
    x = rng.standard_normal((rows, 32, 32, 3), dtype=np.float32)
    return x, rng.integers(0, 10, rows)


def sample_tokens(
    rows: int, rng: np.random.Generator, longest_padding: int = 0
) -> Arrays:
    """Draws 64 tokens of 1,000 a row; the target is the token that follows.

    Up to `longest_padding` tokens at the end of a row are 0.
    """
    x = rng.integers(1, 1000, (rows, 65), dtype=np.int32)
    padding = rng.integers(0, longest_padding + 1, rows)
    x[np.arange(65) >= 65 - padding[:, None]] = 0
    return x[:, :-1], x[:, 1:]
