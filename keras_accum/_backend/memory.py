"""What devices tell of their memory."""

import tensorflow as tf


def peak_bytes() -> int | None:
    """The most memory that was in use on one of the GPUs; None where none of them tells.

    Since the process began, or `tf.config.experimental.reset_memory_stats`. On a CPU it
    is not told what a step needs.
    """
    peaks = []
    for place in range(len(tf.config.list_logical_devices("GPU"))):
        try:
            found = tf.config.experimental.get_memory_info(f"GPU:{place}")
        except ValueError:
            continue
        peaks.append(int(found["peak"]))
    return max(peaks, default=None)
