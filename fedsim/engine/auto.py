"""The engine that fits model and device, by a fixed rule, so that a repeated run is the same run."""

from torch import nn

from fedsim.cohort import Ids, Params
from fedsim.engine.base import ClientData, Engine, LocalWork, Trained
from fedsim.engine.batched import BatchedEngine
from fedsim.engine.sequential import SequentialEngine
from fedsim.optimizers.base import LocalOptimizer
from fedsim.streams import Streams

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class AutoEngine(Engine):
    """`sequential` for convolutional models on a CPU, where grouped convolutions are slow; `batched` otherwise."""

    def __init__(
        self, model: nn.Module, data: ClientData, work: LocalWork, optimizer: LocalOptimizer, streams: Streams
    ) -> None:
        super().__init__(model, data, work, optimizer, streams)
        convolutional = any(isinstance(m, _CONVOLUTIONS) for m in model.modules())
        self.chosen: Engine
        if convolutional and data.x.device.type == "cpu":
            self.chosen = SequentialEngine(model, data, work, optimizer, streams)
            self.reason = "convolutions on a CPU"
        else:
            self.chosen = BatchedEngine(model, data, work, optimizer, streams, chunk_size="auto")
            self.reason = "no convolutions" if not convolutional else "a GPU"

    @property
    def description(self) -> str:
        return f"{self.chosen.description} (auto: {self.reason})"

    def train(self, params: Params, ids: Ids, round: int, lr: float) -> Trained:
        return self.chosen.train(params, ids, round, lr)
