"""Measure fedsim: one tool with a command for each question.

    uv run python scripts/benchmark.py                  # prints this text
    uv run python scripts/benchmark.py <command> --help
    uv run python scripts/benchmark.py run --quick      # a first look at the speed race

install       installs the other frameworks of the speed race, each in its own environment
run           the speed race: rounds per second of fedsim, other frameworks and loops by hand
gpu           all numbers of a GPU
growth        time and memory of a round, by cohort size, clients, width and steps
clients       the cost of a run besides local training, for each selector and number of clients
selection     the time of selection alone, for each selector, with the updates of a CNN
ranks         the gain of a second process
checkpoints   the cost of checkpoints
start-up      the time until the first answer
sweep         the cost of a sweep besides its rounds
reports       the time and memory of a report of 3,000 runs
answer        the selection benchmark's answer and its leaderboard
gains         the answer of version 0 at other horizons, budgets and settings
server-only   the accuracy that the server's labelled samples give by themselves
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
    "answer": "answer.command",
    "gains": "gains",
    "server-only": "server_only",
}
HAS_COMMANDS = "race.command"
"""The module that reads the command itself."""


def main() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command not in MODULES:
        is_mistake = not command.startswith("-")
        print(__doc__, file=sys.stderr if is_mistake else sys.stdout)
        sys.exit(2 if is_mistake else 0)
    module = MODULES[command]
    if module != HAS_COMMANDS:
        del sys.argv[1]
    sys.path[0] = str(Path(__file__).parents[1])
    runpy.run_module(f"scripts.benchmarks.{module}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
