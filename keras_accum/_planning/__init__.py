"""From a memory budget to the micro-batch size, and to what is recomputed."""
