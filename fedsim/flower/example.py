"""The simulator's model and data, node by node: to try a deployment, and to compare with it."""

from pathlib import Path

from torch import Tensor, nn

from fedsim.api.experiments import compose
from fedsim.clients.server import ServerData
from fedsim.running.assembly import build


class Example:
    """The run that overrides describe, taken apart.

    A client's node gets the samples of this client in the simulator, and the server its own ones.
    `config_dir` is a folder of your own YAML files.
    """

    def __init__(self, *words: str, config_dir: str | Path | None = None) -> None:
        self.experiment = build(compose(words, config_dir=config_dir)[0])
        """The run in the simulator, before round 1."""
        self._components = self.experiment.simulation.components

    def model(self) -> nn.Module:
        """Return the model before round 1."""
        return self.experiment.model

    def samples(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the training samples of a client, and their labels."""
        data = self._components.engine.data
        positions = data.train[client]
        return data.x[positions], data.y[positions]

    def server(self) -> ServerData:
        """Return the server's samples."""
        return self._components.server_data
