"""Local steps that are recorded once and replayed.

The host's work for a round then does not grow with the number of steps.
"""
