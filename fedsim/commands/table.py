"""The commands of `fedsim` besides running jobs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """What a command does in a line, and its `module`, with `arguments(parser)` and `run(options) -> exit code`.

    `words`: the module reads the rest of the command line itself, in `run(words) -> exit code`.
    """

    module: str
    about: str
    words: bool = False


COMMANDS = {
    "list": Command("fedsim.commands.listing", "what can be chosen: selectors, presets, data sets, models, ..."),
    "show": Command("fedsim.commands.show", "the jobs that a command would run, and what is already there", words=True),
    "search": Command("fedsim.search.command", "hyper-parameters found by Optuna, over ordinary runs", words=True),
    "report": Command("fedsim.report.command", "tables, figures and a page of finished runs"),
    "verify": Command("fedsim.commands.verify", "runs finished runs again: is every round equal?", words=True),
    "doctor": Command("fedsim.commands.doctor", "whether everything that a run needs is here", words=True),
    "sync": Command("fedsim.commands.sync", "sends runs to Weights & Biases that are not there yet"),
}
