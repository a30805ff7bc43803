"""The entry point as a module: `python -m fedsim` is `fedsim`."""

from fedsim.run import main

if __name__ == "__main__":
    main()
