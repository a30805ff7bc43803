"""What the server takes of the training set."""

from typing import Annotated

from annotated_types import Interval

from fedsim.core.parameters import CountOrZero, parameters


@parameters
class ServerSplit:
    """The samples that the server takes from the training set before the rest is partitioned: a
    share of it to validate on, and a number of public ones, with `public_stratified` in proportion
    to the classes."""

    validation_fraction: Annotated[float, Interval(ge=0, lt=1)]
    public_samples: CountOrZero
    public_stratified: bool
