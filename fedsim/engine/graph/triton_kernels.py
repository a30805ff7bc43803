# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Two Triton kernels that make one local step of R stacked chains of linear layers.

`forward`: one program for each client and tile of T samples. It gathers the samples by position, computes all layers,
dropout, softmax cross-entropy and the gradient at the output of every layer ("slopes"), and writes the inputs of the
layers from the second on ("hidden"), the slopes, and the losses.
`update`: one program for each client, layer and block of the layer's inputs. It sums slopes^T inputs over the
client's samples, which is the gradient of that block of the weight, and applies the optimiser to it at once, so that no
gradient is stored. The programs of a layer's first block do the same for its bias.

A program reads and writes what belongs to one client alone, and none of its shapes depends on other clients: tiles and
blocks have fixed sizes, and sums run over the client's own samples in order, without atomic additions. What a client
gets is therefore the same in any company, to the last bit. For the same reason numbers of clients and sizes of batches
are not compiled into the kernels. A client whose count in this step is 0 returns at once.

Why it should be fast (never timed on a card): a step is two launches, where the same step in torch is thirty. Samples
go from the data set to shared memory, asynchronously and ahead of the products that need them, and are never copied to
a batch. Weights are read from the L2 cache, and written once. What goes through memory between the two kernels is one
row of hidden values and slopes for each sample.

Shapes (constant per compilation; tuples have an entry per layer, counted from 0): WIDTHS, the layers' inputs and then
the number of classes; PADDED, the same as powers of 2 from 16 on; WEIGHTS and BIASES, where each layer's tensors begin
in a row of the flat parameters [R, P] (a bias of -1: the layer has none); HIDDEN and SLOPES, where each layer's inputs
and slopes begin in a row of `hidden` [R, B, HIDDEN_WIDTH] and `slopes` [R, B, SLOPES_WIDTH]. Weights are [out, in] as
in torch.nn.Linear: both kernels read them along their inputs, where neighbours in memory are.
"""

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(z):
    """SplitMix64's finaliser on uint64, `fedsim.engine.model.mix`."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _dropout(z, key, rows, columns, WIDTH: tl.constexpr, SALT: tl.constexpr, FLOOR: tl.constexpr, SCALE: tl.constexpr):
    """Inverted dropout by the key of the client's step: `fedsim.engine.model.dropout_mask`, element by element.

    SALT is the layer's; FLOOR / 2^24 is the rate, below which an element's 24 random bits drop it.
    """
    element = rows.to(tl.uint64)[:, None] * WIDTH + columns.to(tl.uint64)[None, :]
    bits = _mix(_mix(key + SALT) + element * _GOLDEN)
    return z * tl.where((bits >> 40) >= FLOOR, SCALE, 0.0)


@triton.jit
def _weight(own, out, into, OUT: tl.constexpr, IN: tl.constexpr):
    """Rows `out` and columns `into` of a weight [OUT, IN] that begins at `own`; 0 outside."""
    inside = (out < OUT)[:, None] & (into < IN)[None, :]
    return tl.load(own + out[:, None] * IN + into[None, :], mask=inside, other=0.0)


@triton.jit
def _with_bias(z, own, columns, OUT: tl.constexpr, BIAS: tl.constexpr):
    if BIAS >= 0:
        z += tl.load(own + BIAS + columns, mask=columns < OUT, other=0.0)[None, :]
    return z


