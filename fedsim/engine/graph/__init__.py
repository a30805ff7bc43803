"""Local steps recorded once and replayed: what the host has to do for a round does not grow with
its steps."""
