"""Run a block twice, and keep nothing in between."""
