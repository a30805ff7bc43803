"""The jobs of a command, each of which is a run (fedsim.running).

They are prepared, run in this process or in others, and reported on the terminal.
"""
