"""SecAgg+ in a deployment: the server learns the weighted sum of the updates, but no single update.

Flower implements the protocol (Bell et al. 2020, "Secure Single-Server Aggregation with (Poly)
Logarithmic Overhead") as a workflow at the server and a *mod*, that is middleware, in the client's
app. This module connects both to fedsim:

- The message to each client holds `scale`, which is the client's weight divided by the largest
  weight of the round. The client multiplies its update by it, so that no factor exceeds 1.
- Each client masks its scaled update. In the sum, the masks that pairs of clients share cancel. The
  server removes the others with the help of the clients that are still there. If a client drops
  out, these clients also reveal what removes its shared masks. The sum is then over the others.

SecAgg+ works with integers. With Flower's defaults, values of the scaled update are clipped to
[-8, 8], and rounded to one of the next multiples of 4e-6 at random, without bias.
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
from fedsim.flower.nodes import LOG, Nodes

MAX_CLIENTS = 1000
"""Maximum number of clients of a sum. With Flower's defaults, sums are computed modulo 1024 times
the largest value of a client, so 1000 clients cannot overflow."""


class SecureSum(SecAggPlusWorkflow):
    """One round of SecAgg+, which sums the updates of some clients.

    The workflow of Flower is made for a strategy of Flower's own, which this object replaces:

    1. `setup_stage` asks `configure_fit` for the clients and their messages. It gets placeholders,
       in whose place it then puts fedsim's messages (`content_of`).
    2. The other stages send the messages, collect masked updates and unmask their sum.
    3. `unmask_stage` gives `aggregate_fit` the results of the clients. Flower has put the mean of
       all updates into each of them. `collect` turns the mean into a sum.

    Two thirds of the clients must stay until the end.
    """

    def __init__(self, nodes: Nodes, round: int, contents: Mapping[int, RecordDict]) -> None:
        """`contents` has the content of the message to each client, by its id. It includes a
        `scale`."""
        # shares of all clients, of which two thirds reconstruct a mask; weights are in `scale`
        super().__init__(1.0, 2 / 3, max_weight=1.0, timeout=nodes.timeout)
        self.nodes = nodes
        self.round = round
        self.client_of = {nodes.node_of[client]: client for client in contents}
        self.content_of = {node: contents[client] for node, client in self.client_of.items()}
        self._results: list[Any] = []

    def collect(self, like: Params) -> tuple[Params, list[int]]:
        """Run the protocol. Return the sum of the scaled updates and the ids of its clients.

        The tensors of the sum have the names, shapes, types and devices of those of `like`. Returns
        ({}, []) if there is a single client, whose sum would be its update, if fewer than two
        thirds of the clients answer in some stage, or if an answer cannot be read.
        """
        if len(self.content_of) < 2:
            text = "no secure sum in round %d: it needs two clients, and %d could be asked"
            LOG.warning(text, self.round, len(self.content_of))
            return {}, []
        config = ConfigRecord({Key.CURRENT_ROUND: self.round})
        # The workflow insists on parameters. Those of fedsim are in `content_of`.
        main_records = RecordDict({MAIN_CONFIGS_RECORD: config, MAIN_PARAMS_RECORD: ArrayRecord()})
        context: Any = SimpleNamespace(state=main_records, strategy=self, client_manager=self)
        workflow_state = WorkflowState()
        stages = (
            self.setup_stage,
            self.share_keys_stage,
            self.collect_masked_vectors_stage,
            self.unmask_stage,
        )
        grid: Any = self.nodes  # they have the methods of Flower's grid, and count the bytes
        for stage in stages:
            try:
                if not stage(grid, context, workflow_state):
                    return {}, []
            except Exception as error:  # an answer may hold anything
                LOG.warning("no secure sum in round %d: %s", self.round, error)
                return {}, []
        clients = [self.client_of[proxy.node_id] for proxy, _ in self._results]
        if not clients:
            return {}, []
        means = to_ndarrays(self._results[0][1].parameters)
        total = {}
        # `to_mask` sends the arrays in the order of their names. Each client counts as one example,
        # so the mean times the number of clients is the sum.
        for name, mean in zip(sorted(like), means, strict=True):
            values = torch.from_numpy(mean * len(clients))
            total[name] = values.to(like[name]).reshape(like[name].shape)
        return total, clients

    def setup_stage(self, grid: Any, context: Any, state: WorkflowState) -> bool:
        """Begin the protocol, and put fedsim's messages in the place of the placeholders. They are
        sent in a later stage. Return whether enough clients take part."""
        is_ready: bool = super().setup_stage(grid, context, state)
        state.nid_to_fitins = dict(self.content_of)
        return is_ready

    def configure_fit(self, *_: Any) -> list[tuple[Any, FitIns]]:
        """Return the nodes that take part, each with a placeholder of its message."""
        placeholder = FitIns(Parameters([], ""), {})
        return [(SimpleNamespace(node_id=node), placeholder) for node in self.content_of]

    def aggregate_fit(self, round: int, results: list[Any], failures: Any) -> tuple[None, Any]:
        """Keep the results of the clients. Each has the mean of all updates as its parameters."""
        self._results = results
        return None, {}

    def num_available(self) -> int:
        """Return the number of connected clients, which Flower logs."""
        return len(self.nodes.node_of)


def is_of_secagg(message: Message) -> bool:
    """Return whether a message belongs to SecAgg+."""
    return RECORD_KEY_CONFIGS in message.content.config_records


def secagg_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Handle the messages of SecAgg+ by Flower's own mod, and pass on all others. This is a mod for
    client apps."""
    if is_of_secagg(message):
        return secaggplus_mod(message, context, call_next)
    return call_next(message, context)


def to_mask(update: Params, scale: float) -> RecordDict:
    """Return an update times `scale` as an answer that Flower's mod can mask.

    Raises `FedsimError` if a value is nan or infinite.
    """
    arrays = []
    for name in sorted(update):
        # Flower masks an array without dimensions wrongly.
        values = np.atleast_1d(update[name].cpu().numpy().astype(np.float64)) * scale
        if not np.isfinite(values).all():
            raise FedsimError(f"the update of {name} holds a nan or infinity")
        arrays.append(values)
    parameters = ndarrays_to_parameters(arrays)
    # one example each: the weight is in `scale`
    answer = FitRes(Status(Code.OK, ""), parameters, num_examples=1, metrics={})
    return fitres_to_recorddict(answer, keep_input=False)
