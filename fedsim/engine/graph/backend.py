"""All local steps of a cohort as a few launches: recorded on static buffers once, replayed in every round."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.engine.backend import TrainingResult, Workload
from fedsim.engine.batched.backend import CACHED_BYTES, _model_bytes, _rows_that_fit
from fedsim.engine.graph.linear import LinearProgram
from fedsim.engine.graph.one_by_one import OneByOne
from fedsim.engine.graph.optimizers import FlatOptimizer, flat_optimizer
from fedsim.engine.graph.program import StepProgram
from fedsim.engine.graph.recorder import CudaGraphs, Eager, recorder_for, warn_not_recorded
from fedsim.engine.graph.recorder import Recorder as Recorder
from fedsim.engine.graph.state import State
from fedsim.engine.graph.tables import Tables
from fedsim.engine.graph.trainer import Trained, Trainer
from fedsim.engine.model.adapt import for_batched, refuse_hidden_randomness
from fedsim.engine.precision import Precision
from fedsim.engine.schedule import Schedule
from fedsim.engine.torch_backend import TorchBackend
from fedsim.errors import check, rule
from fedsim.types import Params
