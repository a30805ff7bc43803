"""What `fedsim list` reads out of conf/ is what Hydra composes and what methods cost."""

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from fedsim.clients.context import UNASKED_SIGNALS, Signal
from fedsim.commands.catalogue import GROUP, INHERITED, KEY, Catalogue, comments
from fedsim.config.compose import search_path
from fedsim.config.composition import compose_config
from fedsim.config.sources import options
from fedsim.config.yaml_files import head_of
from fedsim.core.declared_signals import declared_signals
from fedsim.core.server_data import SERVER_DATA, server_data, server_sees
from fedsim.results.ranking import ASKED
from tests.test_selector_contract import CHOICES as SELECTORS
from tests.test_selector_contract import build, simulation
from tests.toys import toy_population

ROOT = Path(__file__).parents[1]
CATALOGUE = Catalogue()
METHODS = CATALOGUE.group("selector").choices
N, K, B, C, M, D = 10, 3, 8, 3, 3, 6
"""Of the toy simulations: clients, selected, bytes of the model, classes, public samples,
candidates (2 K)."""
NOT_BY_ROUND = {
    "md": "draws with replacement: fewer clients than K may take part",
    "ocs": "the number of uploads is random",
    "aocs": "and so is that of its exchanges",
    **dict.fromkeys(
        [name for name in SELECTORS if name.startswith("fedcor")],
        "virtual rounds differ from others",
    ),
}


def test_groups_are_those_of_conf_and_each_says_what_is_chosen_in_it() -> None:
    with search_path():
        assert {"selector", "selector/threshold", "optimizer/schedule", "preset", "cell"} < set(
            CATALOGUE.names
        )
        for name in CATALOGUE.names:
            group = CATALOGUE.group(name)
            assert group.about, name
            assert sorted(group.choices) == sorted(set(options(name)) - {"basic"}), (
                name
            )  # which is Hydra's own
            for choice in group.choices.values():
                assert choice.text, (name, choice.name)
                assert 5 < len(choice.idea) < 300, choice.name
                assert not choice.idea.startswith("#"), choice.name


WORDS = {
    Signal.LOSSES: "loss",
    Signal.TRAINING_LOSS: "training loss",
    Signal.SQUARED_LOSS: "root mean square of own training losses",
    Signal.GRADIENTS: "gradient",
    Signal.LABEL_COUNTS: "label counts",
}


@pytest.fixture
def _nodes_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selectors are built from the catalogue's values, which takes less time than Hydra's
    composition."""

    def node(choice: str) -> dict[str, Any]:
        method = METHODS[choice]
        groups = {
            name: CATALOGUE.group(name).choices[made].file
            for name, made in method.file.included.items()
        }
        return {
            **method.file.values,
            **{name.rpartition("/")[2]: dict(file.values) for name, file in groups.items()},
        }

    monkeypatch.setattr("tests.test_selector_contract.composed", node)


@pytest.mark.usefixtures("_nodes_of_the_catalogue")
@pytest.mark.parametrize("name", SELECTORS)
def test_every_method_has_source_and_costs_and_asks_what_it_declares(name: str) -> None:
    fields = METHODS[name].fields
    assert (
        {"source", "asks", "bytes", "samples"}
        <= fields.keys()
        <= {*INHERITED, "also", "tune", "server", "sees"}
    )
    needs = build(name, toy_population([2] * N, K, 12)).needs
    for signal in needs & WORDS.keys():
        assert WORDS[signal] in fields["asks"]
    assert fields["asks"].startswith("nothing") == (not needs - UNASKED_SIGNALS)
    told = ("; ".join(sorted(needs - UNASKED_SIGNALS)) or "nothing", fields["asks"])
    assert (
        len({next(key for key, tells in ASKED.items() if re.search(tells, text)) for text in told})
        == 1
    )
    assert fields["server"] == server_data(
        needs
    )  # read in the source of the class, and declared by the object
    assert fields["sees"] == server_sees(needs)
    assert (Signal.PUBLIC in needs) == (fields.get("needs") == "server.public_samples")


LAB = """
import fedsim.selectors.gpfl
from fedsim.selectors.base import Selector, Signal
from fedsim.selectors.shapley import SFedAvg as Valued

NEEDS = frozenset({Signal.PUBLIC})

class Plain(Selector):
    def select(self, round, clients, rng):
        if Signal.TEST in self.needs:
            return Signal.VALIDATION

class Named(Selector):
    needs = NEEDS

class Below(Valued):
    pass

class More(Named):
    needs = Named.needs | {Signal.TEST}

class Chosen(Plain):
    def __post_init__(self):
        self.needs: frozenset[Signal] = frozenset({Signal(self.kind)})

class Circle(Circle):
    pass
"""
DECLARED = {
    ("Plain", ""): "nothing",
    ("Named", ""): "unlabelled samples",
    ("Below", ""): "labelled samples",
    ("More", ""): "unlabelled samples, the test set",
    ("Chosen", "validation"): "labelled samples",
    ("Chosen", "losses"): "nothing",
    ("Circle", ""): "nothing",
    ("Absent", ""): "nothing",
}


def test_what_a_users_selector_needs_at_the_server_is_read_in_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab_of_needs.py").write_text(LAB)
    monkeypatch.chdir(tmp_path)
    nodes = {
        (name, kind): {"_target_": f"lab_of_needs.{name}", "kind": kind} for name, kind in DECLARED
    }
    assert {key: server_data(declared_signals(node)) for key, node in nodes.items()} == DECLARED
    assert all(
        server_data(declared_signals(node)) == "nothing"
        for node in (None, [1], {}, {"_target_": 3})
    )


LAB_BASES = """
import fedsim.selectors.shapley
import lab_package.sub.bases as renamed
from . import bases
from ..top import Top as Above
from .bases import Public

