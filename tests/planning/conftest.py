"""Planning in tests: as few steps as can be, where figures do not matter."""

import pytest

from keras_accum._planning import measure


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(measure, "MOST_STEPS", 2)
    monkeypatch.setattr(measure, "SHORT_SECONDS", 0.0)
