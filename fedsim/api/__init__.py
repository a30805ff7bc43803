"""Experiments from Python: the functions of `import fedsim`, which do what the command line
does."""
