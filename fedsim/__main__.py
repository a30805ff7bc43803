"""The entry point of `python -m fedsim`, which does the same as `fedsim`."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    try:
        working_folder = os.getcwd()  # noqa: PTH109
    except OSError:  # it was deleted
        working_folder = ""
    # Python puts the working folder first for -m. Its files must not replace installed modules.
    if sys.path[:1] == [working_folder]:
        del sys.path[0]

from fedsim.run import main

if __name__ == "__main__":
    main()
