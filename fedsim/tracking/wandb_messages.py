"""The messages to the process that communicates with Weights & Biases (W&B), and names in them.

`fedsim.tracking.wandb_tracker` makes the messages of a run. `fedsim.tracking.wandb_mirror` makes
them again from the files of a finished run, and passes them to W&B.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fedsim.core.errors import Problem, rule
from fedsim.results.files import json_ready
from fedsim.tracking.base import RunInfo
from fedsim.tracking.metrics import RoundMetrics

TARGET = "fedsim.tracking.wandb_tracker.WandbTracker"
"""The class path by which a config names W&B's tracker."""


def mirrors_in(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the nodes of W&B's tracker in a run's config by name, disabled ones last."""
    enabled = {}
    disabled = {}
    nodes = config.get("tracker")
    if not isinstance(nodes, Mapping):
        return {}
    for name, node in nodes.items():
        if isinstance(node, Mapping) and node.get("_target_") == TARGET:
            if node.get("mode") == "disabled":
                disabled[name] = node
            else:
                enabled[name] = node
    return enabled | disabled


MAX_NAME = 128
"""Maximum length that W&B's server accepts in the name of a project, a group or a run."""
MAX_TAG = 64
"""Maximum length of a tag or job type."""
NAME = rf"[^/\\#?%:]{{1,{MAX_NAME}}}"
"""A regular expression of the names that W&B accepts for a project or an entity."""


def name_problems(node: Mapping[str, Any], prefix: str = "") -> Iterator[Problem | None]:
    """Yield the problems of names that W&B would reject.

    `node` has the tracker's values of `project`, `entity` and `tags`. The keys of the problems
    begin with `prefix`. W&B itself would reject the names only at the end of the run.
    """
    for key in ("project", "entity"):
        name = node.get(key)
        is_valid = name is None or bool(re.fullmatch(NAME, name))
        fault = r"must have 1 to 128 characters, none of / \ # ? % : (W&B's rule)"
        remedy = f"choose another name, also where the variable WANDB_{key.upper()} has it"
        yield rule(is_valid, prefix + key, name, fault, remedy)
    for tag in tags_of(node):
        fault = f"must have 1 to {MAX_TAG} characters (W&B's rule)"
        remedy = "shorten it, also where the variable WANDB_TAGS has it"
        yield rule(0 < len(tag) <= MAX_TAG, f"{prefix}tags", tag, fault, remedy)


def tags_of(node: Mapping[str, Any]) -> list[str]:
    """Return the tags in a tracker's node: a list, or a text with commas, as in WANDB_TAGS."""
    tags: list[str] | str = node.get("tags") or []
    return tags.split(",") if isinstance(tags, str) else tags


def shortened(text: str, max_length: int) -> str:
    """Return `text`, or if it is too long its beginning and a hash that identifies it."""
    if len(text) <= max_length:
        return text
    return f"{text[: max_length - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def start_message(
    info: RunInfo, node: Mapping[str, Any], mode: str, timeout: float
) -> dict[str, Any]:
    """Return the message with which the mirror process starts a W&B run.

    `node` has the tracker's values of `project`, `entity`, `group` and `tags`. `mode` is the
    tracker's, or `wandb_tracker.LATER`; `timeout` is in seconds. Names that fedsim chooses are
    shortened to what W&B accepts.
    """
    groups = ("dataset", "partition", "model")
    tags_of_choices = []
    for group in groups:
        if group in info.choices:
            tags_of_choices.append(shortened(info.choices[group], MAX_TAG))
    config = {**info.config, "choices": dict(info.choices), "folder": info.results.name}
    return {
        "mode": mode,
        "timeout": timeout,
        "project": node.get("project", "fedsim"),
        "entity": node.get("entity"),
        "group": shortened(node.get("group") or info.name, MAX_NAME),
        "job_type": shortened(info.choices.get("selector", "custom"), MAX_TAG),
        "name": shortened(info.label, MAX_NAME),
        "tags": [*tags_of(node), *tags_of_choices],
        "config": json_ready(config),
        "folder": os.fspath(info.folder.absolute()),
    }


AXES = {
    "accuracy/over_bytes": "total/bytes",
    "accuracy/over_samples": "total/samples",
    "accuracy/over_simulated_time": "total/simulated_time",
}
"""Copies of the test accuracy, whose charts have another x axis than the round."""


def log_message(metrics: RoundMetrics, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with which the mirror process logs the record of a round.

    It has a histogram of the selected clients in some rounds. `metrics` has the earlier rounds.
    """
    numbers = metrics.add(record)
    numbers["round"] = record["round"]
    if "test/accuracy" in numbers:
        for name, axis in AXES.items():
            if axis in numbers:
                numbers[name] = numbers["test/accuracy"]
    message: dict[str, Any] = {"log": numbers}
    if metrics.has_histogram(record["round"]):
        message["selections"] = [metrics.counts.tolist(), metrics.edges.tolist()]
    return message
