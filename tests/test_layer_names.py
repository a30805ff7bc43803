"""Layers that a selector names are looked for in the model before round 1."""

from pathlib import Path

import pytest

from fedsim.core.errors import ConfigError
from fedsim.jobs.cli import run
from fedsim.selectors.layer_names import missing_layers

TINY = ("num_clients=5", "cohort_size=2", "num_rounds=1", "local.epochs=1", "tracker=files_only")
LAYERS = (
    "selector.layers=['classifier.3', 'classifier.6']: must name layers that the model trains",
    "it has layers.1, layers.4",
)


def test_layers_that_the_model_lacks_are_refused_before_round_1(tmp_path: Path) -> None:
    words = [*TINY, "selector=pncs_two", "model=mlp_64", f"output_dir={tmp_path}"]
    with pytest.raises(ConfigError) as caught:
        run(words)
    assert all(text in str(caught.value) for text in LAYERS)
    assert not list(tmp_path.iterdir())


def test_every_name_must_be_that_of_a_layer_or_a_parameter() -> None:
    trained = ["layers.1.weight", "layers.1.bias", "layers.10.weight", "scale"]
    for good in (None, [], ["layers"], ["layers.1", "layers.10"], ["layers.1.bias"], ["scale"]):
        assert missing_layers("layers", good, trained) is None
    for bad in (["nope"], ["layers.1", "nope"], ["layer"], ["layers.2"], [""]):
        problem = missing_layers("layers", bad, trained)
        assert problem is not None
        assert problem.remedy.startswith("it has layers.1, layers.10, scale;")
