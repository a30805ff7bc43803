"""The engine that fits model and device, by a fixed rule, so that a repeated run is the same run."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.engine.batched.backend import BatchedEngine
from fedsim.engine.batched.compiled import Compile, tell, worth_compiling
from fedsim.engine.engine import ClientData, Engine, LocalWork, Request, Trained
from fedsim.engine.native.backend import NativeEngine, unfit
from fedsim.engine.native.library import NotCompiledError, library
from fedsim.engine.precision import Precision
from fedsim.engine.reference.backend import SequentialEngine
from fedsim.errors import ConfigError
from fedsim.optimizers.base import LocalOptimizer
from fedsim.rng import Streams
from fedsim.types import Params

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Common = tuple[nn.Module, ClientData, LocalWork, LocalOptimizer, Streams]
WORTH_STEPS = {"linear": 2_000, "convolutional": 200}
"""Local steps of a run, one client's, from which on C pays: compiling takes 2 s, once a machine; a step of W1's ten
MLPs on two cores is some .8 ms shorter, one of a client of W2 some 5 ms of a core (docs/performance.md)."""


class AutoEngine(Engine):
    """`native` for what it can train, in runs long enough to compile for; else `sequential` for convolutional models on
    a CPU, where grouped convolutions are slow, and for models that cannot run batched; `batched` otherwise."""

    def __init__(
        self,
        model: nn.Module,
        data: ClientData,
        work: LocalWork,
        optimizer: LocalOptimizer,
        streams: Streams,
        *,
        precision: Precision,
        compile: Compile,
    ) -> None:
        super().__init__(model, data, work, optimizer, streams, precision)
        common = (model, data, work, optimizer, streams)
        convolutional = any(isinstance(m, _CONVOLUTIONS) for m in model.modules())
        on_cpu = data.x.device.type == "cpu"
        self.reason = "no convolutions" if not convolutional else "convolutions on a CPU" if on_cpu else "a GPU"
        self.chosen: Engine
        if self._native_pays(compile, WORTH_STEPS["convolutional" if convolutional else "linear"]):
            self.chosen = NativeEngine(*common, workers="auto")
        elif convolutional and on_cpu:
            self.chosen = SequentialEngine(*common, precision=precision, workers="auto")
        else:
            self.chosen = self._batched_if_it_can(common, precision, compile)

    def _native_pays(self, compile: Compile, enough: int) -> bool:
        fits = self.precision == "float32" and unfit(self.model, self.optimizer, self.data) is None
        if not fits or not worth_compiling(compile, self.work.total_steps(self.data.train), enough):
            return False
        try:
            library(self.data.x.dtype)
        except NotCompiledError as error:
            tell(str(error))
            self.reason += f", not compiled: {error}"
            return False
        return True

    def _batched_if_it_can(self, common: Common, precision: Precision, compile: Compile) -> Engine:
        try:
            return BatchedEngine(*common, precision=precision, chunk_size="auto", compile=compile)
        except ConfigError as error:
            self.reason = error.problems[0].rule
            return SequentialEngine(*common, precision=precision, workers="auto")

    @property
    def description(self) -> str:
        return f"{self.chosen.description} (auto: {self.reason})"

    @property
    def common_clients(self) -> int:
        return self.chosen.common_clients

    def train_all(self, requests: Sequence[Request]) -> list[Trained]:
        return self.chosen.train_all(requests)

    def client_gradients(
        self, params: Params, positions: Sequence[NDArray[np.int64]], names: Sequence[str] | None
    ) -> Iterator[Tensor]:
        return self.chosen.client_gradients(params, positions, names)

    def _outputs(self, params: Params, x: Tensor) -> Tensor:
        return self.chosen._outputs(params, x)

    def _cross_entropies(self, params: Params, chosen: Tensor) -> Tensor:
        return self.chosen._cross_entropies(params, chosen)
