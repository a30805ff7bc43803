"""`fedsim --help`, `--version`, `list`, and what is said to words that are no command."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedsim
from fedsim.commands.catalogue import Catalogue
from fedsim.commands.dispatch import COMMANDS, answer, entries, suggestion, table
from fedsim.running.process import CLOSED_PIPE

ROOT = Path(__file__).parents[1]
Ask = Callable[..., str]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ask:
    """What a command line prints in a terminal of 80 columns and an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str, code: int = 0) -> str:
        assert answer(words) == code
        printed = capsys.readouterr()
        assert (printed.err == "") == (code == 0)
        return printed.err if code else printed.out

    return call


def own_choice(tmp_path: Path) -> Path:
    """A folder with a selector of the user's own, as in the README, and one that builds on a shipped choice."""
    folder = tmp_path / "mine"
    (folder / "selector").mkdir(parents=True)
    (folder / "selector" / "median.yaml").write_text("_target_: my_lab.Median\nquantile: 0.5   # in [0, 1]\n")
    (folder / "selector" / "slow_gpfl.yaml").write_text("# GPFL, slowly.\ndefaults:\n  - gpfl\n  - _self_\nrho: 1\n")
    code = 'class Median:\n    """Selects the middle. More."""\n\n    needs = frozenset({Signal.LOSSES})\n'
    (tmp_path / "my_lab.py").write_text(code)
    return folder


def test_help_says_on_one_screen_what_there_is(ask: Ask) -> None:
    for words in (["--help"], ["seed=3", "-h"], ["help"]):
        page = ask(*words)
        assert f"fedsim {fedsim.__version__} compares client selection methods" in " ".join(page.split())
        for name, command in COMMANDS.items():
            assert f"  {name:<6}  {command.about}" in page
        for name in Catalogue().names:
            assert ("/" in name) or (f"\n  {name} " in page)
        assert len(page.splitlines()) <= 50
        assert "README.md and docs/" in page


def test_commands_to_try_can_be_typed_as_they_are_printed() -> None:
    from fedsim.commands.dispatch import TRY

    assert len(TRY) == 5
    names = {words.split()[1] for words, _ in TRY if len(words.split()) > 1}
    assert all(name in COMMANDS or name.startswith("-") for name in names)


def test_version_is_fedsims(ask: Ask) -> None:
    assert ask("--version") == f"fedsim {fedsim.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [["--help"], ["list"], *(["list", name] for name in Catalogue().names), ["list", "selectors", "gpfl", "pncs"]],
)
def test_pages_fit_80_columns_with_whole_words(ask: Ask, words: list[str]) -> None:
    lines = ask(*words).splitlines()
    assert lines
    for line in lines:
        assert len(line) <= 80 or " " not in line.strip(), line  # a word may be longer than a line


def test_selectors_are_listed_with_idea_source_questions_and_cost(ask: Ask) -> None:
    page = ask("list", "selectors")
    assert page == ask("list", "selector")
    assert "  random           K clients uniformly at random: every paper's baseline.\n" in page
    assert (
        "Cho et al. 2022 · asks loss of d candidates · adds (d-K) B down, 4 d up\n      also adapow_d, cpow_d" in page
    )
    assert len(page.splitlines()) < 100
    for choice in Catalogue().group("selector").choices:
        assert choice in page


def test_one_choice_is_shown_with_its_values_and_docstring(ask: Ask) -> None:
    page = ask("list", "selectors", "pncs_q2")
    assert "  selector.queue_length=2 " in page
    assert "length of the queue of selected clients" in page  # the comment of the choice that it builds on
    assert "Choices\n  selector/sketch=identity" in page
    assert "All clients report a gradient; the K clients with the lowest mean pairwise" in page
    page = ask("list", "preset", "gpfl_alpha")
    assert "  optimizer.schedule.milestones=[150, 300]\n" in page
    assert "Sweeps over\n  cell=gpfl_2spc\n" in page
    assert "one cell" not in page  # which is of the experiment that it builds on


@pytest.mark.parametrize(
    ("word", "group"),
    [("partitions", "partition"), ("sketches", "selector/sketch"), ("schedule", "optimizer/schedule")],
)
def test_groups_are_found_by_plural_and_last_part(ask: Ask, word: str, group: str) -> None:
    assert ask("list", word).startswith(f"{group}: ")