@triton.jit
def _first_layer(x, at, live, own, T: tl.constexpr, K: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
                 PAD: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """x W^T [T, PAD] of the samples `at`, K inputs at a time; the loads of later inputs run ahead of the products."""
    out = tl.arange(0, PAD)
    z = tl.zeros((T, PAD), tl.float32)
    for first in range(0, IN, K):
        into = first + tl.arange(0, K)
        inside = live[:, None] & (into < IN)[None, :]
        samples = tl.load(x + at[:, None] * IN + into[None, :], mask=inside, other=0.0)
        weight = _weight(own, out, into, OUT, IN)
        z = tl.dot(samples, tl.trans(weight), z, input_precision=PRECISION)
    return z


@triton.jit
def _cross_entropy(z, label, live, count, columns, CLASSES: tl.constexpr):
    """Losses [T] of logits `z` [T, PAD], and the gradient of their sum / count at the logits, 0 where not `live`."""
    z = tl.where((columns < CLASSES)[None, :], z, -float("inf"))
    z = z - tl.max(z, 1)[:, None]
    powers = tl.exp(z)
    total = tl.sum(powers, 1)
    hit = columns[None, :] == label[:, None]
    losses = tl.log(total) - tl.sum(tl.where(hit, z, 0.0), 1)
    slopes = (powers / total[:, None] - tl.where(hit, 1.0, 0.0)) / count.to(tl.float32)
    return losses, tl.where(live[:, None], slopes, 0.0)


@triton.jit(do_not_specialize=["R", "B", "stride"])
def forward(x, y, positions, counts, keys, step, flat, hidden, slopes, losses, R, B, P, stride,
            WIDTHS: tl.constexpr, PADDED: tl.constexpr, WEIGHTS: tl.constexpr, BIASES: tl.constexpr,
            HIDDEN: tl.constexpr, HIDDEN_WIDTH: tl.constexpr, SLOPES: tl.constexpr, SLOPES_WIDTH: tl.constexpr,
            SALTS: tl.constexpr, FLOORS: tl.constexpr, SCALES: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """Grid (R, ceil(B / T)).

    `x` [n, D] and `y` [n] are the samples. Of the tables' row `step` [1], `stride` 32-bit words from that before it:
    `positions` [R, B], `counts` [R], `keys` [R]. `flat` [R, P]: the parameters. The valid ones of `losses` [S, R, B]
    are written.
    """
    LAYERS: tl.constexpr = len(BIASES)
    r, tile = tl.program_id(0), tl.program_id(1)
    s = tl.load(step)
    count = tl.load(counts + s * stride + r)
    if tile * T >= count:
        return
    rows = tile * T + tl.arange(0, T)
    live = rows < count
    at = tl.load(positions + s * stride + r * B + rows, mask=live, other=0).to(tl.int64)
    label = tl.load(y + at, mask=live, other=0)
    key = tl.load(keys + s * (stride // 2) + r).to(tl.uint64, bitcast=True)
    own = flat + r.to(tl.int64) * P
    own_rows = (r * B + rows).to(tl.int64)

    z = _first_layer(x, at, live, own + WEIGHTS[0], T, K, WIDTHS[0], WIDTHS[1], PADDED[1], PRECISION)
    z = _with_bias(z, own, tl.arange(0, PADDED[1]), WIDTHS[1], BIASES[0])
    inputs = (z,)
    for layer in tl.static_range(1, LAYERS):
        into, out = tl.arange(0, PADDED[layer]), tl.arange(0, PADDED[layer + 1])
        if FLOORS[layer - 1] > 0:
            z = _dropout(z, key, rows, into, WIDTHS[layer], SALTS[layer - 1], FLOORS[layer - 1], SCALES[layer - 1])
        z = tl.where(z <= 0, 0.0, z)  # NaN stays NaN
        inputs = inputs + (z,)  # noqa: RUF005  Triton knows no starred expressions
        here = hidden + own_rows[:, None] * HIDDEN_WIDTH + (HIDDEN[layer] + into)[None, :]
        tl.store(here, z, mask=live[:, None])
        weight = _weight(own + WEIGHTS[layer], out, into, WIDTHS[layer + 1], WIDTHS[layer])
        z = tl.dot(z, tl.trans(weight), input_precision=PRECISION)
        z = _with_bias(z, own, out, WIDTHS[layer + 1], BIASES[layer])

    columns = tl.arange(0, PADDED[LAYERS])
    loss, d = _cross_entropy(z, label, live, count, columns, WIDTHS[LAYERS])
    tl.store(losses + (s * R + r) * B + rows, loss, mask=live)
    there = slopes + own_rows[:, None] * SLOPES_WIDTH
    tl.store(there + (SLOPES[LAYERS - 1] + columns)[None, :], d, mask=live[:, None])
    for layer in tl.static_range(LAYERS - 1, 0, -1):
        into, out = tl.arange(0, PADDED[layer]), tl.arange(0, PADDED[layer + 1])
        weight = _weight(own + WEIGHTS[layer], out, into, WIDTHS[layer + 1], WIDTHS[layer])
        d = tl.dot(d, weight, input_precision=PRECISION)
        if FLOORS[layer - 1] > 0:
            d *= SCALES[layer - 1]  # an input is positive only where its dropout kept it
        d = tl.where(inputs[layer] <= 0, 0.0, d)
        tl.store(there + (SLOPES[layer - 1] + into)[None, :], d, mask=live[:, None])


@triton.jit
def _optimise(flat, first, second, at, inside, g, scalars, rates, RULE: tl.constexpr):
    """One step of the optimiser on the parameters `at`, and on their state, with gradient `g`.

    The rules of `fedsim.engine.graph.optimizers`, where `scalars` are from; RULE is sgd, momentum, nesterov, adam or
    adamw.
    """
    decay, beta1, fresh1, beta2, fresh2, eps = rates  # fresh: 1 - beta; beta1: also the momentum
    w = tl.load(flat + at, mask=inside, other=0.0)
    if RULE == "adam" or RULE == "adamw":
        rate, correction, keep = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
        if RULE == "adamw":
            w *= keep
        else:
            g += decay * w
        m = tl.load(first + at, mask=inside, other=0.0)
        m += fresh1 * (g - m)
        v = beta2 * tl.load(second + at, mask=inside, other=0.0) + fresh2 * g * g
        tl.store(first + at, m, mask=inside)
        tl.store(second + at, v, mask=inside)
        w -= rate * tl.div_rn(m, tl.sqrt_rn(tl.div_rn(v, correction)) + eps)
    elif RULE == "sgd":
        rate, keep = tl.load(scalars), tl.load(scalars + 1)
        w = keep * w - rate * g
    else:
        g += decay * w
        m = beta1 * tl.load(first + at, mask=inside, other=0.0) + g
        tl.store(first + at, m, mask=inside)
        w -= tl.load(scalars) * (g + beta1 * m if RULE == "nesterov" else m)
    tl.store(flat + at, w, mask=inside)


@triton.jit(do_not_specialize=["R", "B", "stride"])
def update(x, positions, counts, scalars, step, flat, first, second, hidden, slopes, R, B, P, stride,
           decay, beta1, fresh1, beta2, fresh2, eps,
           WIDTHS: tl.constexpr, PADDED: tl.constexpr, WEIGHTS: tl.constexpr, BIASES: tl.constexpr,
           HIDDEN: tl.constexpr, HIDDEN_WIDTH: tl.constexpr, SLOPES: tl.constexpr, SLOPES_WIDTH: tl.constexpr,
           BLOCKS: tl.constexpr, SIZES: tl.constexpr, RULE: tl.constexpr, T: tl.constexpr,
           PRECISION: tl.constexpr):  # fmt: skip
    """Grid (R, BLOCKS[-1]): layer l has blocks of SIZES[l] inputs, and BLOCKS[l] is the number of blocks before it.

    `first` and `second` [R, P] are the optimiser's state (None where the rule has none), `scalars` [C] its numbers in
    the tables' row; the rest is as for `forward`. The sum over samples runs in tiles of T.
    """
    r, block = tl.program_id(0), tl.program_id(1)
    s = tl.load(step)
    count = tl.load(counts + s * stride + r)
    if count == 0:
        return
    rates = (decay, beta1, fresh1, beta2, fresh2, eps)
    own = r.to(tl.int64) * P
    for layer in tl.static_range(0, len(BIASES)):
        if (block >= BLOCKS[layer]) & (block < BLOCKS[layer + 1]):
            out = tl.arange(0, PADDED[layer + 1])
            into = (block - BLOCKS[layer]) * SIZES[layer] + tl.arange(0, SIZES[layer])
            inside = (into < WIDTHS[layer])[None, :]
            g = tl.zeros((PADDED[layer + 1], SIZES[layer]), tl.float32)
            g_bias = tl.zeros((PADDED[layer + 1],), tl.float32)
            for begin in range(0, count, T):
                rows = begin + tl.arange(0, T)
                live = (rows < count)[:, None]
                own_rows = (r * B + rows).to(tl.int64)[:, None]
                d = tl.load(slopes + own_rows * SLOPES_WIDTH + (SLOPES[layer] + out)[None, :], mask=live, other=0.0)
                if layer == 0:
                    at = tl.load(positions + s * stride + r * B + rows, mask=rows < count, other=0).to(tl.int64)
                    given = tl.load(x + at[:, None] * WIDTHS[0] + into[None, :], mask=live & inside, other=0.0)
                else:
                    given = tl.load(hidden + own_rows * HIDDEN_WIDTH + (HIDDEN[layer] + into)[None, :],
                                    mask=live & inside, other=0.0)  # fmt: skip
                g = tl.dot(tl.trans(d), given, g, input_precision=PRECISION)
                g_bias += tl.sum(d, 0)
            at_w = own + WEIGHTS[layer] + out[:, None] * WIDTHS[layer] + into[None, :]
            valid = (out < WIDTHS[layer + 1])[:, None] & inside
            _optimise(flat, first, second, at_w, valid, g, scalars + s * stride, rates, RULE)
            if BIASES[layer] >= 0 and block == BLOCKS[layer]:
                at_b, valid_b = own + BIASES[layer] + out, out < WIDTHS[layer + 1]
                _optimise(flat, first, second, at_b, valid_b, g_bias, scalars + s * stride, rates, RULE)
