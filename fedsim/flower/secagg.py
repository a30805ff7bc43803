"""SecAgg+ in a deployment: the server learns a weighted sum of updates, and no single one.

Flower runs the protocol (Bell et al. 2020, "Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead"): its workflow at the server, and its mod at the clients. Each client multiplies its
update by the `scale` of its question, which is its weight divided by the largest one. The masked
vectors of all clients add up to the sum. If nodes die meanwhile, the others reveal what takes their
masks out of it, and the sum is that of the others.

SecAgg+ works with integers. Numbers are cut to [-8, 8] and rounded at random to multiples of 4e-6.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters
from flwr.common import parameters_to_ndarrays as to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState

from fedsim.core.errors import FedsimError
from fedsim.core.types import Params
from fedsim.flower.nodes import Nodes

MAX_CLIENTS = 1000
"""The most clients whose sum cannot overflow: the modulus of SecAgg+ is 1024 times its range."""


class SecureSum(SecAggPlusWorkflow):
    """The sum over some clients in one round. To open a mask takes two thirds of them."""

    def __init__(self, nodes: Nodes, round: int, contents: Mapping[int, RecordDict]) -> None:
        """`contents` are the questions to the clients, by client. Each has a `scale`."""
        super().__init__(1.0, 2 / 3, max_weight=1.0, timeout=nodes.timeout)
        self.nodes = nodes
        self.round = round
        self.client_of = {nodes.node_of[client]: client for client in contents}
        self.contents = {node: contents[client] for node, client in self.client_of.items()}
        self._results: list[Any] = []

    def collect(self, like: Params) -> tuple[Params, list[int]]:
        """Return the sum of the scaled updates, with the form of `like`, and the clients in it.

        The protocol stops if fewer clients than needed answer: the sum is then {}, of no client.
        """
        config = ConfigRecord({Key.CURRENT_ROUND: self.round})
        state = RecordDict({MAIN_CONFIGS_RECORD: config, MAIN_PARAMS_RECORD: ArrayRecord()})
        # what the workflow uses of Flower's older strategies: this object takes their place
        context: Any = SimpleNamespace(state=state, strategy=self, client_manager=self)
        work = WorkflowState()
        steps = (
            self.setup_stage,
            self.share_keys_stage,
            self.collect_masked_vectors_stage,
            self.unmask_stage,
        )
        grid: Any = self.nodes  # they count the bytes
        for step in steps:
            if not step(grid, context, work):
                return {}, []
        clients = [self.client_of[proxy.node_id] for proxy, _ in self._results]
        if not clients:
            return {}, []
        means = to_ndarrays(self._results[0][1].parameters)
        total = {}
        for name, mean in zip(sorted(like), means, strict=True):
            values = torch.from_numpy(mean * len(clients))
            total[name] = values.to(like[name]).reshape(like[name].shape)
        return total, clients

    def setup_stage(self, grid: Any, context: Any, state: WorkflowState) -> bool:
        """Begin the protocol, and put fedsim's questions in the place of Flower's."""
        is_ready: bool = super().setup_stage(grid, context, state)
        state.nid_to_fitins = dict(self.contents)
        return is_ready

    def configure_fit(self, *_: Any) -> list[tuple[Any, FitIns]]:
        """Return the nodes that take part, and questions that `setup_stage` replaces."""
        nothing = FitIns(Parameters([], ""), {})
        return [(SimpleNamespace(node_id=node), nothing) for node in self.contents]

    def aggregate_fit(self, round: int, results: list[Any], failures: Any) -> tuple[None, Any]:
        """Keep the results, all of which have the mean as their parameters."""
        self._results = results
        return None, {}

    def num_available(self) -> int:
        """Return the number of connected clients, for Flower's log."""
        return len(self.nodes.node_of)


def is_secure(message: Message) -> bool:
    """Return whether a message belongs to SecAgg+."""
    return RECORD_KEY_CONFIGS in message.content.config_records


def masked_if_asked(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Mask the update if the server asks for a secure sum: a mod of Flower for client apps."""
    if is_secure(message):
        return secaggplus_mod(message, context, call_next)
    return call_next(message, context)


def to_be_masked(update: Params, scale: float) -> RecordDict:
    """Return the answer that Flower's mod masks. Raises `FedsimError` if the update is not
    finite."""
    arrays = []
    for name in sorted(update):
        values = update[name].cpu().numpy().astype(np.float64) * scale
        if not np.isfinite(values).all():
            raise FedsimError(f"the update of {name} holds a nan or infinity")
        arrays.append(values)
    parameters = ndarrays_to_parameters(arrays)
    answer = FitRes(Status(Code.OK, ""), parameters, num_examples=1, metrics={})
    return fitres_to_recorddict(answer, keep_input=False)