class Sibling(Public): pass
class Attribute(bases.Public): pass
class Renamed(renamed.Public): pass
class Parent(Above): pass
class Dotted(fedsim.selectors.shapley.SFedAvg): pass
class Beyond(Missing): pass
"""


def test_bases_are_found_by_imports_of_all_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lab_package"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("from .top import Top\nclass Whole(Top): pass")
    (package / "top.py").write_text("class Top:\n    needs = {Signal.TEST}")
    (package / "sub" / "__init__.py").touch()
    (package / "sub" / "bases.py").write_text("class Public:\n    needs = {Signal.PUBLIC}")
    (package / "sub" / "lab.py").write_text(f"from ....beyond import Missing\n{LAB_BASES}")
    monkeypatch.chdir(tmp_path)
    signals = {}
    for name in ("Sibling", "Attribute", "Renamed", "Parent", "Dotted", "Beyond"):
        signals[name] = declared_signals({"_target_": f"lab_package.sub.lab.{name}"})
    assert signals == {
        "Sibling": {"public"},
        "Attribute": {"public"},
        "Renamed": {"public"},
        "Parent": {"test"},
        "Dotted": {"validation", "updates"},
        "Beyond": set(),
    }
    assert declared_signals({"_target_": "lab_package.Whole"}) == {"test"}


@pytest.mark.parametrize("text", ["README.md", "docs/selectors.md"])
def test_tables_say_what_each_method_needs_at_the_server(text: str) -> None:
    rows = [line for line in (ROOT / text).read_text().splitlines() if line.startswith("| ")]
    named = {name: row for row in rows for name in re.findall(r"`(\w+)`", row) if name in METHODS}
    for name, row in named.items():
        needed = [words for words in SERVER_DATA.values() if f"| {words} |" in row]
        assert (needed or ["nothing"]) == [METHODS[name].fields["server"]], name


def bytes_of(text: str, direction: str, d: int, selected: int = K) -> int:
    """The extra bytes of a later round in the words of a file: `(d-K) B down, 4 d up`."""
    text = (
        text.rpartition("then ")[2]
        if "then 0" in text
        else re.sub(r"; (in round 1|sketches).*", "", text)
    )
    total, symbols = 0, {"N": N, "K": selected, "B": B, "C": 3, "d": d}
    for term in text.replace("down and up", "down, 0 up" if direction == "down" else "up").split(
        ", "
    ):
        product, _, to = term.rpartition(" ")
        if to == direction:
            total += eval(
                product.strip().replace(" ", "*"), {}, symbols
            )  # a term of conf/, as tested here
    return total


@pytest.mark.usefixtures("_nodes_of_the_catalogue")
@pytest.mark.parametrize("name", sorted(set(SELECTORS) - set(NOT_BY_ROUND)))
def test_a_method_costs_the_bytes_that_its_file_says(name: str) -> None:
    first, *_, last = list(simulation(name, [2] * N, K))
    text = METHODS[name].fields["bytes"]
    selected = K if name == "full" else len(last.selected)  # FedABC and top_loss_7 decide how many
    of_round = [(last, text, 10 if name.endswith("d10") else D, selected)]
    if "; in round 1 " in text:
        of_round.append((first, re.sub(r".*; in round 1 ([^;]*).*", r"\1", text), D, K))
    for record, words, d, number in of_round:
        assert record.bytes_down - number * B == bytes_of(words, "down", d, number)
        assert record.bytes_up - number * B == bytes_of(words, "up", d, number)


@pytest.mark.parametrize(
    ("parent", "choice"),
    [
        ("random", "selector=power_of_choice_trained_d10"),
        ("random", "selector=pncs_two"),
        ("random", "selector=fedcor_2022"),
        ("pncs", "selector/sketch=gauss_10"),
        ("gpfl", "selector/exploration=fixed_2"),
        ("s_fedavg", "selector/valuation=exact"),
        ("random", "dataset=femnist_digits"),
    ],
)
def test_a_variants_values_are_those_that_hydra_composes(parent: str, choice: str) -> None:
    group, _, name = choice.partition("=")
    package = group.replace("/", ".")
    with search_path():
        config = compose_config([f"selector={parent}", choice])
    node: Any = OmegaConf.to_container(OmegaConf.select(config, package))
    found = CATALOGUE.group(group).choices[name]
    own_groups = {sub.rpartition("/")[2] for sub in found.file.included}
    assert found.file.values == {k: v for k, v in node.items() if k not in own_groups}
    assert [key for key, _, _ in found.values] == [
        f"{package}.{k}" for k in found.file.values if k != "_target_"
    ]


def test_comments_are_read_with_their_continuations() -> None:
    text = (
        "# @package _global_\n# One thing. And more\n# of it.\n#   source:  A paper of 2020,\n"
        "#            its appendix\ndefaults:\n  - override /model: mlp  # not a group of its own\n"
        "  - sub: one            # what sub is\n  - _self_\na: 1                      # the first,\n"
        "                          # in two lines\nb: '#x'\nc: [1, 2]  # third\n"
    )
    prose, fields = head_of(text)
    assert (prose, fields) == (
        "One thing. And more of it.",
        {"source": "A paper of 2020, its appendix"},
    )
    assert comments(text, KEY) == {"a": "the first, in two lines", "c": "third"}
    assert comments(text, GROUP) == {"model": "not a group of its own", "sub": "what sub is"}
