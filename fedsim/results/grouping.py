"""Which runs belong together: repetitions of a run, and groups of runs that differ only in seeds.

Runs are compared by their `compared_config`.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from fedsim.core.configs import IRRELEVANT_KEYS, SEED_KEYS, canonical, leaves
from fedsim.results.reading import FINISHED
from fedsim.results.runs import Run

NATIVE = {"_target_": "NativeBackend", "workers": "auto"}
"""The config of engine=native, in the form of `canonical`."""


def relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without seeds and without keys that cannot change a result."""
    values = {}
    for key, value in config.items():
        is_seed = key in SEED_KEYS and not isinstance(value, str)  # init_seed=per_client is none
        if not is_seed and key not in IRRELEVANT_KEYS:
            values[key] = value
    return canonical(values)


def compared_config(run: Run) -> dict[str, Any]:
    """Return the config by which runs are compared.

    It is the `relevant` config, with two changes. The digits that stand for the version of the
    user's code are added as `code`. And engine=auto is replaced by engine=native if it chose native
    for this run.
    """
    config = relevant(run.config)
    if run.code:
        config["code"] = run.code
    engine = config.get("engine")
    is_auto = isinstance(engine, Mapping) and engine.get("_target_") == "choose_backend"
    if is_auto and str(run.summary.get("engine", "")).startswith("native"):
        config["engine"] = NATIVE
    return config


def precision_of(config: Mapping[str, Any]) -> str:
    """Return the precision of the engine in a config: float32 if there is none."""
    engine = config.get("engine")
    precision = engine.get("precision") if isinstance(engine, Mapping) else None
    return str(precision or "float32")


def comparable(value: Any) -> Hashable:
    """Return a hashable form of a config value. Equal numbers, such as 1 and 1.0, have the same
    form; true and 1 do not."""
    if isinstance(value, list):
        return tuple(comparable(item) for item in value)
    if isinstance(value, Mapping):
        return config_key(value)
    return ("bool", value) if isinstance(value, bool) else value


def config_key(config: Mapping[str, Any]) -> Hashable:
    """Return a hashable key that equal configs share."""
    return frozenset((key, comparable(value)) for key, value in leaves(config))


def run_key(run: Run) -> Hashable:
    """Return a key that runs of the same `compared_config` and seeds share."""
    return run.seeds, config_key(compared_config(run))


def distinct(runs: Iterable[Run]) -> list[Run]:
    """Return one run for each `run_key`: the first finished one, otherwise the first."""
    kept: dict[Hashable, Run] = {}
    for run in runs:
        key = run_key(run)
        earlier = kept.setdefault(key, run)
        if run.status in FINISHED and earlier.status not in FINISHED:
            kept[key] = run
    return list(kept.values())


def groups_of(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the groups of `distinct` runs: those whose configs are equal except for seeds.

    Engine and device may differ in a group if each seed occurs once: a GPU may have run some of the
    seeds. If a seed occurs twice, engines are compared, and each engine and device has a group.
    Runs of different precision are never a group.
    """
    families: dict[Hashable, list[Run]] = {}
    for run in runs:
        config = compared_config(run)
        config.update(device="any", engine=precision_of(config))  # nothing else of the engine
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
