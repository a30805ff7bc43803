"""What is told of a run while it goes on."""

from contextlib import AbstractContextManager, nullcontext

from fedsim.record import Record
from fedsim.tracking.base import SweepPosition


class Watch:
    """The one to whom a run is told. This one does nothing.

    `sweep`: where the run stands in its sweep.
    """

    sweep: SweepPosition | None = None

    def setting_up(self) -> AbstractContextManager[None]:
        """Within it, all that the run needs before its first round is made."""
        return nullcontext()

    def round_ended(self, record: Record) -> str | None:
        """The record of a round that is in the run's files. Returns why the run is to end here, or None to go on."""
        return None


UNWATCHED = Watch()
