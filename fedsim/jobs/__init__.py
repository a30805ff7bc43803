"""The jobs of a command, each a run (fedsim.running).

    room           whether there is room for their results, asked before the first
    sweep          one after another, side by side, or by a launcher of Hydra
    progress       how far they are, and how long the rest will take
    narration      what is said around them

Elsewhere than in this process:

    tasks          as tasks of software that runs them; task_worker: what a task runs
    ray_launcher   as tasks of Ray; ray_worker
    submitit_launcher  as tasks of submitit: processes of this machine, or Slurm's; submitit_tasks, submitit_worker
"""
