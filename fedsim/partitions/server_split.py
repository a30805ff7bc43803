"""The config group `server`: the samples that the server takes from the training set.

`fedsim.partitions.division` takes them before it divides the rest among clients.
"""

from typing import Annotated

from annotated_types import Interval

from fedsim.core.parameters import CountOrZero, parameters


@parameters
class ServerSplit:
    """The samples that the server takes before the rest is divided among clients."""

    validation_fraction: Annotated[float, Interval(ge=0, lt=1)]
    """The share of the training set that becomes the server's validation set."""
    public_samples: CountOrZero
    """Number of samples that the server and all clients have."""
    public_stratified: bool
    """Whether the classes of the public samples are in proportion to those of the training set."""
