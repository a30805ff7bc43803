"""The nodes of a Grid on which clients run: who is connected, and questions to them.

A node that dies, is late, fails or has other data than before has the answer None. A node that
comes back may have another id, so new nodes are asked who they are.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.core.errors import FedsimError
from fedsim.flower.messages import ABOUT, FACTS, num_bytes

LOG = logging.getLogger("flwr")
POLL_SECONDS = 0.5
"""The time between two looks at who is connected."""
Answers = list[RecordDict | None]


@dataclass
class Nodes:
    """The nodes of the N = `num_clients` clients of a run.

    `timeout` is the time [s] that the server waits for the answers to a question. `asks_labels`:
    clients are asked for their number of samples of each class.
    """

    grid: Grid
    num_clients: int
    timeout: float
    asks_labels: bool
    facts: dict[int, Any] = field(default_factory=dict)
    """The facts that each client has sent about itself, by client."""
    node_of: dict[int, int] = field(default_factory=dict)
    """The connected node of each client, by client."""
    bytes_down: int = 0
    bytes_up: int = 0
    """Bytes that have crossed the network: the records of messages, without envelopes."""

    def __post_init__(self) -> None:
        self._known: set[int] = set()
        """Connected nodes that have said who they are."""

    def wait_for_all(self) -> None:
        """Wait until all clients are connected. Raises `FedsimError` after `timeout`."""
        if not self._wait_for(self.num_clients):
            missing = sorted(set(range(self.num_clients)) - set(self.node_of))
            fault = f"after {self.timeout:g} s no node is connected for the clients {missing}"
            remedy = "start nodes with these numbers as partition-id, or lower num_clients"
            raise FedsimError(f"num_clients={self.num_clients}: {fault}; {remedy}")

    def wait_for_any(self) -> None:
        """Wait until a client is connected. Raises `FedsimError` after `timeout`."""
        if not self._wait_for(1):
            text = f"for {self.timeout:g} s no node has been connected"
            raise FedsimError(f"{text}; start the nodes, and the same run resumes")

    def _wait_for(self, count: int) -> bool:
        """Wait until `count` clients are connected, at most `timeout` seconds. Return whether they
        are."""
        end = time.monotonic() + self.timeout
        self.refresh()
        while len(self.node_of) < count and time.monotonic() <= end:
            time.sleep(POLL_SECONDS)
            self.refresh()
        return len(self.node_of) >= count

    def refresh(self) -> None:
        """Find out which clients are connected now, and ask new nodes who they are."""
        connected = set(self.grid.get_node_ids())
        self.node_of = {client: node for client, node in self.node_of.items() if node in connected}
        self._known &= connected
        new = sorted(connected - self._known)
        request = RecordDict({"request": ConfigRecord({"labels": self.asks_labels})})
        answers = self._exchange(new, ABOUT, [request] * len(new))
        for node, answer in zip(new, answers, strict=True):
            if answer is None:
                continue
            self._known.add(node)
            facts: dict[str, Any] = dict(answer.config_records.get("facts", ConfigRecord()))
            client: Any = facts.get("client")
            is_client = isinstance(client, int) and 0 <= client < self.num_clients
            is_client = is_client and all(name in facts for name in FACTS)
            if is_client and self.facts.setdefault(client, facts) == facts:
                self.node_of[client] = node
            else:
                text = "node %d is ignored: it is no client of this run, or has other data: %s"
                LOG.warning(text, node, facts)

    def ask(self, clients: Sequence[int], kind: str, contents: Sequence[RecordDict]) -> Answers:
        """Send each client a message of the type `kind`, and return the answers in this order."""
        rows = [row for row, client in enumerate(clients) if client in self.node_of]
        nodes = [self.node_of[clients[row]] for row in rows]
        answers: Answers = [None] * len(clients)
        received = self._exchange(nodes, kind, [contents[row] for row in rows])
        for row, answer in zip(rows, received, strict=True):
            answers[row] = answer
        return answers

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None
    ) -> Iterable[Message]:
        """Send messages, and return the first reply to each. Counts the bytes of all."""
        messages = list(messages)
        for message in messages:
            self.bytes_down += num_bytes(message.content)
        first_replies: dict[str, Message] = {}
        for reply in self.grid.send_and_receive(messages, timeout=timeout):
            if reply.has_content():
                self.bytes_up += num_bytes(reply.content)
            # A second reply to a message counts for nothing.
            first_replies.setdefault(reply.metadata.reply_to_message_id, reply)
        return list(first_replies.values())

    def _exchange(self, nodes: Sequence[int], kind: str, contents: Sequence[RecordDict]) -> Answers:
        """Send messages to nodes, and return the answers that come in time."""
        messages = []
        for node, content in zip(nodes, contents, strict=True):
            messages.append(Message(content, node, kind))
        answers: dict[str, RecordDict] = {}
        replies = self.send_and_receive(messages, timeout=self.timeout) if messages else []
        for reply in replies:
            if reply.has_error():
                LOG.warning("node %d: %s", reply.metadata.src_node_id, reply.error.reason)
                continue
            answers[reply.metadata.reply_to_message_id] = reply.content  # they come in any order
        return [answers.get(message.metadata.message_id) for message in messages]
