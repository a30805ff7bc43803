"""`python -m fedsim.report` is `fedsim report`."""

import sys
from collections.abc import Sequence

from fedsim.commands.dispatch import answer


def main(words: Sequence[str]) -> int:
    """Make the report that `words` ask for and return the exit code; mistakes are told on stderr."""
    return answer(["report", *words]) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
