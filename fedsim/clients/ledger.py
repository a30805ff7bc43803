"""The ledger: what a round costs in clients, bytes and samples.

Three sets hold clients. *Contacted* clients received a model. *Trained* clients trained. *Uploaded*
clients are those whose whole update the server collected: the cohort (the selected clients), and
the clients that a method collects in addition (all clients in GPFL's first round and in FedCor's
virtual rounds). The participation ratio is the number of uploaded clients divided by N, the number
of all clients. An update that a client sends only to be compared before the selection (PNCS) costs
bytes and training, and is no participation.

Bytes are what would cross the network, without protocol overhead. Samples are those that a client
passes through its model; a training sample is one forward and one backward pass.
"""

from dataclasses import dataclass, field

from fedsim.core.types import Exchange


@dataclass
class Ledger:
    """The account of one round. `Clients` and `Server` charge it, and the round loop takes late
    updates out of `uploaded` and makes the record."""

    contacted: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)
    uploaded: set[int] = field(default_factory=set)
    bytes_down: int = 0
    forward_samples: int = 0
    train_samples: int = 0
    bytes_up: int = 0
    server_forward_samples: int = 0
    nonfinite_reports: int = 0

    def charge_exchange(self, exchange: Exchange) -> None:
        """Charge all transfers and computations of an exchange between the server and clients."""
        self.bytes_down += int(exchange.bytes_down.sum())
        self.forward_samples += int(exchange.forward_samples.sum())
        self.train_samples += int(exchange.train_samples.sum())
        self.bytes_up += int(exchange.bytes_up.sum())

    def charge_server(self, samples: int) -> None:
        """Charge samples that the server passes through a model."""
        self.server_forward_samples += samples
