"""The samples that the server takes from the training set."""

from typing import Annotated

from annotated_types import Interval

from fedsim.core.parameters import CountOrZero, parameters


@parameters
class ServerSplit:
    """The samples that the server takes before the rest is divided among clients."""

    validation_fraction: Annotated[float, Interval(ge=0, lt=1)]
    """The share of the training set on which the server validates."""
    public_samples: CountOrZero
    """Number of samples that the server and all clients have."""
    public_stratified: bool
    """Whether their classes are in proportion to the training set's."""
