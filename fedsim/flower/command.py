"""`fedsim flower new DIR selector=...`: write the app of a deployment, ready for `flwr run`."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from fedsim.api.experiments import compose
from fedsim.core.errors import Problem, check, rule

CLIENT = '''\
"""The clients' side. Each node runs this file with the samples of its own client."""

import fedsim.flower

WORDS = {words}

# The simulator's model and data, so that this app runs at once. Put yours in their place.
example = fedsim.flower.Example(*WORDS)
Net = example.model


def load(context):
    """Return the samples x [n, ...] of this node, as Net takes them, and their labels y [n]."""
    return example.samples(context.node_config["partition-id"])


app = fedsim.flower.client_app(Net, load, answers={answers})
'''
SERVER = '''\
"""The server's side: fedsim's selector and aggregator choose."""

from flwr.serverapp import ServerApp

import fedsim.flower
from client_app import WORDS, Net, example

app = ServerApp()


@app.main()
def main(grid, context):
    """Run all rounds, or those that are missing after a restart."""
    strategy = fedsim.flower.Selecting(*WORDS, model=Net(), server=example.server())
    strategy.start(grid, timeout=300)
'''
PROJECT = """\
[project]
name = "fedsim-app"
version = "0.1.0"
description = "A deployment of fedsim"
dependencies = ["fedsim-selection[flower]"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"
"""
NEXT = """\
{folder}/ has client_app.py, server_app.py and pyproject.toml.
Start a SuperLink and {number} SuperNodes, then `flwr run {folder} local`.
docs/deployment.md says how.
"""


def arguments(parser: ArgumentParser) -> None:
    """Add the words of the command."""
    parser.add_argument("action", choices=["new"], help="write a new app")
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    parser.add_argument("words", nargs="*", help="what to run: selector=oort num_clients=5 ...")


def run(options: Namespace) -> int:
    """Write the files, and print what to do next. Raises `ConfigError` for wrong words."""
    folder: Path = options.folder.absolute()
    text = "exists already"
    check(rule(not folder.exists(), "folder", str(folder), text, "name another folder"))
    words = list(options.words)
    typed = {word.partition("=")[0] for word in words}
    outputs = json.dumps(str(folder.parent / "outputs"))  # in quotes: it may hold any character
    for key, value in (("output_dir", outputs), ("checkpoint.every", "1")):
        if key not in typed:
            words.append(f"{key}={value}")
    if not any(key.startswith("tracker") for key in typed):
        words.append("tracker=console")
    plans = compose(words)
    if len(plans) > 1:
        check(Problem("words", ..., f"describe {len(plans)} runs", "name one value of each key"))
    folder.mkdir(parents=True)
    files = {
        "client_app.py": CLIENT.format(words=words, answers="fedsim.flower.ANSWERS"),
        "server_app.py": SERVER,
        "pyproject.toml": PROJECT,
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    print(NEXT.format(folder=options.folder, number=plans[0].settings.num_clients), end="")
    return 0
