"""`fedsim flower new DIR selector=...`: write the app of a deployment, ready for `flwr run`.

Machines that run the app have fedsim, but not the user's files. So the app gets copies of the
user's modules, and of the YAML files of --config-dir in the run's config groups.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fedsim.api.experiments import compose
from fedsim.config.plan import Plan
from fedsim.config.user_code import user_files
from fedsim.core.errors import Problem, check, rule

CLIENT = '''\
"""The clients' side. Each node runs this file with the samples of its own client."""

{imports}import fedsim.flower

WORDS = {words}
CONFIG_DIR = {config_dir}  # the folder of choices of your own

# The simulator's model and data, so that this app runs at once. Put yours in their place.
example = fedsim.flower.Example(*WORDS, config_dir=CONFIG_DIR)
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
from client_app import CONFIG_DIR, WORDS, Net, example

app = ServerApp()


@app.main()
def main(grid, context):
    """Run all rounds, or those that are missing after a restart."""
    strategy = fedsim.flower.Selecting(
        *WORDS, config_dir=CONFIG_DIR, model=Net(), server=example.server()
    )
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
{folder}/ has {files}.
Start a SuperLink and {number} SuperNodes, then `flwr run {folder} local`.
docs/deployment.md says how.
"""


def arguments(parser: ArgumentParser) -> None:
    """Add the words of the command."""
    parser.add_argument("action", choices=["new"], help="write a new app")
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    parser.add_argument("words", nargs="*", help="what to run: selector=oort num_clients=5 ...")
    folder_help = "a folder with choices of your own"
    parser.add_argument("--config-dir", "-cd", type=Path, metavar="DIR", help=folder_help)


def run(options: Namespace) -> int:
    """Write the files, and print what to do next. Raises `ConfigError` for wrong words."""
    folder: Path = options.folder
    text = "exists already"
    check(rule(not folder.exists(), "folder", str(folder), text, "name another folder"))
    words = list(options.words)
    typed = {word.partition("=")[0].lstrip("+~") for word in words}
    if "checkpoint.every" not in typed:
        words.append("checkpoint.every=1")
    if not any(key.startswith("tracker") for key in typed):
        words.append("tracker=console")
    plans = compose(words, config_dir=options.config_dir)
    if len(plans) > 1:
        check(Problem("words", ..., f"describe {len(plans)} runs", "name one value of each key"))
    plan = plans[0]
    imports, config_dir = "", "None"
    if options.config_dir is not None:
        imports, config_dir = "from pathlib import Path\n\n", 'Path(__file__).parent / "conf"'
    files = {
        "client_app.py": CLIENT.format(
            imports=imports,
            words=words,
            config_dir=config_dir,
            answers="fedsim.flower.ANSWERS",
        ),
        "server_app.py": SERVER,
        "pyproject.toml": PROJECT,
    }
    for name, path in _files_of_user(plan, options.config_dir).items():
        text = "has the name of a file of the app"
        check(rule(name not in files, "module", str(path), text, "rename it"))
        files[name] = path.read_text(encoding="utf-8")
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    number = plan.settings.num_clients
    print(NEXT.format(folder=folder, files=", ".join(files), number=number), end="")
    return 0


def _files_of_user(plan: Plan, config_dir: Path | None) -> dict[str, Path]:
    """Return the files that a run needs and only the user has, by their names in the app: YAML
    files in config groups of the run, and modules."""
    files = {}
    if config_dir is not None:
        for group in plan.choices:
            for path in sorted((config_dir / group).glob("*.yaml")):
                files[f"conf/{group}/{path.name}"] = path
    return files | user_files(plan.config)
