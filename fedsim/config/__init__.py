"""Turn the words of a command line into checked plans, and nodes of a config into objects.

1. `command_line` reads flags, `words` reads overrides, `sweeps` expands those with several values.
2. `compose` composes the configs of all jobs with Hydra (`sources`, `composition`, `overlay`), and
   `hydra_node` checks what a config says to Hydra itself.
3. `plan` checks names, types and ranges (`settings`, `declared`) and makes a plan.
4. `parts` builds the components once (`build`, `typecheck`) and checks the rules between them.

Mistakes are reported all at once (`mistakes`), in the words that the user typed (`suggestions`).
"""
