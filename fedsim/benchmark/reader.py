"""Read the submissions in a folder as one data frame.

A submission is a compact archive of scored runs, next to its trials and its card
(`fedsim.benchmark.submit`). `digests.csv` has what is the same for all submissions of a setting.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import yaml

from fedsim.benchmark.rules import CONTROLS
from fedsim.core.configs import leaves

RESULTS = Path("docs/results/benchmark_v1")
"""The folder of the shipped submissions."""
DIGESTS = "digests.csv"
OF_RUN = ("setting", "method", "schedule", "num_rounds", "seed", "status")
COLUMNS = (
    *OF_RUN[:-1],
    "round",
    "accuracy",
    "bytes",
    "seconds",
    "uploads",
    "status",
    "num_classes",
)


def read_submissions(folder: Path = RESULTS) -> pd.DataFrame:
    """Return a row for each evaluated round of each scored run in the archives of a folder.

    The columns are `COLUMNS`. Round 0 is the model before training. `accuracy` is that on the test
    set, `bytes` those of all clients in both directions, and `seconds` those of the simulated
    clock, both from the beginning. `uploads` is the mean number of clients whose updates arrived in
    a round so far. `status` is `done`, or `diverged` for runs that ended early.
    Raises OSError if a file cannot be read, and KeyError if it is no archive of the benchmark.
    """
    frames = [_read(path) for path in sorted(folder.glob("*.parquet"))]
    digests = pd.read_csv(folder / DIGESTS, dtype=str)
    num_classes = digests.groupby("setting")["num_classes"].first().astype(int)
    rows = pd.concat(frames, ignore_index=True)
    rows["num_classes"] = num_classes.loc[rows["setting"]].to_numpy()
    return rows[list(COLUMNS)]


def read_cards(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the cards of all submissions in a folder, by method."""
    cards = {}
    for path in sorted(folder.glob("*.yaml")):
        card = yaml.safe_load(path.read_text("utf-8"))
        cards[card["method"]] = card
    return cards


def _read(path: Path) -> pd.DataFrame:
    """Return the rows of one archive, without the number of classes."""
    fields = [
        "round",
        "test_accuracy",
        "participation_ratio",
        "bytes_down",
        "bytes_up",
        "simulated_time",
    ]
    table = pq.read_table(path, columns=["run", *fields, "config", "summary"]).to_pandas()
    # 1. The runs: the first row of each describes it.
    runs, starts, nums_of_clients = {}, [], {}
    for row in table.dropna(subset="summary").itertuples():
        config, summary = json.loads(row.config), json.loads(row.summary)
        choices = summary["choices"]
        values = (
            choices["cell"],
            method_of(choices["selector"], config),
            choices["optimizer/schedule"],
            config["num_rounds"],
            config["seed"],
            summary["status"],
        )
        runs[row.run] = values
        nums_of_clients[row.run] = config["num_clients"]
        starts.append({"run": row.run, "round": 0, "test_accuracy": summary["initial_accuracy"]})
    # 2. The rounds, with round 0. A run that ended before round 1 has no other.
    rounds = pd.concat([pd.DataFrame(starts), table.dropna(subset="round")[["run", *fields]]])
    rounds = rounds.sort_values(["run", "round"])
    rounds["bytes"] = rounds["bytes_down"].add(rounds["bytes_up"]).fillna(0)
    rounds["bytes"] = rounds.groupby("run")["bytes"].cumsum()
    uploads = rounds["participation_ratio"].fillna(0) * rounds["run"].map(nums_of_clients)
    rounds["uploads"] = uploads.groupby(rounds["run"]).cumsum() / rounds["round"].clip(lower=1)
    rounds.loc[rounds["round"] == 0, "simulated_time"] = 0.0
    rounds = rounds.dropna(subset="test_accuracy")
    # 3. Both together.
    names = {"test_accuracy": "accuracy", "simulated_time": "seconds"}
    of_runs = pd.DataFrame.from_dict(runs, orient="index", columns=list(OF_RUN))
    return rounds.rename(columns=names).join(of_runs, on="run").astype({"round": int, "bytes": int})


def method_of(selector: str, config: Mapping[str, Any]) -> str:
    """Return the name of a run's method: its choice of a selector, or the control that has these
    values."""
    values = {key: str(value) for key, value in leaves(config)}
    method = selector
    for control, (choice, *words) in CONTROLS.items():
        is_control = choice == f"selector={method}"
        if is_control and all(values.get(key) == value for key, _, value in map(_parts, words)):
            method = control
    return method


def _parts(word: str) -> tuple[str, str, str]:
    return word.partition("=")
