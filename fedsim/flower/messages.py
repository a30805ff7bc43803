"""The messages between the server and its nodes, and the work that they describe.

A question holds `request`, and mostly the `model`. Positions are numbers of a client's own samples;
without any, the question is about all of them. The answer holds `facts`, or `numbers` and `arrays`.

| type | the client answers with |
|---|---|
| `query.about` | its number, the number and form of its samples, and what it answers |
| `train` | its update after local training, and its training losses |
| `train.gradients` | the gradient of its mean training loss |
| `evaluate.losses` | the mean loss of the model |
| `evaluate.accuracies` | the share of its samples that the model classifies correctly |
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor, nn

from fedsim.clients.context import Signal
from fedsim.config.build import instantiate
from fedsim.core.errors import FedsimError
from fedsim.core.rng import Streams
from fedsim.core.types import ClientPositions, Params
from fedsim.engine.backend import Backend, Workload
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.model import traveling
from fedsim.engine.optimizers import LocalOptimizer
from fedsim.engine.schedule import LocalWork

ABOUT = "query.about"
FACTS = ("client", "samples", "shape", "classes", "answers", "only_masked", "frozen")
"""Names in the answer to `ABOUT`: the client's number, its number of samples, a sample's shape,
the number of classes (`num_outputs`), the signals that it answers, whether it sends only masked
updates, and `digest_of_frozen`."""
TRAIN = "train"
GRADIENTS = "train.gradients"
LOSSES = "evaluate.losses"
ACCURACIES = "evaluate.accuracies"

ANSWERS: Mapping[str, str] = {
    Signal.LOSSES: "a pass over the client's samples, and one number to the server",
    Signal.ACCURACIES: "a pass over the client's samples, and one number to the server",
    Signal.TRAINING_LOSS: "one number to the server with each update",
    Signal.SQUARED_LOSS: "one number to the server with each update",
    Signal.GRADIENTS: "a pass over the client's samples, and a gradient to the server",
    Signal.LABEL_COUNTS: "the client's number of samples of each class to the server",
}
"""The signals that a client app may answer or not, and what an answer takes."""
TRUSTED = "fedsim.engine."
"""A client makes objects only of classes of this package, whatever the server names."""


def engine_of(work: str, model: nn.Module, x: Tensor, y: Tensor, client: int) -> Engine:
    """Return the engine of a `client` that holds the samples `x` and `y`, and no others.

    `work` describes the local work as JSON: `seed`, `num_classes` and `total_steps` (`Workload`),
    and the config's `local`, `optimizer` and `engine`. Raises `FedsimError` unless all classes in
    it are `TRUSTED`.
    """
    node = json.loads(work, object_hook=_trusted)
    # Random streams depend on the client's number, so the lists of the clients before it are empty.
    sizes = np.zeros(client + 1, np.int64)
    sizes[client] = len(y)
    positions = ClientPositions(np.arange(len(y)), sizes)
    data = ClientData(x, y, positions, positions, node["num_classes"])
    optimizer = instantiate(node["optimizer"], LocalOptimizer, "optimizer")
    workload = Workload(model, data, optimizer, node["total_steps"])
    backend = instantiate(node["engine"], Backend, "engine", workload)
    local = node["local"]
    partial = (local.get("partial_rate") or 0.0, local.get("partial_draw") == "client")
    local_work = LocalWork(local["epochs"], local["steps"], local["batch_size"], *partial)
    return Engine(backend, workload, local_work, Streams(node["seed"]))


def num_outputs(model: nn.Module, x: Tensor) -> int:
    """Return the number of outputs of a model for samples `x` [n, ...]; 0 if there are none.

    It is the number of classes of the task, also if a client has samples of few classes.
    """
    if not len(x):
        return 0
    with torch.no_grad():
        return int(model.to(x.device).eval()(x[:1]).shape[1])


def _trusted(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node of the server's config. Raises `FedsimError` if its class is not trusted."""
    target = node.get("_target_", TRUSTED)
    if not target.startswith(TRUSTED):
        raise FedsimError(f"the server names {target}; clients use only classes of {TRUSTED}*")
    return node


def digest_of_frozen(model: nn.Module) -> str:
    """Return a digest of the saved floating-point tensors of a model that client and server do not
    send each other, such as frozen parameters. They must be equal at both. Integers, such as
    BatchNorm's count of batches, may differ."""
    digest = hashlib.sha256()
    sent = traveling(model)
    for name, tensor in sorted(model.state_dict().items()):
        if name not in sent and tensor.is_floating_point():
            values = tensor.detach().cpu().flatten().view(torch.uint8)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def packed(tensors: Params) -> ArrayRecord:
    """Return tensors as a record of a message."""
    return ArrayRecord({name: Array(value.cpu().numpy()) for name, value in tensors.items()})


def unpacked(content: RecordDict, name: str, device: torch.device) -> Params:
    """Return the tensors of the record `name`, on the `device`; none without such a record."""
    record = content.array_records.get(name, ArrayRecord())
    return {key: torch.tensor(array.numpy(), device=device) for key, array in record.items()}


def num_bytes(content: RecordDict) -> int:
    """Return the bytes of a message's records, without the envelopes of gRPC."""
    total = 0
    for record in content.values():
        total += _config_bytes(record) if isinstance(record, ConfigRecord) else record.count_bytes()
    return total


def _config_bytes(record: ConfigRecord) -> int:
    """Return the bytes of names and values. Flower's own count fails for empty lists and texts."""
    total = 0
    for name, value in record.items():
        total += len(name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str | bytes):
                total += len(item)
            else:
                total += 1 if isinstance(item, bool) else 8
    return total
