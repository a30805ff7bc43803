"""Statistics over several settings, against independent computations and by simulation, and what a
report says."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedsim.report.figures import style
from fedsim.report.headline import over_settings
from fedsim.report.settings_figures import costs_plot, gains_plot, ranks_plot
from fedsim.report.tables import _wins, all_tables
from fedsim.results.groups import class_of, make_panels
from fedsim.results.measures import accuracy_by_bytes, find_measure
from fedsim.results.ranking import (
    Comparison,
    Verdict,
    compare,
    mean_ranks,
    profile,
    rank_tests,
    wins,
)
from fedsim.results.runs import Seeds
from fedsim.results.statistics import differences, ratio
from fedsim.results.table import Table
from tests.report_toys import groups_of, make_report, only_run, write_run

RNG = np.random.default_rng(5)
Gains = Mapping[str, float]


def by_numbers(finals: Mapping[str, np.ndarray], ceiling: Sequence[str] = ()) -> Comparison:
    """A comparison of made-up final accuracies [settings, seeds] by line."""
    found = Comparison([], [name for name in finals if name not in ceiling], "random", ceiling)
    told = {
        name: [{Seeds(s, s, s): v for s, v in enumerate(row)} for row in own]
        for name, own in finals.items()
    }
    found.__dict__.update(finals=told, classes=dict.fromkeys(found.methods, "nothing"))
    return found


def test_ranks_with_ties_friedman_and_nemenyi() -> None:
    values = np.array([[0.5, 0.7, 0.7, 0.1], [0.2, 0.6, 0.4, 0.1], [0.3, 0.9, 0.5, 0.3]])
    assert mean_ranks(values).tolist() == pytest.approx([9.5 / 3, 3.5 / 3, 5.5 / 3, 11.5 / 3])
    p_value, difference = rank_tests(values)
    statistic = (12 * (9.5**2 + 3.5**2 + 5.5**2 + 11.5**2) / (3 * 4 * 5) - 3 * 3 * 5) / (
        1 - 2 * 6 / (3 * 4 * 15)
    )
    assert p_value == pytest.approx(stats.chi2.sf(statistic, 3))
    assert difference == pytest.approx(
        2.569 * math.sqrt(4 * 5 / (6 * 3)), abs=1e-3
    )  # Demsar's Table 5(a)
    assert math.isnan(rank_tests(np.ones((3, 4)))[0])


def test_a_method_with_fewer_seeds_is_ranked_by_its_gains_at_these_and_changes_no_other() -> None:
    random, other = np.array([[0.1, 0.2, 0.9]] * 2), np.array([[0.15, 0.25]] * 2)
    some = {"random": random, "b": random + [[0.2, 0.0, 0.1]] * 2}
    found = by_numbers({**some, "a": other})
    assert found.means.round(9).tolist() == [[0.4, 0.5, 0.45]] * 2
    assert found.ranks == {"b": (1, 1), "a": (2, 2), "random": (3, 3)}
    assert (found.means[:, :2] == by_numbers(some).means).all()
    assert [block.tolist() for block in found.blocks] == [
        [[0.1, 0.2], [pytest.approx(0.3), 0.2], [0.15, 0.25]]
    ] * 2


def test_methods_without_a_common_seed_are_ranked_and_have_no_table_of_wins() -> None:
    found = by_numbers({"random": np.zeros((2, 2)), "a": np.ones((2, 1)), "b": np.ones((2, 2)) / 2})
    found.finals["b"] = [
        {seeds: v for seeds, v in own.items() if seeds.seed == 1} for own in found.finals["b"]
    ]
    assert list(found.ranks) == ["a", "b", "random"]
    assert _wins(found).rows == []


def test_wins_by_brute_force() -> None:
    blocks = [RNG.integers(0, 4, (3, 3)) / 4, RNG.integers(0, 4, (3, 5)) / 4]
    shares, (chance, low, high) = wins(blocks)
    for row, column in itertools.product(range(3), repeat=2):
        pairs = [[(a > b) + (a == b) / 2 for a in x[row] for b in x[column]] for x in blocks]
        assert chance[row, column] == pytest.approx(np.mean([np.mean(one) for one in pairs]))
        means = [(x[row].mean(), x[column].mean()) for x in blocks]
        assert shares[row, column] == pytest.approx(
            np.mean([(a > b) + (a == b) / 2 for a, b in means])
        )
    drawn = []
    for _ in range(1000):  # the seeds of each setting anew, the same ones for both methods
        rows = [x[:, RNG.integers(0, x.shape[1], x.shape[1])] for x in blocks]
        drawn.append(np.mean([(1 + np.sign(x[0][:, None] - x[2])).mean() / 2 for x in rows]))
    assert [low[0, 2], high[0, 2]] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.05)


def test_a_profile_by_hand() -> None:
    gains = [np.array([0.1, 0.2, 0.3]), np.array([-0.1, 0.2, 0.5])]
    share, low, high = profile(gains, np.array([-0.2, 0.0, 0.2, 0.4, 0.6]))
    assert share == pytest.approx([1, 5 / 6, 4 / 6, 1 / 6, 0])
    assert (low[[0, 4]], high[[0, 4]]) == (pytest.approx([1, 0]), pytest.approx([1, 0]))
    assert low[2] < share[2] < high[2]


def test_fieller_by_its_definition_and_its_cover_by_simulation() -> None:
    """At the ends of the interval the t-test of above - r below is at 5 %; the true ratio is in it
    in 95 % of cases."""
    above, below = RNG.normal(0.03, 0.01, 6), RNG.normal(0.06, 0.01, 6)
    value, *ends = ratio(above, below)
    assert value == pytest.approx(above.mean() / below.mean())
    assert [stats.ttest_1samp(above - end * below, 0).pvalue for end in ends] == pytest.approx(
        [0.05, 0.05]
    )
    assert all(map(math.isnan, ratio(above, RNG.normal(0, 0.1, 6))))
    assert ratio([1.0], [2.0]) is None
    noise = RNG.normal(0, 0.01, (1000, 2, 5))
    found = [ratio(0.03 + a, 0.1 + b + a / 2) for a, b in noise]
    assert np.mean([low <= 0.3 <= high for _, low, high in found]) == pytest.approx(0.95, abs=0.02)


def test_verdicts_by_scipy() -> None:
    gain = np.array([[0.02, 0.03, 0.025, 0.03], [0.01, 0.02, 0.03, 0.02]])
    random = RNG.normal(0.5, 0.1, gain.shape)
    small, wide = np.array([0.001, -0.001, 0.0005, 0.0002]), np.array([0.1, -0.1, 0.1, -0.05])
    lines = {
        "up": random + gain,
        "down": random - gain,
        "same": random + small,
        "open": random + wide,
    }
    found = by_numbers({"random": random, **lines})
    words = {"up": "better", "down": "worse", "same": "equal within 0.005", "open": "not decided"}
    assert {name: one.word for name, one in found.verdicts.items()} == words
    assert found.better == ["up"]
    p = stats.ttest_1samp(gain.mean(0), 0).pvalue
    assert (
        found.verdicts["up"].p_value == found.verdicts["down"].p_value == pytest.approx(4 * p)
    )  # the ties of Holm
    ends = ((-0.005, "greater"), (0.005, "less"))
    one_sided = [stats.ttest_1samp(small, end, alternative=way).pvalue for end, way in ends]
    assert found.verdicts["same"].p_equal == pytest.approx(4 * max(one_sided))
    assert Verdict(differences([0.1, 0.1]), 0.0, 1.0).word == "too few seeds"


def test_better_and_equal_hold_their_level_over_all_methods() -> None:
    """Methods that are level with random selection; and such that lie at the margin, of which none
    is equal."""
    wrong, names = np.zeros(2), ["random", *"abcd"]
    for _ in range(400):
        noise = dict(zip(names, RNG.normal(0, 0.004, (5, 2, 5)), strict=True))
        level, edge = (
            by_numbers(noise),
            by_numbers({n: x + 0.005 * (n != "random") for n, x in noise.items()}),
        )
        called = [one.word in ("better", "worse") for one in level.verdicts.values()]
        wrong += [any(called), any(one.p_equal < 0.05 for one in edge.verdicts.values())]
    assert (wrong <= stats.binom.ppf(0.999, 400, 0.05)).all()


def test_the_share_of_the_possible_gain_is_paired_and_pooled() -> None:
    random = RNG.normal(0.5, 0.1, (2, 5))
    whole = np.array([[0.1, 0.12, 0.11, 0.1, 0.12], [0.3, 0.32, 0.31, 0.3, 0.3]])
    found = by_numbers(
        {"random": random, "a": random + whole / 4, "b": random, "top": random + whole}, ["top"]
    )
    assert found.possible("a") == pytest.approx((0.25, 0.25, 0.25), abs=1e-6)
    assert found.possible("b", slice(1, 2))[0] == pytest.approx(0)
    assert "top" not in found.ranks
    assert by_numbers({"random": random, "a": random, "b": random}).possible("a") is None


def test_bytes_samples_and_area(tmp_path: Path) -> None:
    run = only_run(
        write_run(tmp_path, [0.2, None, 0.6, 0.8], [[0]] * 4)
    )  # 20 bytes and 5 samples a round
    assert find_measure("samples_to@0.6")(run) == 15
    assert accuracy_by_bytes(run, 80) == pytest.approx((20 * 0 + 40 * 0.2 + 20 * 0.6) / 80)
    assert accuracy_by_bytes(run, 160) == pytest.approx(
        (20 * 0 + 40 * 0.2 + 20 * 0.6 + 80 * 0.8) / 160
    )
    assert accuracy_by_bytes(run, 30) == pytest.approx(10 * 0.2 / 30)


GAINS = {"random": 0.0, "gpfl": 0.1, "oort": 0.2, "pncs": -0.3, "clairvoyant": 0.4}


def write_settings(
    to: Path, gains: Gains = GAINS, shards: Sequence[int] = (1, 2), seeds: int = 3
) -> None:
    """Runs that lie so much above random selection; oort sends twice, in the second setting a
    client is imperfect."""
    for setting, seed, (name, gain) in itertools.product(shards, range(seeds), gains.items()):
        final = 0.4 + 0.01 * seed * setting + gain + 0.001 * ((seed * len(name)) % 3)
        told = {"choices": {"selector": name}, "partition": {"shards": setting}, "seed": seed}
        selected, more = (
            [[0, 1] if name == "oort" else [0]] * 2,
            {"asks": "nothing"} if name == "mine" else {},
        )
        path = write_run(to / str(setting), [0.1, final], selected, summary=more, **told)
        if setting == 2:
            (path / "imperfect.json").write_text('{"clients": [3]}')


def test_a_report_ranks_judges_and_advises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_settings(tmp_path / "runs")
    monkeypatch.setattr(
        "fedsim.report.figures.all_plots", lambda _: []
    )  # which are tested elsewhere
    assert make_report([str(tmp_path / "runs"), "--to", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert (
        "over 2 settings 2 of 3 methods are better than random beyond chance; best by what they ask for"
        in shown
    )
    assert shown.index("Over settings") < shown.index("Results")
    assert "Who beats whom" not in shown
    tables = {table.name: table for table in all_of(tmp_path / "runs")}
    rows = {
        row[0]: dict(zip(tables["settings"].header, row, strict=True))
        for row in tables["settings"].rows
    }
    assert list(rows) == ["oort", "gpfl", "random", "pncs"]
    early = ["better, preliminary", "better, preliminary", "reference", "worse, preliminary"]
    assert [row["verdict"] for row in rows.values()] == early
    assert [row["asks for"] for row in rows.values()] == ["losses", "nothing", "nothing", "updates"]
    assert (rows["random"]["rank"], rows["random"]["in its class"]) == ("3.00", "2.00")
    assert rows["gpfl"]["of possible gain"].startswith("+0.25 [")
    assert (rows["gpfl"]["bytes"], rows["oort"]["bytes"]) == ("1.00", "2.00")
    assert rows["pncs"]["bytes"] == "never (0/6)"
    costs = ["2.00"] * 4, ["-", "-", "0.0000 [0.0000, 0.0000]", "-"]
    assert tables["settings_costs"].rows[0] == ["oort", "losses", *costs[0], *costs[1]]
    # nothing can be asked, losses are cheap, so are updates; traffic is dear: as few bytes as gpfl;
    # imperfect clients
    assert [use for _, use, _ in tables["advice"].rows] == [
        "gpfl",
        "oort, gpfl",
        "gpfl",
        "random",
        "oort, gpfl",
    ]
    page = (tmp_path / "report.html").read_text()
    order = ("table-settings", "table-advice", "Mean ranks of final accuracy", "table-results")
    assert (places := [page.index(one) for one in order]) == sorted(places)
    found = {path.name for path in (tmp_path / "figures").iterdir()}
    assert found >= {f"settings_{name}.png" for name in ("ranks", "gains", "costs", "profiles")}


def all_of(folder: Path) -> list[Table]:
    groups = groups_of(folder)
    return all_tables(groups, make_panels(groups), compare(make_panels(groups)))


def test_a_users_own_runs_are_joined_with_kept_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(tmp_path / "kept")
    write_settings(tmp_path / "own", {"mine": 0.3})
    kept, own, to = str(tmp_path / "kept"), str(tmp_path / "own"), str(tmp_path / "to")
    assert make_report([kept, "--archive", str(tmp_path / "kept.parquet"), "--no-figures"]) == 0
    assert make_report([own, str(tmp_path / "kept.parquet"), "--no-figures"]) == 0
    assert "nothing: mine (better, preliminary)" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "own/report/summary.json").read_text())["groups"]) == 12
    assert make_report([own, "absent", "--to", to]) == 3


def test_what_has_not_run_everywhere_is_left_out_and_told_and_controls_are_no_methods(
    tmp_path: Path,
) -> None:
    write_settings(tmp_path, {**GAINS, "random_control": 0.05})
    write_settings(
        tmp_path / "some", {"afl": 0.5}, [1, 3]
    )  # nothing is compared where random selection has not run
    groups = groups_of(tmp_path)
    found = compare(make_panels(groups))
    assert [panel.title for panel in found.panels] == ["shards=1", "shards=2"]
    assert found.methods == ["random", "gpfl", "oort", "pncs", "random_control"]
    assert (found.left_out, found.controls) == ({"afl": 1}, ["random_control"])
    told = over_settings(found)
    assert "2 of 3 methods are better than random beyond chance" in told
    assert told.endswith("finished in fewer settings, and left out: afl (1)")
    assert found.best["nothing"] == "gpfl"
    write_settings(tmp_path / "better", {"random_control": 0.3, "random": 0.0, "gpfl": -0.1})
    assert compare(make_panels(groups_of(tmp_path / "better"))).best == {"nothing": "random"}


def test_without_two_settings_three_methods_and_random_there_is_nothing_over_settings(
    tmp_path: Path,
) -> None:
    without = {"oort": 0.0, "gpfl": 0.1, "pncs": 0.2}
    few = {"random": 0.0, "gpfl": 0.1, "clairvoyant": 0.3}
    cases = {"one": (GAINS, [1]), "few": (few, [1, 2]), "without": (without, [1, 2])}
    for name, (gains, shards) in cases.items():
        write_settings(tmp_path / name, gains, shards)
        assert compare(make_panels(groups_of(tmp_path / name))) is None
        assert "settings" not in {table.name for table in all_of(tmp_path / name)}


CLASSES = [
    *(
        ("gpfl_alpha0", None, "nothing"),
        ("power_of_choice_d10", None, "losses"),
        ("ocs", None, "updates"),
    ),
    *(("fedcs", None, "speeds"), ("mine", None, "unknown"), ("../x", None, "unknown")),
    *(
        ("a", "gradients; losses", "updates"),
        ("a", "label_counts", "label counts"),
        ("a", "nothing", "nothing"),
    ),
]


def test_the_class_is_told_by_the_run_or_by_the_shipped_file(tmp_path: Path) -> None:
    for number, (choice, asks, expected) in enumerate(CLASSES):
        told = {"asks": asks, "choices": {"selector": choice}}
        write_run(tmp_path / str(number) / "x", [0.5], [[0]], summary=told)
        assert class_of(groups_of(tmp_path / str(number))) == expected
    for number, selected in enumerate(([0, 1], [0, 1, 2, 3])):
        write_run(tmp_path / "all" / str(number), [0.5], [selected], partition={"shards": number})
    assert class_of(groups_of(tmp_path / "all")) == "everybody trains"


def test_the_class_says_what_a_method_needs_at_the_server(tmp_path: Path) -> None:
    """By summary.json; of earlier runs, by the class that their config names."""
    target = {"_target_": "fedsim.selectors.gpfl.GPFL", "reward_eval": "test"}
    write_run(
        tmp_path / "new" / "x",
        [0.5],
        [[0]],
        summary={"asks": "losses", "server_data": "unlabelled samples"},
    )
    write_run(tmp_path / "old" / "x", [0.5], [[0]], summary={"asks": "nothing"}, selector=target)
    assert class_of(groups_of(tmp_path / "new")) == "losses; server: unlabelled samples"
    assert class_of(groups_of(tmp_path / "old")) == "nothing; server: the test set"


def test_the_advice_names_what_the_server_must_hold(tmp_path: Path) -> None:
    write_settings(tmp_path, {"random": 0.0, "gpfl": 0.1, "oort": 0.2, "pncs": -0.3})
    for path in tmp_path.glob("*/*/summary.json"):
        summary = json.loads(path.read_text())
        if summary["choices"]["selector"] == "gpfl":
            path.write_text(json.dumps({**summary, "server_data": "labelled samples"}))
    advice = {
        case: use for case, use, _ in next(t for t in all_of(tmp_path) if t.name == "advice").rows
    }
    assert advice["nothing can be asked of clients"] == "random: none is better beyond chance"
    assert advice["nothing can be asked of clients; the server holds labelled samples"] == "gpfl"


def test_the_diagram_joins_what_lies_within_the_critical_difference() -> None:
    """With 12 settings and 4 methods it is 1.35: of ranks 1, 2.1, 3 and 3.9 there are three longest
    runs within."""
    found = by_numbers({name: np.zeros((12, 2)) for name in ("random", "a", "b", "c")})
    found.__dict__.update(
        ranks={"a": (1.0, 1.0), "random": (2.1, 1.0), "b": (3.0, 1.0), "c": (3.9, 1.0)}
    )
    ax = ranks_plot(found).figure.axes[0]
    bars = [bar.get_segments()[0][:, 0].tolist() for bar in ax.collections]
    assert bars == [pytest.approx(ends) for ends in ([0.95, 2.15], [2.05, 3.05], [2.95, 3.95])]
    names = [text.get_text().split() for text in ax.texts]
    assert names == [["a", "1.00"], ["random", "2.10"], ["3.00", "b"], ["3.90", "c"]]


def test_costs_stand_beside_gains_with_the_front_of_both(tmp_path: Path) -> None:
    write_settings(tmp_path)
    found = compare(make_panels(groups_of(tmp_path)))
    assert [[panel.title for panel in some.panels] for some in found.imperfect()] == [["shards=2"]]
    with style():
        ax, *costs = costs_plot(found).figure.axes
    assert [text.get_text() for text in ax.get_yticklabels()] == [
        "clairvoyant",
        "oort",
        "gpfl",
        "random",
        "pncs",
    ]
    assert [float(bars[0].get_xdata()[0]) for bars in ax.containers] == pytest.approx(
        [20.05, 10.05, 5.05, 0, -14.95]
    )
    assert [its.get_xlabel() for its in costs] == ["bytes", "samples"]  # no time was simulated
    points = [(float(line.get_xdata()[0]), line.get_fillstyle()) for line in costs[0].lines[:5]]
    assert points == [
        (1, "none"),
        (2, "full"),
        (1, "full"),
        (1, "none"),
        (1, "none"),
    ]  # oort sends twice
    write_settings(tmp_path / "one", seeds=1)
    single = costs_plot(compare(make_panels(groups_of(tmp_path / "one")))).figure.axes[0]
    assert [float(bars[0].get_xdata()[0]) for bars in single.containers] == pytest.approx(
        [20, 10, 5, 0, -15]
    )


@pytest.mark.filterwarnings("error")
def test_the_map_of_gains_says_what_chance_explains(tmp_path: Path) -> None:
    """gpfl is above random selection by 0, .001 and .002; with one seed nothing is known of
    chance."""
    write_settings(tmp_path / "some", {**GAINS, "gpfl": 0.0})
    ax = gains_plot(compare(make_panels(groups_of(tmp_path / "some")))).figure.axes[0]
    assert [text.get_text() for text in ax.get_yticklabels()] == [
        "clairvoyant",
        "oort",
        "gpfl",
        "pncs",
    ]
    assert [text.get_text() for text in ax.get_xticklabels()] == [
        "all settings",
        "shards=1",
        "shards=2",
    ]
    told = [
        (text.get_text(), text.get_weight()) for text in ax.texts
    ]  # the final accuracy is a mean of two rounds
    expected = [("+20", "bold"), ("+10", "bold"), ("+0.1", "normal"), ("-15", "bold")]
    assert told[::3] == told[1::3] == told[2::3] == expected
    single = by_numbers(
        {name: np.full((2, 1), value) for name, value in GAINS.items()}, ["clairvoyant"]
    )
    assert list(gains_plot(single).figure.axes[0].texts) == []


def test_random_selection_with_plain_local_training_is_the_reference(tmp_path: Path) -> None:
    for number, (shards, algorithm, seed) in enumerate(
        itertools.product((1, 2), ("fedprox", "plain", "x"), (0, 1))
    ):
        choices, seeds = {"selector": "random", "local_algorithm": algorithm}, {"seed": seed}
        config = {"partition": {"shards": shards}, "local_algorithm": {"_target_": algorithm}}
        write_run(
            tmp_path / str(number), [0.5], [[0]], summary={"choices": choices}, **config, **seeds
        )
    found = compare(make_panels(groups_of(tmp_path)))
    assert found is not None
    assert (found.reference, len(found.methods)) == ("plain", 3)
