"""`fedsim cite` has the reference of every choice, and the bibliography has them all."""

import re

import pytest

from fedsim.commands.cite import read_entries
from fedsim.commands.dispatch import answer
from tests.documentation import DOCS, ROOT

GROUPS = ["selector", "aggregator", "local_algorithm", "dataset", "partition", "clients"]


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_has_a_reference_or_is_said_to_have_none(group: str) -> None:
    choices = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
    assert sorted(choices - read_entries().keys()) == []


def test_the_bibliography_has_every_choice_and_title() -> None:
    page = (DOCS / "bibliography.md").read_text(encoding="utf-8")
    for choice, entries in read_entries().items():
        assert f"`{choice}`" in page
        for title in re.findall(r" title = {(.*)},", "".join(entries)):
            assert title.replace("{", "").replace("}", "") in page


def test_every_entry_has_a_key_of_its_own_and_closes_its_braces() -> None:
    entries = {entry for entries in read_entries().values() for entry in entries}
    bibtex = [entry for entry in entries if entry.startswith("@")]
    keys = [re.match(r"@\w+{(\w+),\n", entry)[1] for entry in bibtex]
    assert len(set(keys)) == len(keys)
    assert all(entry.count("{") == entry.count("}") for entry in bibtex)


def test_names_are_found_in_any_spelling_and_each_entry_is_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer(["cite", "Power-of-Choice", "top_loss", "round_robin"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("@") == 1
    assert "Yae Jee Cho" in printed
    assert "% no paper" in printed


def test_a_name_that_the_literature_uses_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["cite", "pow_d", "FedEntOpt"]) == 0
    printed = capsys.readouterr().out
    assert "Yae Jee Cho" in printed
    assert "Entropy-Based Client Selection" in printed


def test_an_unknown_name_is_an_error_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer(["cite", "fedabd"]) == 2
    assert "fedabd has no reference; did you mean fedabc?" in capsys.readouterr().err


def test_known_names_are_cited_next_to_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["cite", "selector=power_of_choice,my_own"]) == 2
    printed = capsys.readouterr()
    assert "Yae Jee Cho" in printed.out
    assert "my_own has no reference" in printed.err


def test_without_names_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["cite"]) == 0
    assert capsys.readouterr().out.split() == sorted(read_entries())
