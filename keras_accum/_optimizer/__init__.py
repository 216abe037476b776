"""One update of an inner optimizer per window."""
