"""Numbers and claims printed in papers, each with its source and the runs of ours that it is about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fedsim.report import measures
from fedsim.report.groups import Group, flat
from fedsim.report.measures import Measure

FOLDER = Path(__file__).parent / "published"


@dataclass(frozen=True)
class Number:
    """A number that a paper prints for one of its runs.

    `about`: the choices of config groups, or config values, that identify our runs; `measure`: the name of the measure
    (see `find_measure`); `where`: the place in the paper; `plus_minus`: the printed deviation.
    """

    id: str
    where: str
    about: Mapping[str, str]
    measure: str
    value: float
    plus_minus: float | None = None


@dataclass(frozen=True)
class Claim:
    """A claim of a paper about the runs identified by `about`. Which of these fields is given determines its form:

    - `at_most`, `at_least`: the `measure` of each run is at most, or at least, this value.
    - `gain`: the `measure` exceeds that of each of the `others` by about this value. The `others` are choices of the
      config group `among`; their runs have everything else in common.
    - `level_with`: the `measure` differs from that of each of the `others` by at most this value.
    - `grows_with`: the `measure` increases along the `values` of this config key or group (with `falls` it decreases).
      With `minus`, this is about the difference to the runs that made the choices `minus`.

    `any_size`: the claim is about shares and therefore also holds at a smaller size of the preset. `added_after_runs`:
    the claim was written down after results of the preset had been seen.
    """

    id: str
    where: str
    text: str
    about: Mapping[str, str]
    measure: str
    at_most: float | None = None
    at_least: float | None = None
    gain: float | None = None
    level_with: float | None = None
    grows_with: str | None = None
    falls: bool = False
    values: Sequence[str] = ()
    minus: Mapping[str, str] | None = None
    others: Sequence[str] = ()
    among: str = "selector"
    any_size: bool = False
    added_after_runs: bool = False


@dataclass(frozen=True)
class Publication:
    """A file of published/: the numbers and claims of a paper that are compared with runs of `presets`.

    Runs of the presets in `claims_only` have another size than the paper's, so that only claims can be compared.
    `substitutes`: choices of config groups that may replace those of the preset (see `protocol`).
    """

    title: str
    source: str
    presets: Sequence[str]
    claims_only: Sequence[str]
    numbers: Sequence[Number]
    claims: Sequence[Claim]
    substitutes: Mapping[str, Sequence[str]] = field(default_factory=dict)


def publications() -> list[Publication]:
    """All publications in published/."""
    return [_read(path) for path in sorted(FOLDER.glob("*.yaml"))]


def publications_about(preset: str, scale: str) -> list[Publication]:
    """The publications that runs of a preset at this scale are compared with."""
    if scale == "full":
        return [publication for publication in publications() if preset in publication.presets]
    return [publication for publication in publications() if f"{preset}_{scale}" in publication.claims_only]


def find_measure(text: str) -> Measure:
    """The measure with a name such as `final_accuracy` or `accuracy@0.15` (@ an argument). Raises KeyError."""
    name, _, argument = text.partition("@")
    if argument:
        measure: Measure = MEASURES_WITH_ARGUMENT[name](float(argument))
        return measure
    return MEASURES[name]


MEASURES: Mapping[str, Measure] = {
    "final_accuracy": measures.final_accuracy(),
    "final_accuracy_10": measures.final_accuracy(10),
    "fluctuation": measures.fluctuation(),
    "steadiness": measures.steadiness(),
    "rounds_to_cover": measures.rounds_to_cover(),
    "participation": measures.mean_participation,
    "most_selections": measures.most_selections,
    "selection_gini": measures.selection_gini,
    "speed": measures.speed,
    "selection_overhead": measures.selection_overhead,
    "seconds_200": measures.seconds_200,
    "choosing_seconds_200": measures.choosing_seconds_200,
    "participation_rise": measures.participation_rise,
    "mean_selections": measures.mean_selections,
    "peak_selections": measures.peak_selections,
    "peak_height": measures.peak_height,
    "num_clients": measures.num_clients,
    "samples_total": measures.samples_total,
    "samples_mean": measures.samples_mean,
    "samples_deviation": measures.samples_deviation,
}
MEASURES_WITH_ARGUMENT: Mapping[str, Any] = {
    "accuracy": measures.accuracy_after,
    "accuracy_around": measures.accuracy_around,
    "gain_after": measures.gain_after,
    "rounds_to": measures.rounds_to,
    "bytes_to": measures.bytes_to,
    "peak_distance": measures.peak_distance,
}


def matches(group: Group, about: Mapping[str, str]) -> bool:
    """Whether a group made the choices `about`, or has these config values (such as `partition.alpha`)."""
    values = {**{k: str(v) for k, v in flat(group.runs[0].config)}, **group.choices, **group.labels}
    return all(_equal(values.get(name), str(wanted)) for name, wanted in about.items())


def _equal(found: str | None, wanted: str) -> bool:
    """Whether two texts are equal, or represent the same number."""
    try:
        return found == wanted or (found is not None and float(found) == float(wanted))
    except ValueError:
        return False


def _read(path: Path) -> Publication:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return Publication(
        title=values["title"],
        source=values["source"],
        presets=values["presets"],
        claims_only=values.get("claims_only", ()),
        numbers=[number for table in values.get("tables", ()) for number in _numbers(table)],
        claims=[Claim(**claim) for claim in values.get("claims", ())],
        substitutes=values.get("substitutes", {}),
    )


def _numbers(table: Mapping[str, Any]) -> list[Number]:
    """The numbers of a printed table, whose `rows` map choices of the config group `row` to one value per column."""
    numbers = []
    for choice, values in table["rows"].items():
        for column, value in zip(table["columns"], values, strict=True):
            value, plus_minus = value if isinstance(value, list) else (value, None)
            numbers.append(
                Number(
                    id=f"{table['id']}/{choice}/{column['title']}",
                    where=table["where"],
                    about={**column["about"], table["row"]: choice},
                    measure=column["measure"],
                    value=value,
                    plus_minus=plus_minus,
                )
            )
    return numbers
