"""Models that predict the token after a text: recurrent, multilayer perceptron and transformer.

A token is the number of a character or word. Shapes: b texts.
"""

import math

import torch
from torch import Tensor, nn

from fedsim.core.errors import at_least, between, check, rule
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
        check(
            at_least("embedding", embedding, 1),
            at_least("hidden", hidden, 1),
            too_many_parameters("embedding", embedding, [vocabulary, embedding]),
            too_many_parameters("hidden", hidden, [embedding + hidden, 3 * hidden]),
            too_many_parameters("hidden", hidden, [hidden, num_classes]),
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


class TextTransformer(nn.Module):
    """A transformer encoder (Vaswani et al. 2017) with the norm before each part of a layer.

    Tokens and positions have embeddings of `embedding` values. Each of `layers` layers has
    attention of `heads` heads, and two linear layers with `hidden` units and GELU between them. A
    linear layer on the last token's values gives the logits. `dropout` follows the sum of the
    embeddings and each part of a layer.
    """

    def __init__(
        self,
        input_shape: Shape,
        num_classes: int,
        *,
        embedding: int,
        layers: int,
        heads: int,
        hidden: int,
        dropout: float,
    ) -> None:
        super().__init__()
        shape = require_text(input_shape, "model=text_transformer")
        divides = heads >= 1 and embedding % heads == 0
        check(
            at_least("embedding", embedding, 1),
            at_least("layers", layers, 1),
            at_least("hidden", hidden, 1),
            rule(divides, "heads", heads, f"must divide embedding={embedding}"),
            between("dropout", dropout, 0, 1, open_high=True),
            too_many_parameters("embedding", embedding, [shape.vocabulary, embedding]),
            # the linear layers of all blocks, side by side
            too_many_parameters("embedding", embedding, [embedding, 4 * embedding * layers]),
            too_many_parameters("hidden", hidden, [embedding, hidden * layers, embedding]),
        )
        self.embedding = nn.Embedding(shape.vocabulary, embedding)
        self.positions = nn.Parameter(torch.randn(shape[0], embedding))
        self.dropout = nn.Dropout(dropout)
        blocks = [_Block(embedding, heads, hidden, dropout) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(embedding)
        self.output = nn.Linear(embedding, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [b, num_classes] for texts [b, length]."""
        x = self.dropout(self.embedding(tokens) + self.positions)
        return self.output(self.norm(self.blocks(x)[:, -1]))


class _Block(nn.Module):
    """A layer of torch.nn.TransformerEncoderLayer (norm_first) in operations that vmap knows."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.to_heads = nn.Linear(width, 3 * width)
        self.from_heads = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return values [b, length, width] for values of this shape."""
        x = x + self.dropout(self._attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))

    def _attention(self, x: Tensor) -> Tensor:
        """Return the sum of values by the softmax of scaled products, for each head and token."""
        parts = self.to_heads(x).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [b, heads, length, width / heads]
        products = query @ key.mT / math.sqrt(query.shape[-1])
        return self.from_heads((products.softmax(3) @ value).transpose(1, 2).flatten(2))
