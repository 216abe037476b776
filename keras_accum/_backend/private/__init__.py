"""Private parts of Keras and TensorFlow that there is no public way around, by purpose.

Each function says why it is needed. `tests/backend/test_private.py` fails by name when
one of them has moved; so does the first object that a user makes (`canaries`).
"""

from . import versions

versions.check_backend()
versions.check_versions()
with versions.explained_if_moved(ImportError):
    from . import canaries as canaries
    from . import data as data
    from . import fits as fits
    from . import functions as functions
    from . import replay as replay
