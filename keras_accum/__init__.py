"""Gradient accumulation for Keras 3 on TensorFlow.

One update over a window of micro-batches is one step on the large batch.
"""

__version__ = "0.1.0"  # Before the imports, whose errors name it.

from ._backend.private import versions as _versions  # noqa: F401  (refuses first)
from ._batch_norm import AccumBatchNormalization as AccumBatchNormalization
from ._batch_norm import replace_batch_normalization as replace_batch_normalization
from ._callbacks import AccumulationMonitor as AccumulationMonitor
from ._core.accumulate import accumulate_gradients as accumulate_gradients
from ._insight.diagnosis import Diagnosis as Diagnosis
from ._insight.diagnosis import diagnose as diagnose
from ._insight.equivalence import check_equivalence as check_equivalence
from ._insight.finding import Finding as Finding
from ._insight.report import Report as Report
from ._optimizer.wrapper import AccumOptimizer as AccumOptimizer
from ._optimizer.wrapper import (
    GradientAccumulationOptimizer as GradientAccumulationOptimizer,
)
from ._planning.frontier import Frontier as Frontier
from ._planning.frontier import frontier as frontier
from ._planning.plan import Plan as Plan
from ._planning.planner import plan as plan
from ._recompute.api import Recompute as Recompute
from ._recompute.api import recompute as recompute
from ._schedules import GradualWarmup as GradualWarmup
from ._schedules import NominalBatchSize as NominalBatchSize
from ._schedules import scale_learning_rate as scale_learning_rate
from ._step.model import GradientAccumulationModel as GradientAccumulationModel
from ._step.model import accumulate as accumulate
