"""The runs in docs/results, and the verdicts on the papers by all of them together."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.papers.judge import ByPublication, Judgement, correct_all, judge_all
from fedsim.results.archive import read_archive
from fedsim.results.frames import runs_frame

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PRESETS = RESULTS.parents[1] / "conf" / "preset"


@dataclass(frozen=True)
class Shipped:
    """The runs by folder.

    The name of a folder is that of its preset, with `_small` at the end if the runs are small.
    """

    frames: Mapping[Path, pd.DataFrame]

    @cached_property
    def judged(self) -> dict[Path, ByPublication]:
        """The judgements by folder. Tests of a family are corrected together over all folders.

        A folder that is not named after a preset has runs in other settings, which no claim is
        about.
        """
        examined: dict[Path, ByPublication] = {}
        for folder, frame in self.frames.items():
            if (PRESETS / f"{folder.name.removesuffix('_small')}.yaml").is_file():
                examined[folder] = judge_all(frame["run"])
        everything = [pair for compared in examined.values() for pair in compared]
        corrected = iter(correct_all(everything))
        return {
            folder: [next(corrected) for _ in compared] for folder, compared in examined.items()
        }

    @property
    def all_judged(self) -> ByPublication:
        return [pair for compared in self.judged.values() for pair in compared]

    def judgements(self, folder: Path) -> list[Judgement]:
        """Return the judgements of all publications that a folder is about."""
        return [judged for _, some in self.judged.get(folder, []) for judged in some]


def read_shipped(root: Path = RESULTS) -> Shipped:
    """Read all folders of docs/results that have a summary, with the runs in their archives."""
    frames = {}
    for path in sorted(root.glob("*/summary.json")):
        runs = []
        for archive in sorted(path.parent.glob("*.parquet")):
            runs += read_archive(archive)
        frames[path.parent] = runs_frame(runs)
    return Shipped(frames)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary.json of a folder without white space, a quarter of the bytes."""
    text = json.dumps(summary, separators=(",", ":"))
    (folder / "summary.json").write_text(f"{text}\n", encoding="utf-8")
