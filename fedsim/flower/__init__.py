"""fedsim in Flower: a strategy that lets fedsim's selectors and aggregators choose on real nodes.

A deployment has two sides, and a file for each:

    # server_app.py
    strategy = fedsim.flower.Selecting("selector=fedcor", "num_clients=5", model=Net())
    # client_app.py
    app = fedsim.flower.client_app(Net, load_my_data)

`Selecting` runs the round loop of the simulator. Its engine (`RemoteEngine`) sends messages to
nodes where the simulator computes. Selectors, aggregators, the ledger, checkpoints and files are
those of the simulator. A node is a process of Flower at a client. In this room, `client` is the
number of a client in the run, from 0 on.

Needs the extra `flower`. Flower's telemetry and its search for updates are off, unless the
environment variables of Flower say otherwise.
"""

import os

from fedsim.core.errors import ConfigError, Problem

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
try:
    import flwr  # noqa: F401
except ModuleNotFoundError as error:
    fault = f"needs {error.name}, which is not installed"
    remedy = "pip install 'fedsim-selection[flower]'"
    raise ConfigError([Problem("fedsim.flower", ..., fault, remedy)]) from error

from fedsim.clients.context import LabelledSamples
from fedsim.clients.server import ServerData
from fedsim.flower.client import client_app
from fedsim.flower.example import Example
from fedsim.flower.messages import ANSWERS
from fedsim.flower.strategy import Selecting

__all__ = ["ANSWERS", "Example", "LabelledSamples", "Selecting", "ServerData", "client_app"]
