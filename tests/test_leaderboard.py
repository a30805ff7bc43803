"""The page of all submissions to the selection benchmark."""

from pathlib import Path

import yaml

from fedsim.results.archive import write_archive
from fedsim.results.runs import read_runs
from scripts.benchmarks import leaderboard
from tests.report_toys import write_run


def test_the_leaderboard_has_gains_bytes_and_failures(tmp_path: Path) -> None:
    """By hand: gpfl gains 10 and 30 points in one setting. In the other it gains 20, and loses all
    but a guess among four classes when it diverges: 0.25 - 0.5. It uploads to twice as many."""
    accuracies: dict[str, list[float | None]] = {
        "v1_watch_10": [0.6, 0.8],
        "v1_watch_20": [0.7, None],
    }
    for method, num_selected in (("random", 1), ("gpfl", 2)):
        for setting, values in accuracies.items():
            for seed, value in enumerate(values):
                diverged = method == "gpfl" and value is None
                num_rounds = 3 if diverged else 25
                last = 0.5 if method == "random" else value
                write_run(
                    tmp_path / method / setting,
                    [*[None] * (num_rounds - 1), last],
                    [[0, 1][:num_selected]] * num_rounds,
                    status="diverged" if diverged else "done",
                    summary={"initial_accuracy": 0.25},
                    choices={"cell": setting, "optimizer/schedule": "step", "selector": method},
                    columns={"simulated_time": [1.0] * num_rounds},
                    num_rounds=25,
                    seed=seed,
                )
        archive = tmp_path / f"{method}.parquet"
        write_archive(read_runs(tmp_path / method), tmp_path, archive, compact=True)
        card = {"method": method, "class": "nothing", "source": "A 2020", "author": "Ann"}
        (tmp_path / f"{method}.yaml").write_text(yaml.safe_dump(card))
    rows = [f"{setting},0,4" for setting in accuracies]
    (tmp_path / "digests.csv").write_text("\n".join(["setting,seed,num_classes", *rows]))
    card["method"] = "late"  # it has run in a setting that was not sampled, for example
    (tmp_path / "late.yaml").write_text(yaml.safe_dump(card))
    lines = leaderboard.page(tmp_path, first_group=[]).splitlines()
    # (10 + 30 + 20 - 25) / 4
    [gains] = [line for line in lines if line.startswith("| gpfl | nothing | 2 | +8.75 [")]
    assert gains.endswith("] | 2.00 | 1 | A 2020; run by Ann |")
    assert "| gpfl | +8.8 |" in lines
    assert f"{leaderboard.UNLISTED}: `late`." in lines
    # A setting is in the results once the first group has run.
    nobody = leaderboard.page(tmp_path, first_group=["kvib"])
    assert nobody.endswith(f"\n\n{leaderboard.UNLISTED}: `gpfl`, `late`.\n")


def test_the_leaderboard_of_no_submissions_says_so(tmp_path: Path) -> None:
    assert leaderboard.page(tmp_path).endswith(f"\n{leaderboard.EMPTY}")
