"""Experiments from Python: what `fedsim` does on the command line, as functions, which `import
fedsim` has."""
