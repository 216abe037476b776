"""The order in which Keras calls the callbacks of a `fit`."""

import sys
import types

import keras


def call_first(callback: keras.callbacks.Callback) -> None:
    """Have `callback` be called before the others of its list, from now on.

    To be called in one of its methods. `fit` copies the list that it is given, and tells
    callbacks nothing of the copy: it is found among those who call.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList) and any(
            each is callback for each in caller.callbacks
        ):
            # In place, and only `callback` goes forward: a loop over the list, which is
            # at it now, calls each of the others once.
            caller.callbacks.sort(key=lambda each: each is not callback)
            return
        frame = frame.f_back
