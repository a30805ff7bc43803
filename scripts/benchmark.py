"""What measures fedsim: one tool, with a command for each question.

    uv run python scripts/benchmark.py                  # this text
    uv run python scripts/benchmark.py <command> --help
    uv run python scripts/benchmark.py run --quick      # a first look at the speed race

install       make the environments of the speed race's other frameworks run           the speed
race: rounds a second of fedsim, other frameworks and loops by hand gpu           all figures of a
GPU growth        time and memory of a round by clients per round, clients, width and steps clients
what a run costs beside local training, for each selector, as the number of clients grows selection
what each selector computes in a round, with the updates of a CNN ranks         what a second
process gains checkpoints   what checkpoints cost start-up      what one waits for before the first
answer sweep         what a sweep costs beside its rounds reports       what a report of 3,000 runs
takes, and how large its page is gains         what changes the selection benchmark's answer:
horizon, budget, which settings it speaks for server-only   the accuracy that the server's labelled
samples give by themselves
"""

import runpy
import sys
from pathlib import Path

MODULES = {
    "install": "race.command",
    "run": "race.command",
    "gpu": "gpu.command",
    "growth": "growth",
    "clients": "clients",
    "selection": "selection",
    "ranks": "ranks",
    "checkpoints": "checkpoints",
    "start-up": "start_up",
    "sweep": "sweep",
    "reports": "reports",
    "gains": "gains",
    "server-only": "server_only",
}
WITH_COMMANDS = ("race.command",)
"""Modules that read the command themselves."""


def main() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else None
    if command not in MODULES:
        print(__doc__, file=sys.stderr if command and not command.startswith("-") else sys.stdout)
        sys.exit(2 if command and not command.startswith("-") else 0)
    if MODULES[command] not in WITH_COMMANDS:
        del sys.argv[1]
    sys.path[0] = str(Path(__file__).parents[1])
    runpy.run_module(f"scripts.benchmarks.{MODULES[command]}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
