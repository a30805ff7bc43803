"""The jobs of a command, each of which is a run (fedsim.running).

`cli` is the entry. `prepare` checks the jobs, `sweep` runs them in this process, `launchers`,
`tasks` and `task_worker` run them in others, and `narration` reports them on the terminal.
"""
