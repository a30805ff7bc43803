"""A Grid of Flower without processes: messages go through bytes to a client app in this process."""

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

# Flower's processes know their task, and messages take their ids from it.
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
logging.getLogger("flwr").setLevel(logging.ERROR)


class LocalGrid(Grid):
    """A Grid whose node 1000 + k runs `app` for client k."""

    def __init__(self, app: ClientApp, clients: Iterable[int]) -> None:
        self.app = app
        self.contexts = {1000 + client: context_of(1000 + client, client) for client in clients}
        self.num_messages: dict[str, int] = {}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Sequence[Message]:
        replies = []
        for number, message in enumerate(messages):
            kind = message.metadata.message_type
            self.num_messages[kind] = self.num_messages.get(kind, 0) + 1
            message.metadata.__dict__["_message_id"] = f"message {number}"
            context = self.contexts[message.metadata.dst_node_id]
            replies.append(through_bytes(self.app(through_bytes(message), context)))
        return replies[::-1]  # replies come in any order

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def set_run(self, run: Any) -> None: ...
    @property
    def run(self) -> Any: ...
    def create_message(self, *args: Any, **kwargs: Any) -> Any: ...
    def push_messages(self, messages: Any) -> Any: ...
    def pull_messages(self, message_ids: Any) -> Any: ...


def context_of(node: int, client: int) -> Context:
    return Context(1, node, {"partition-id": client}, RecordDict(), {})


def through_bytes(message: Message) -> Message:
    """The message as it arrives over a network."""
    return message_from_proto(
        MessageProto.FromString(message_to_proto(message).SerializeToString())
    )
