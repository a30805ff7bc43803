"""The entry point as users know it: `python -m fedsim.run` is `fedsim`."""

from fedsim.cli import main

if __name__ == "__main__":
    main()
