"""The selection benchmark, version 1: does client selection pay once the learning rate is right?

1. `rules` has the rules of docs/benchmark_rules.md as code: settings, rates, seeds and regimes.
2. `study` tunes methods in a setting and runs them (`fedsim benchmark`).
3. `submission` checks the runs of a method, and `submit` writes the files to submit (`fedsim
   submit`).
4. `reader` reads submissions for their analysis.
"""
