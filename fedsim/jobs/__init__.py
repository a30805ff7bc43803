"""The jobs of a command, each a run (fedsim.running): prepared, run in this process or elsewhere,
and told of."""
