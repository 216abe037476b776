"""When the loss is scaled, and by how much."""

import keras
import tensorflow as tf

from .._backend.arrays import to_numpy
from .._backend.private.layers import flatten_layers
from .arguments import check_nonfinite
from .saving import SavesWindow


class ScalesLoss(SavesWindow):
    """An optimizer that scales the loss of a micro-batch where its gradients need it."""

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Multiply a loss by the loss scale, if there is one, and by its share then.

        The scale is dynamic if a `LossScaleOptimizer` was passed in; if the global dtype
        policy is `mixed_float16`; or, in `fit`, that of the model or of a layer with
        trained weights. A loop of your own, for a model with a policy of its own, passes a
        `LossScaleOptimizer` in.

        Args:
            loss: scalar float tensor.

        Returns:
            The scaled loss, whose gradients `apply` expects.

        Raises:
            ValueError: if `loss` comes from this function already.
        """
        if getattr(loss, "_keras_accum_scaled", False):
            raise ValueError(
                "Received a loss that `scale_loss` has scaled already. Scale it once: "
                "`model.fit` calls `scale_loss` itself."
            )
        if keras.config.dtype_policy().compute_dtype == "float16":
            self._scale_dynamically()
        if (model := self._model()) is not None:
            self.enable_scaling_if_float16(model)
        if (scale := self._scale()) is None:
            return loss
        loss = tf.convert_to_tensor(loss)
        factor = tf.cast(scale, "float32")
        if self.scales_dynamically and self.reduction == "mean":
            # The window's mean has a share of this loss: in float16, its gradients are
            # to have the size of the large batch's.
            share = 1.0 / tf.cast(self._current_length(), "float32")
            factor *= share
            with tf.control_dependencies([] if tf.executing_eagerly() else [loss]):
                self._pending_weight.set_share(share)
        scaled = tf.multiply(loss, tf.cast(factor, loss.dtype))
        scaled._keras_accum_scaled = True
        return scaled

    @property
    def scales_dynamically(self) -> bool:
        """Whether the loss is scaled by `dynamic_scale`: once it is, it stays so."""
        with tf.init_scope():  # Known while tracing; a variable, to be saved and loaded.
            return bool(to_numpy(self._scaled))

    def enable_scaling_if_float16(self, model: keras.Model) -> None:
        """Scale the loss from now on if the policy of `model` says float16.

        Its own policy, or that of a layer with trained weights. Float16 elsewhere, as in
        the data, has no gradient that could vanish.
        """
        trained = [layer for layer in flatten_layers(model) if layer.trainable_variables]
        if any(x.dtype_policy.compute_dtype == "float16" for x in [model, *trained]):
            self._scale_dynamically()

    def _scale_dynamically(self) -> None:
        if not self._scales_by_itself or self.scales_dynamically:
            return
        check_nonfinite(self.on_nonfinite, scaled=True)
        with tf.init_scope():
            self._scaled.assign(True)

    def _scale(self) -> keras.Variable | float | None:
        return self.dynamic_scale if self.scales_dynamically else self._static_scale