def test_own_choices_and_classes_are_listed_and_not_imported(ask: Ask, tmp_path: Path) -> None:
    folder = own_choice(tmp_path)
    page = ask("list", "selectors", "--config-dir", str(folder))
    assert "  median           Selects the middle.\n      asks losses\n" in page
    assert "also gpfl_alpha0, gpfl_cosine, slow_gpfl" in page
    page = ask("list", "selectors", "median", "-cd", str(folder))
    assert "  selector.quantile=0.5  in [0, 1]\n" in page
    assert "my_lab.Median\n  Selects the middle. More." in page
    assert "my_lab" not in sys.modules


def test_lists_as_json_have_all_of_it(ask: Ask) -> None:
    found = json.loads(ask("list", "selectors", "--json"))
    assert found["cpow_d"]["builds_on"] == "power_of_choice"
    assert found["cpow_d"]["fields"]["source"] == "Cho et al. 2022"
    assert found["cpow_d"]["values"]["selector.estimate"]["value"] == "batch"
    assert json.loads(ask("list", "--json"))["preset"]["choices"][0] == "fashion_mnist_2spc"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "selecters"], "list: selecters is no group of the config; did you mean selector?"),
        (["list", "zzz"], "list: zzz is no group of the config; there are aggregator, "),
        (["list", "selector", "gfpl"], "list: gfpl is not a choice of selector; did you mean gpfl?"),
        (["list", "selector", "rndxxx"], "did you mean random?"),  # as `selector=rndxxx` is told
        (["list", "--config-dir", "nowhere"], "--config-dir='nowhere': must be an existing folder"),
    ],
)
def test_what_is_not_there_is_told_with_the_nearest(ask: Ask, words: list[str], message: str) -> None:
    assert message in ask(*words, code=2)


@pytest.mark.parametrize("content", ["- 1\n", "{", "a: &a [*a]\n" * 9, "_target_: [1]\nx: " + "[" * 60 + "]" * 60])
def test_damaged_files_of_a_user_end_in_one_screen(ask: Ask, tmp_path: Path, content: str) -> None:
    (tmp_path / "mine" / "selector").mkdir(parents=True)
    (tmp_path / "mine" / "selector" / "broken.yaml").write_text(content)
    assert "broken.yaml" in ask("list", "selectors", "--config-dir", "mine", code=2)


def test_experiments_are_not_taken_for_commands() -> None:
    for words in ([], ["seed=1"], ["-m", "seed=1"], ["--cfg", "job"], ["--hydra-help"], ["selector=list"], ["lst"]):
        assert answer(words) is None


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["lst", "selectors"], "fedsim list selectors"),
        (["repor", "default"], "fedsim report default"),
        (["-m", "show", "seed=1"], "fedsim show -m seed=1"),
        (["-cd", "mine", "list", "selectors"], "fedsim list -cd mine selectors"),
        (["seed=1", "-m"], None),
        (["zzzz"], None),
    ],
)
def test_a_word_like_a_command_is_answered_with_it(words: list[str], meant: str | None) -> None:
    assert suggestion(words) == meant


def test_a_mistyped_command_is_told_as_a_mistake_with_the_nearest_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedsim", "lst", "selectors"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "lst: is neither a command nor key=value" in done.stderr
    assert done.stderr.endswith("  did you mean `fedsim list selectors`?\n")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_help_and_lists_need_neither_torch_nor_hydra(tmp_path: Path) -> None:
    code = (
        "import sys; from fedsim.commands.dispatch import answer\n"
        "for words in (['--help'], ['--version'], ['list'], ['list', 'selectors'], ['list', 'selectors', 'gpfl']):\n"
        "    assert answer(words) == 0\n"
        "sys.exit(str({'torch', 'hydra', 'omegaconf', 'numpy', 'wandb'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"


def test_torch_is_tuned_before_it_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; import fedsim.running.process as process\n"
        "process.tune = lambda: print('tuned', 'torch' in sys.modules)\n"
        "from fedsim.run import main; main()"
    )
    for words in (["search", "optimizer.lr=0.1"], ["selector=nope"]):
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "tuned False\n")


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedsim", "list", "selectors"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (CLOSED_PIPE, b"")


def test_entries_and_tables_break_no_word() -> None:
    text = entries([("a", "word " * 30), ("a_name_that_is_longer_than_the_column", "text")], widest=20)
    assert text.splitlines()[-2:] == ["  a_name_that_is_longer_than_the_column", " " * 20 + "text"]
    assert set(text.split()) == {"a", "word", "a_name_that_is_longer_than_the_column", "text"}
    assert set(entries([("a", "a-mini-batch " * 30)]).split()) == {"a", "a-mini-batch"}
    assert table(["a", "bb"], [["1", "2"], ["long", "3"]], right=[1]).splitlines() == [
        "a     bb",
        "----  --",
        "1      2",
        "long   3",
    ]
