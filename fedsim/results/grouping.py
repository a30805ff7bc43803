"""Runs that belong together: equal runs, and groups of runs that differ in their seeds alone."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from fedsim.core.configs import IRRELEVANT_KEYS, SEED_KEYS, canonical, leaves
from fedsim.results.reading import FINISHED
from fedsim.results.runs import Run

NATIVE = {"_target_": "NativeBackend", "workers": "auto"}
"""The config of engine=native."""


def distinct(runs: Iterable[Run]) -> list[Run]:
    """Return one run for each config and seeds: the first that is done, otherwise the first.

    Configs are compared without keys that cannot change a result, such as the run's name.
    """
    by_config: dict[Hashable, Run] = {}
    for run in runs:
        key = run.seeds, config_key(compared_config(run))
        earlier = by_config.setdefault(key, run)
        if run.status in FINISHED and earlier.status not in FINISHED:
            by_config[key] = run
    return list(by_config.values())


def relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without seeds and without keys that cannot change a result.

    `init_seed=per_client` is not a seed.
    """
    values = {}
    for key, value in config.items():
        is_seed = key in SEED_KEYS and not isinstance(value, str)
        if not is_seed and key not in IRRELEVANT_KEYS:
            values[key] = value
    return canonical(values)


def compared_config(run: Run) -> dict[str, Any]:
    """Return the config by which runs are compared.

    It is the `relevant` config, with two changes: the digits of the user's code are added as
    `code`, and engine=auto is replaced by engine=native in a run for which it chose that.
    """
    config = relevant(run.config)
    if run.code:
        config["code"] = run.code
    engine = config.get("engine")
    is_auto = isinstance(engine, Mapping) and engine.get("_target_") == "choose_backend"
    if is_auto and str(run.summary.get("engine", "")).startswith("native"):
        config["engine"] = NATIVE
    return config


def groups_of(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the groups: runs whose configs are equal except for seeds.

    Engine and device may differ in a group if each seed occurs once: a GPU may have run some of the
    seeds. If a seed occurs twice, engines are compared, and each engine and device has a group.
    """
    families: dict[Hashable, list[Run]] = {}
    for run in runs:
        config = compared_config(run)
        engine = config.get("engine")
        precision = engine.get("precision") if isinstance(engine, Mapping) else None
        config.update(device="any", engine=precision or "float32")
        families.setdefault(config_key(config), []).append(run)
    groups: list[list[Run]] = []
    for family in families.values():
        if len({run.seeds for run in family}) == len(family):  # no seed occurs twice
            groups.append(family)
            continue
        by_engine: dict[Hashable, list[Run]] = {}
        for run in family:
            by_engine.setdefault(config_key(compared_config(run)), []).append(run)
        groups += by_engine.values()
    return groups


def config_key(config: Mapping[str, Any]) -> Hashable:
    """Return a hashable key that equal configs share. 1 and 1.0 are equal."""
    items = set()
    for key, value in leaves(config):
        items.add((key, str(value) if isinstance(value, list) else value))
    return frozenset(items)
