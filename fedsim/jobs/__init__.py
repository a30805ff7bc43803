"""The jobs of a command, each a run (`fedsim.running`)."""
