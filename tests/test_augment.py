"""Random crops and mirror images in local training: the pixels, their keys, and the engines."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms import functional as transforms

from fedsim.config.compose import search_path
from fedsim.config.plan import hash_config
from fedsim.core.arrays import Ints
from fedsim.core.configs import nest
from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.data.base import SampleSource
from fedsim.engine.augment import NUM_CROPS, CropFlip, crop_numbers
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.choose import _disagreement
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial
from fedsim.engine.on_demand import OnDemandBackend
from fedsim.engine.reference import ReferenceBackend
from fedsim.engine.schedule import LocalWork, concatenate_schedules, make_schedule
from tests.engines import auto, graph, native, reference
from tests.run_toys import Run, folders, plan_of, refused, without_seconds
from tests.test_engine import BACKENDS, OPTIMIZERS, assert_engines_equal, problem

GREY = torch.full((1, 1, 1), -0.5, dtype=torch.float64)
WORK = LocalWork(epochs=2, steps=None, batch_size=4)


def images(sizes: list[int]) -> ClientData:
    """Return clients with `sizes` images of 12x12 pixels. (Crops of smaller ones may be blank.)"""
    data = problem(sizes)
    generator = torch.Generator().manual_seed(0)
    return replace(data, x=torch.randn(len(data.y), 1, 12, 12, generator=generator).double())


def augmented(sizes: list[int]) -> ClientData:
    return replace(images(sizes), augment=CropFlip(GREY))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def convolutional() -> nn.Module:
    body = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*body, nn.Dropout(0.3), nn.Linear(100, 3)).double()


@pytest.mark.parametrize("number", [0, 1, 80, 81, 97, NUM_CROPS - 1])
def test_a_crop_is_torchvisions(number: int) -> None:
    """The number is 2 (9 row + column), plus 1 for a mirror image. 80 is the image itself."""
    image = torch.arange(3 * 5 * 6, dtype=torch.float32).view(1, 3, 5, 6)
    row, column, is_mirrored = number // 18, number // 2 % 9, number % 2
    padded = transforms.pad(image, [4, 4, 4, 4], fill=-1)
    expected = transforms.crop(padded, row, column, 5, 6)
    if is_mirrored:
        expected = transforms.hflip(expected)
    fill = torch.full((3, 1, 1), -1.0)
    assert torch.equal(CropFlip(fill)(image, torch.tensor([number])), expected)


def test_images_of_a_stack_are_cropped_one_by_one() -> None:
    stack = torch.randn(2, 3, 1, 4, 4, dtype=torch.float64)
    numbers = torch.tensor([[0, 161, 80], [5, 80, 33]], dtype=torch.uint8)
    stacked = CropFlip(GREY)(stack, numbers)
    for place in np.ndindex(2, 3):
        alone = CropFlip(GREY)(stack[place][None], numbers[place][None])
        assert torch.equal(stacked[place], alone[0])


def crops_of(ids: list[int], round: int = 3, seed: int = 0, sizes: tuple[int, ...] = (9, 5)) -> Any:
    """Return the numbers of crops of clients in a round, by client, step and sample."""
    positions = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    schedule = make_schedule(
        positions, WORK, Streams(seed), round, np.array(ids), 0.1, dropout=False, augmented=True
    )
    assert schedule.crops is not None
    crops = {}
    for row, client in enumerate(ids):
        for step, count in enumerate(schedule.counts[row]):
            for column in range(count):
                sample = schedule.positions[row, step, column]
                crops[client, step, int(sample)] = int(schedule.crops[row, step, column])
    return crops


def test_a_crop_depends_on_no_other_client_of_the_cohort() -> None:
    alone = crops_of([1])
    together = crops_of([0, 1])
    assert alone == {key: number for key, number in together.items() if key[0] == 1}


@pytest.mark.parametrize("other", [{"round": 4}, {"seed": 1}])
def test_another_round_or_seed_has_other_crops(other: dict[str, int]) -> None:
    crops, other_crops = crops_of([0, 1]), crops_of([0, 1], **other)
    shared = crops.keys() & other_crops.keys()  # steps hold other samples
    assert len(shared) >= 5
    assert sum(crops[key] == other_crops[key] for key in shared) <= 2


def test_all_crops_are_equally_likely() -> None:
    """81,000 draws: 500 of each crop. With 161 degrees of freedom, chi^2 is below 240 in all but
    0.01 % of the cases."""
    keys = np.arange(81).reshape(1, 81)
    positions = np.tile(np.arange(1000), (1, 81, 1))
    counts = np.bincount(crop_numbers(keys, positions).ravel(), minlength=NUM_CROPS)
    assert len(counts) == NUM_CROPS
    assert ((counts - 500) ** 2 / 500).sum() < 240


def test_joined_and_cut_schedules_keep_each_clients_crops() -> None:
    positions = [np.arange(9), np.arange(9, 14)]
    ids = np.array([0, 1])
    whole = make_schedule(positions, WORK, Streams(0), 1, ids, 0.1, dropout=False, augmented=True)
    parts = [whole.rows(slice(0, 1)), whole.rows(slice(1, 2))]
    joined = concatenate_schedules(parts)
    assert whole.crops is not None
    assert joined.crops is not None
    mask = whole.mask
    assert np.array_equal(joined.crops[mask], whole.crops[mask])


@pytest.mark.parametrize("model", [linear, convolutional])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "native"])
def test_engines_agree_on_augmented_images(backend: str, model: Callable[[], nn.Module]) -> None:
    if backend == "differentiated" and model is convolutional:
        return  # this engine is for chains of linear layers
    task = (model(), augmented([7, 1, 13]), WORK, OPTIMIZERS["sgd"], Streams(3))
    assert_engines_equal(BACKENDS[backend](*task), reference(*task), np.arange(3))


def test_training_is_that_on_images_that_were_cropped_before() -> None:
    """One step on all samples of a client."""
    data = augmented([6])
    work = LocalWork(epochs=1, steps=None, batch_size=6)
    task = (work, OPTIMIZERS["sgd"], Streams(3))
    model = linear()
    schedule = make_schedule(
        data.train, work, Streams(3), 2, np.array([0]), 0.1, dropout=False, augmented=True
    )
    assert schedule.crops is not None
    order = schedule.positions[0, 0]
    cropped = data.x.clone()
    cropped[order] = CropFlip(GREY)(data.x[order], torch.as_tensor(schedule.crops[0, 0]))
    on_crops = reference(model, replace(data, x=cropped, augment=None), *task)
    assert not torch.equal(cropped, data.x)
    assert_engines_equal(reference(model, data, *task), on_crops, np.array([0]))


def test_only_training_is_augmented() -> None:
    model = linear()
    task = (WORK, OPTIMIZERS["sgd"], Streams(3))
    engine = reference(model, augmented([6, 4]), *task)
    plain = reference(model, images([6, 4]), *task)
    params = initial(model)
    x, y, lists = plain.data.x, plain.data.y, plain.data.train
    assert engine.evaluate(params, x, y) == plain.evaluate(params, x, y)
    assert np.array_equal(engine.losses(params, lists), plain.losses(params, lists))
    gradients = torch.stack(list(engine.client_gradients(params, lists)))
    assert torch.equal(gradients, torch.stack(list(plain.client_gradients(params, lists))))


def test_the_c_engine_declines_and_auto_takes_another() -> None:
    data = augmented([6])
    data = replace(data, x=data.x.float())
    task = (linear().float(), data, WORK, OPTIMIZERS["sgd"], Streams(3))
    with pytest.raises(ConfigError, match=r"does not augment images \(dataset\.augment\)"):
        native(*task)
    assert auto(*task, rounds=10**6).backend.description.startswith("batched")


def test_auto_compares_recorded_steps_with_others_on_augmented_images() -> None:
    model = convolutional()
    task = (WORK, OPTIMIZERS["sgd"], Streams(3))
    other = reference(model, augmented([16]), *task)
    workload = other.workload
    recorded: Any = graph(model, augmented([16]), *task).backend
    assert _disagreement(workload, recorded, other.backend, "float32") is None
    without_crops: Any = graph(model, images([16]), *task).backend
    assert _disagreement(workload, without_crops, other.backend, "float32") is not None


class Images(SampleSource):
    """Images that are made on demand."""

    dtype = torch.float64

    def __init__(self, x: Tensor) -> None:
        super().__init__(len(x), tuple(x.shape[1:]))
        self.x = x

    def rows(self, positions: Ints) -> Tensor:
        return self.x[torch.as_tensor(positions)]


def test_images_made_on_demand_have_the_same_crops() -> None:
    """The buffer numbers samples anew; crops follow the data set's numbers."""
    data = augmented([7, 1, 13])
    in_memory = (linear(), data, WORK, OPTIMIZERS["sgd"], Streams(3))
    on_demand = ClientData.on_demand(Images(data.x), data.y, data.train, data.train, 3)
    on_demand = replace(on_demand, augment=data.augment)
    workload = Workload(in_memory[0], on_demand, OPTIMIZERS["sgd"])

    def build(workload: Workload) -> Backend:
        return ReferenceBackend(workload, precision="float32", workers=1)

    engine = Engine(OnDemandBackend(workload, build), workload, WORK, Streams(3))
    assert_engines_equal(engine, reference(*in_memory), np.array([1, 2]), tolerance=0)


