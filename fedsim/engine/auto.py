"""The engine that fits model and device, by a fixed rule, so that a repeated run is the same run."""

from collections.abc import Sequence

from torch import nn

from fedsim.engine.base import ClientData, Engine, LocalWork, Request, Trained
from fedsim.engine.batched import BatchedEngine
from fedsim.engine.compiled import Compile
from fedsim.engine.precision import Precision
from fedsim.engine.sequential import SequentialEngine
from fedsim.errors import ConfigError
from fedsim.optimizers.base import LocalOptimizer
from fedsim.streams import Streams

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class AutoEngine(Engine):
    """`sequential` for convolutional models on a CPU, where grouped convolutions are slow, and for models that cannot
    run batched; `batched` otherwise."""

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
        self.chosen: Engine
        if convolutional and data.x.device.type == "cpu":
            self.chosen, self.reason = _sequential(*common, precision), "convolutions on a CPU"
            return
        try:
            self.chosen = BatchedEngine(*common, precision=precision, chunk_size="auto", compile=compile)
            self.reason = "a GPU" if convolutional else "no convolutions"
        except ConfigError as error:
            self.chosen, self.reason = _sequential(*common, precision), error.problems[0].rule

    @property
    def description(self) -> str:
        return f"{self.chosen.description} (auto: {self.reason})"

    @property
    def common_clients(self) -> int:
        return self.chosen.common_clients

    def train_all(self, requests: Sequence[Request]) -> list[Trained]:
        return self.chosen.train_all(requests)


def _sequential(
    model: nn.Module,
    data: ClientData,
    work: LocalWork,
    optimizer: LocalOptimizer,
    streams: Streams,
    precision: Precision,
) -> Engine:
    return SequentialEngine(model, data, work, optimizer, streams, precision=precision, workers="auto")
