"""Private parts of Keras and TensorFlow that there is no public way around, by purpose.

Each function says why it is needed. `tests/backend/test_private.py` fails by name when
one of them has moved.
"""
