"""The selection benchmark, version 1: does client selection pay once the learning rate is right?

1. `rules` has the rules of docs/benchmark.md as code: settings, rates, seeds and regimes.
2. `study` tunes methods in a setting and runs them (`fedsim benchmark`).
"""
