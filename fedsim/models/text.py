import torch
from torch import Tensor, nn

from fedsim.core.errors import at_least, check
from fedsim.models.shapes import Shape, require_text, too_many_parameters


class TextGRU(nn.Module):
    """Embeddings of `embedding` numbers a token, a gated recurrent unit of `hidden` units, a linear
    layer on its state.

    The unit is `torch.nn.GRU`'s (Cho et al. 2014) in plain operations, which run for several
    clients at once.
    """

    def __init__(
        self, input_shape: Shape, num_classes: int, *, embedding: int, hidden: int
    ) -> None:
        super().__init__()
        shape = require_text(input_shape, "model=text_gru")
        check(
            at_least("embedding", embedding, 1),
            at_least("hidden", hidden, 1),
            too_many_parameters("embedding", embedding, [shape.vocabulary, embedding]),
            too_many_parameters(
                "hidden", hidden, [max(hidden, embedding), 3 * hidden, num_classes]
            ),
        )
        self.hidden = hidden
        self.embedding = nn.Embedding(shape.vocabulary, embedding)
        self.from_input = nn.Linear(embedding, 3 * hidden)
        self.from_state = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [b, num_classes] of texts [b, length]."""
        inputs = self.from_input(self.embedding(tokens))
        state = inputs.new_zeros(inputs.shape[0], self.hidden)
        for given in inputs.unbind(1):
            of_state = self.from_state(state)
            gates = torch.sigmoid(given[:, : 2 * self.hidden] + of_state[:, : 2 * self.hidden])
            reset, update = gates.chunk(2, 1)
            new = torch.tanh(given[:, 2 * self.hidden :] + reset * of_state[:, 2 * self.hidden :])
            state = new + update * (state - new)
        return self.output(state)


class TextMLP(nn.Module):
    """Embeddings of `embedding` numbers a token, side by side, a hidden layer of `hidden` units
    with ReLU, a last one.

    The network of Bengio et al. 2003 ("A neural probabilistic language model", Eq. 1) without its
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
        return self.layers(self.embedding(tokens).flatten(1))
