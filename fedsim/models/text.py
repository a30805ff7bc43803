"""Models that predict the token after a text: a recurrent network and a multilayer perceptron.

A token is the number of a character or word. Shapes: b texts.
"""

import torch
from torch import Tensor, nn

from fedsim.core.errors import at_least, check
from fedsim.models.shapes import Shape, require_text, too_many_parameters


class TextGRU(nn.Module):
    """Embeddings, a gated recurrent unit (GRU), and a linear layer on its last state.

    `embedding` is the number of values that stand for a token, `hidden` the number of values of the
    state. The unit is `torch.nn.GRU`'s (Cho et al. 2014), in plain operations, which the engine can
    run for several clients at once.
    """

    def __init__(
        self, input_shape: Shape, num_classes: int, *, embedding: int, hidden: int
    ) -> None:
        super().__init__()
        vocabulary = require_text(input_shape, "model=text_gru").vocabulary
        widths = [max(hidden, embedding), 3 * hidden, num_classes]
        check(
            at_least("embedding", embedding, 1),
            at_least("hidden", hidden, 1),
            too_many_parameters("embedding", embedding, [vocabulary, embedding]),
            too_many_parameters("hidden", hidden, widths),
        )
        self.hidden = hidden
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.from_input = nn.Linear(embedding, 3 * hidden)
        self.from_state = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [b, num_classes] for texts [b, length]."""
        inputs = self.from_input(self.embedding(tokens))
        num_gates = 2 * self.hidden  # the first columns: the reset gates, then the update gates
        state = inputs.new_zeros(inputs.shape[0], self.hidden)
        for token_input in inputs.unbind(1):
            from_state = self.from_state(state)
            gates = torch.sigmoid(token_input[:, :num_gates] + from_state[:, :num_gates])
            reset, update = gates.chunk(2, 1)
            candidate = torch.tanh(token_input[:, num_gates:] + reset * from_state[:, num_gates:])
            state = candidate + update * (state - candidate)
        return self.output(state)


class TextMLP(nn.Module):
    """Concatenated embeddings, a hidden layer with ReLU, and a linear layer.

    `embedding` is the number of values of a token, `hidden` the width of the hidden layer. It is
    the network of Bengio et al. 2003 ("A neural probabilistic language model", Eq. 1) without its
    direct connections, and with ReLU in place of tanh.
    """

    def __init__(
        self, input_shape: Shape, num_classes: int, *, embedding: int, hidden: int
    ) -> None:
        super().__init__()
        shape = require_text(input_shape, "model=text_mlp")
        width = shape[0] * embedding
        check(
            at_least("embedding", embedding, 1),
            at_least("hidden", hidden, 1),
            too_many_parameters("embedding", embedding, [shape.vocabulary, embedding]),
            too_many_parameters("hidden", hidden, [width, hidden, num_classes]),
        )
        self.embedding = nn.Embedding(shape.vocabulary, embedding)
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [b, num_classes] for texts [b, length]."""
        return self.layers(self.embedding(tokens).flatten(1))