# --- whole runs ----------------------------------------------------------------------------------

WORDS = ("num_rounds=2", "local.epochs=1", "num_clients=6", "cohort_size=2", "tracker=files_only")


def test_augmentation_changes_training_and_selects_the_same_clients(
    fedsim: Run, tmp_path: Path
) -> None:
    assert fedsim("-m", "dataset.augment=null,crop_flip", *WORDS) == 0
    plain, cropped = (without_seconds(folder) for folder in folders(tmp_path))
    assert [record["selected"] for record in plain] == [record["selected"] for record in cropped]
    assert plain[-1]["train_loss"] != cropped[-1]["train_loss"]


def test_augmented_runs_are_the_same_in_lanes(fedsim: Run, tmp_path: Path) -> None:
    words = ("-m", "dataset.augment=crop_flip", "selector=random,round_robin", *WORDS)
    assert fedsim(*words, "hydra/launcher=basic", "output_dir=outputs/in_turn") == 0
    assert fedsim(*words, "hydra/launcher=lanes", "output_dir=outputs/in_lanes") == 0
    in_turn, in_lanes = (
        [
            without_seconds(file.parent)
            for file in sorted(tmp_path.glob(f"outputs/{name}/*/*/summary.json"))
        ]
        for name in ("in_turn", "in_lanes")
    )
    assert len(in_turn) == 2
    assert in_turn == in_lanes


@pytest.mark.parametrize("key", ["dataset.augment", "optimizer.max_grad_norm"])
def test_a_key_that_is_null_changes_no_name_of_a_run(key: str) -> None:
    """Runs of earlier versions, whose configs have no such key, are found."""
    with search_path():
        plan = plan_of()
    group, name = key.split(".")
    earlier = copy.deepcopy(dict(plan.config))
    assert earlier[group].pop(name) is None
    assert hash_config(earlier) == plan.config_hash
    assert hash_config(nest({name: 1.0}, group)) != hash_config(nest({}, group))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dataset=cifar10 model=frozen_features", r"augment='crop_flip': is for models that train"),
        ("dataset=synthetic", r"dataset\.augment: is not a known key"),
        ("dataset=text_generated", r"dataset\.augment: is not a known key"),
    ],
)
def test_samples_that_are_no_images_are_not_augmented(
    fedsim: Run, tmp_path: Path, words: str, message: str
) -> None:
    error = refused(fedsim, tmp_path, *words.split(), "dataset.augment=crop_flip")
    assert re.search(message, error)
