"""What an optimizer that wraps another needs of Keras's base class."""

import keras


def restore_deferred(optimizer: keras.optimizers.Optimizer) -> None:
    """Give variables just created the values of a checkpoint that was restored before.

    TensorFlow does so where an attribute is set. An optimizer that names its children
    itself has to ask for it.
    """
    for name, child in optimizer._trackable_children().items():
        optimizer._handle_deferred_dependencies(name=name, trackable=child)
