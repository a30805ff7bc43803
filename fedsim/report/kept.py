"""Runs of which a report's summary.json is left: they can be judged again by the measures that it holds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.report.groups import has_made
from fedsim.report.protocol import preset_settings
from fedsim.report.runs import ReportError, Run, Seeds
from fedsim.report.summary import SUMMARY_MEASURES, config_hash


@dataclass(frozen=True, eq=False)
class KeptRun(Run):
    """A run of which nothing but some measures is left, by name."""

    measures: Mapping[str, float | None]

    @property
    def kept(self) -> Mapping[str, float | None]:
        return self.measures


PARQUET = ("dataset=parquet", "dataset.path=.")
"""The same images in parquet files, in place of a preset's data set."""
Settings = Sequence[tuple[Mapping[str, str], Mapping[str, Any]]]


def read_kept(path: Path, preset: str, scale: str = "full") -> list[Run]:
    """The runs of a summary.json that was made by a preset in a size.

    The file holds no configs: a run gets that of the preset's own setting that made the choices in its labels. Where
    the file has hashes of configs, they must agree. Raises `ReportError` where no setting, or more than one, fits.
    """
    groups = read_summary_file(path)["groups"]
    in_parquet = any(group.get("choices", {}).get("dataset") == "parquet" for group in groups)
    settings = preset_settings(preset, scale, PARQUET if in_parquet else ())
    if settings is None:
        raise ReportError(f"{path}: there is no preset {preset} at scale={scale}")
    return [run for group in groups for run in _runs(path, group, settings)]


def read_summary_file(path: Path, option: str = "") -> dict[str, Any]:
    """The summary.json of a report. Raises `ReportError`, which names the `option`, if the file is not one."""
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        return {"groups": earlier["groups"], "verdicts": earlier["verdicts"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{option} {path}".strip() + f": not the summary.json of a report ({error})") from error


def _runs(path: Path, group: Mapping[str, Any], settings: Settings) -> list[Run]:
    wanted = {**group.get("choices", {}), **group["labels"]}
    fitting = [(choices, config) for choices, config in settings if has_made(config, choices, wanted)]
    if "config" in group:
        fitting = [(choices, config) for choices, config in fitting if config_hash(config) == group["config"]]
    if len(fitting) != 1:
        raise ReportError(f"{path}: {len(fitting)} settings of the preset fit {wanted}; one is needed")
    ((choices, config),) = fitting
    done = {"status": "done", "choices": choices}
    return [
        KeptRun(path.parent, _at(config, Seeds.parse(text)), done, _measures(measured))
        for text, measured in group["seeds"].items()
    ]


def _at(config: Mapping[str, Any], seeds: Seeds) -> dict[str, Any]:
    return {**config, "seed": seeds.seed, **seeds.own}


def _measures(measured: Mapping[str, float | None]) -> dict[str, float | None]:
    """Measures by their names in published/*.yaml; a summary has some by other keys."""
    return {SUMMARY_MEASURES.get(key, key): value for key, value in measured.items()}
