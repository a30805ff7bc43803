"""The entry point as a module: `python -m fedsim` is `fedsim`."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    try:
        here = os.getcwd()  # noqa: PTH109
    except OSError:  # it was deleted
        here = ""
    if sys.path[:1] == [here]:
        del sys.path[
            0
            # where -m puts the working folder: its files would be imported in place of installed
            # modules
        ]

from fedsim.run import main

if __name__ == "__main__":
    main()
