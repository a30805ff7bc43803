"""The ledger: which clients took part in a round, and what the round cost in bytes and samples.

`rounds/loop.py` makes a new `Ledger` for each round. `Clients` (clients.py) adds client ids to the
three sets and charges each exchange. `Server` (server.py) charges what the server evaluates itself.
At the end, the loop turns the ledger into the round's `Record`.

Some selectors collect updates from more clients than they select. GPFL does so in its first round,
and FedCor in its virtual rounds (rounds that it simulates in order to learn). These clients count
as uploaded. PNCS receives updates in order to compare them before it selects. These cost bytes and
training, but their clients count as uploaded only if they are selected.
"""

from dataclasses import dataclass, field

from fedsim.core.types import Exchange


@dataclass
class Ledger:
    """The account of one round. Nothing is ever subtracted from bytes and samples."""

    contacted: set[int] = field(default_factory=set)
    """Ids of the clients that received a model."""
    trained: set[int] = field(default_factory=set)
    """Ids of the clients that trained, for whatever purpose."""
    uploaded: set[int] = field(default_factory=set)
    """Ids of the clients whose update the server collected. Participation ratio = their number / N.
    The round loop removes those whose update came too late; their costs remain."""
    bytes_down: int = 0
    """Bytes from the server to clients: models, without the overhead of a protocol."""
    bytes_up: int = 0
    """Bytes from clients to the server: updates, losses and all other answers."""
    forward_samples: int = 0
    """Samples that clients evaluated, one forward pass each. Training is not in it."""
    train_samples: int = 0
    """Samples that clients trained on, one forward and one backward pass each, in every epoch."""
    server_forward_samples: int = 0
    """Samples that the server evaluated for a selector, one forward pass each."""
    nonfinite_reports: int = 0
    """Losses that clients reported as nan or infinity. No cost: fedsim warns about them."""
    is_closed: bool = False
    """True once the round's record is written: nothing can be charged any more."""

    def charge_exchange(self, exchange: Exchange) -> None:
        """Add the bytes and samples of an exchange, which holds one number for each client."""
        self.bytes_down += int(exchange.bytes_down.sum())
        self.forward_samples += int(exchange.forward_samples.sum())
        self.train_samples += int(exchange.train_samples.sum())
        self.bytes_up += int(exchange.bytes_up.sum())

    def charge_server(self, samples: int) -> None:
        """Add `samples`, the number of samples that the server evaluated for a selector."""
        self.server_forward_samples += samples
