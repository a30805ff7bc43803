"""The jobs of a command, each a run (fedsim.running).

    room           whether there is room for their results, asked before the first
    launchers      the launcher of fedsim's own that is chosen
    sweep          one after another, or side by side
    overwriting    which of them overwrite=true has replaced already
    progress       how far they are, and how long the rest will take
    narration      what is said around them

Elsewhere than in this process:

    launched       in processes that a launcher of Hydra starts
    tasks          as tasks of software that runs them; task_worker: what a task runs
    ray_launcher   as tasks of Ray; ray_worker
    submitit_launcher  as tasks of submitit: processes of this machine, or Slurm's; submitit_tasks, submitit_worker
"""
