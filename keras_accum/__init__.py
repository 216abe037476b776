"""Gradient accumulation for Keras 3 on TensorFlow.

One update over a window of micro-batches is one step on the large batch.
"""

from ._accumulate import accumulate_gradients as accumulate_gradients
from ._batch_norm import AccumBatchNormalization as AccumBatchNormalization
from ._callbacks import AccumulationMonitor as AccumulationMonitor
from ._model import GradientAccumulationModel as GradientAccumulationModel
from ._model import accumulate as accumulate
from ._optimizer import AccumOptimizer as AccumOptimizer
from ._optimizer import GradientAccumulationOptimizer as GradientAccumulationOptimizer
from ._plan import Plan as Plan
from ._planner import plan as plan
from ._recompute import Recompute as Recompute
from ._recompute import recompute as recompute
from ._schedules import GradualWarmup as GradualWarmup
from ._schedules import NominalBatchSize as NominalBatchSize
from ._schedules import scale_learning_rate as scale_learning_rate

__version__ = "0.1.0"
