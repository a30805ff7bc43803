"""Triton kernels of convolutional networks. One launch computes a layer for all clients.

A convolution is a product of matrices. A row of the left one is a *patch*: the numbers of the input
from which a pixel of the output is computed. Patches are not stored. Kernels load them from where
they lie. A linear layer is a convolution of an image of one pixel, with a kernel of one pixel.

The memory of R clients with batches of B, inputs of H x W pixels with C channels, kernels of S x S
pixels, and outputs of H' x W' pixels (after pooling) with N channels:

    x        [R, B, H, W, C]        pixel (h, w) of the output has the patch of S x S pixels
                  |                 from (h - PADDING, w - PADDING) on
                  v
    weight   [R, (S, S, C), N]      a client's rows lie `params_stride` after those of the last one
                  |
                  v                 With pooling, four products, for the pixels of windows:
    products [R, (B, H', W'), N]    (2h, 2w), (2h, 2w + 1), (2h + 1, 2w), (2h + 1, 2w + 1)
                  |
                  v
    y        [R, B, H', W', N]      maximum of the products, plus bias, ReLU
    winners  [R, B, H', W', N]      uint8: the number of the largest product, 0 to 3
    slopes   [R, B, H'', W'', N]    gradient of the loss with respect to the pixels before pooling:
                                    zero except for winners. Layers whose gradient is computed by
                                    `weight_gradient_of_winners` have slopes [R, B, H', W', N].
    sums     [R, parts, (S, S, C) + 1, N]   gradients of the weight and, in the last row, of the
                                    bias. Each part is the sum over some of the pixels.

Axes in parentheses are one axis. A program computes one tile of a product for one client: the
last axis of the grid. So a client's bits do not depend on other clients. A tile is the product of
[ROWS, DEPTH] and [DEPTH, COLUMNS]. ALIGNED says that each block of numbers of a patch comes from a
single pixel, which makes addresses simple.
"""

import triton
import triton.language as tl


@triton.jit
def add_product(total, left, right, PRECISION: tl.constexpr):
    """Return total + left x right, in bf16 or tf32, or with the accuracy of float32 (tf32x3)."""
    if PRECISION == "bf16":
        return tl.dot(left.to(tl.bfloat16), right.to(tl.bfloat16), total)
    else:
        return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def split_patch(
    first, CHANNELS: tl.constexpr, SIDE: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return row, column and channel of COUNT numbers of a patch, from the number `first` on."""
    if ALIGNED:
        pixel = first // CHANNELS
        channel = tl.multiple_of(first % CHANNELS, COUNT) + tl.arange(0, COUNT)
    else:
        number = first + tl.arange(0, COUNT)
        pixel = number // CHANNELS
        channel = number % CHANNELS
    return pixel // SIDE, pixel % SIDE, channel


@triton.jit
def split_pixel(pixel, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return sample, row and column of pixels."""
    return pixel // (HEIGHT * WIDTH), pixel // WIDTH % HEIGHT, pixel % WIDTH


@triton.jit
def load_patches(
    x,
    sample,
    h,
    w,
    dh,
    dw,
    channel,
    inside,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDING: tl.constexpr,
):
    """Return some numbers of the patches of output pixels (h, w) before pooling."""
    if PADDING:
        h -= PADDING
        w -= PADDING
        hs = h[:, None] + dh
        ws = w[:, None] + dw
        inside = inside & (hs >= 0) & (hs < HEIGHT) & (ws >= 0) & (ws < WIDTH)
    place = ((sample * HEIGHT + h) * WIDTH + w) * CHANNELS
    step = (dh * WIDTH + dw) * CHANNELS + channel
    return tl.load(x + (place[:, None] + step), mask=inside, other=0.0)


@triton.jit
def wins(product, largest):
    """Return where a product takes the place of the largest one so far: nan does, as in PyTorch."""
    return (product > largest) | (product != product)


@triton.jit(do_not_specialize=["num_samples"])
def forward(
    x,
    weight,
    bias,
    y,
    winners,
    params_stride,
    num_samples,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SIDE: tl.constexpr,
    PADDING: tl.constexpr,
    POOL: tl.constexpr,
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write y, and the winners of pooling."""
    STEP: tl.constexpr = 2 if POOL else 1
    PATCH: tl.constexpr = SIDE * SIDE * CHANNELS
    ALIGNED: tl.constexpr = CHANNELS % DEPTH == 0
    client = tl.program_id(2).to(tl.int64)
    num_pixels = num_samples * (OUT_HEIGHT * OUT_WIDTH)
    x += client * num_samples * (HEIGHT * WIDTH * CHANNELS)
    weight += client * params_stride
    # 1. The pixels of the tile's rows
    pixel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sample, h, w = split_pixel(pixel, OUT_HEIGHT, OUT_WIDTH)
    h *= STEP
    w *= STEP
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)

    # 2. The products
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if POOL:
        total_1 = tl.zeros((ROWS, COLUMNS), tl.float32)
        total_2 = tl.zeros((ROWS, COLUMNS), tl.float32)
        total_3 = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, PATCH, DEPTH):
        number = first + tl.arange(0, DEPTH)
        dh, dw, channel = split_patch(first, CHANNELS, SIDE, DEPTH, ALIGNED)
        inside = (number < PATCH)[:, None] & (column < OUTPUTS)
        right = tl.load(weight + number[:, None] * OUTPUTS + column, mask=inside, other=0.0)
        inside = (pixel < num_pixels)[:, None] & (ALIGNED | (number < PATCH))
        left = load_patches(
            x, sample, h, w, dh, dw, channel, inside, HEIGHT, WIDTH, CHANNELS, PADDING
        )
        total = add_product(total, left, right, PRECISION)
        if POOL:
            left = load_patches(
                x, sample, h, w + 1, dh, dw, channel, inside, HEIGHT, WIDTH, CHANNELS, PADDING
            )
            total_1 = add_product(total_1, left, right, PRECISION)
            left = load_patches(
                x, sample, h + 1, w, dh, dw, channel, inside, HEIGHT, WIDTH, CHANNELS, PADDING
            )
            total_2 = add_product(total_2, left, right, PRECISION)
            left = load_patches(
                x, sample, h + 1, w + 1, dh, dw, channel, inside, HEIGHT, WIDTH, CHANNELS, PADDING
            )
            total_3 = add_product(total_3, left, right, PRECISION)

    # 3. Pooling, bias and ReLU. (nan stays nan. The first of equal products wins.)
    place = (client * num_pixels + pixel[:, None]) * OUTPUTS + column
    inside = (pixel < num_pixels)[:, None] & (column < OUTPUTS)
    if POOL:
        winner = tl.where(wins(total_1, total), 1, 0)
        total = tl.where(wins(total_1, total), total_1, total)
        winner = tl.where(wins(total_2, total), 2, winner)
        total = tl.where(wins(total_2, total), total_2, total)
        winner = tl.where(wins(total_3, total), 3, winner)
        total = tl.where(wins(total_3, total), total_3, total)
        tl.store(winners + place, winner.to(tl.uint8), mask=inside)
    if BIAS:
        total += tl.load(bias + client * params_stride + column, mask=column < OUTPUTS, other=0.0)
    if RELU:
        total = tl.where(total < 0, 0.0, total)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_samples"])
def input_gradient(
    slopes,
    weight,
    x,
    x_winners,
    x_slopes,
    params_stride,
    num_samples,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SIDE: tl.constexpr,
    PADDING: tl.constexpr,
    X_HEIGHT: tl.constexpr,
    X_WIDTH: tl.constexpr,
    X_CHANNELS: tl.constexpr,
    SLOPE_HEIGHT: tl.constexpr,
    SLOPE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write x_slopes, the slopes of the layer whose output, after a ReLU, is x.

    That layer's output has X_HEIGHT x X_WIDTH pixels with X_CHANNELS channels, and its slopes have
    SLOPE_HEIGHT x SLOPE_WIDTH pixels. Slopes before pooling are written for whole windows. Pixels
    that pooling drops are left alone.
    """
    PATCH: tl.constexpr = SIDE * SIDE * OUTPUTS
    ALIGNED: tl.constexpr = OUTPUTS % DEPTH == 0
    client = tl.program_id(2).to(tl.int64)
    num_pixels = num_samples * (HEIGHT * WIDTH)
    slopes += client * num_samples * (OUT_HEIGHT * OUT_WIDTH * OUTPUTS)
    weight += client * params_stride
    # 1. The pixels of the tile's rows. A pixel takes part in S x S pixels of the output, its patch.
    pixel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sample, h, w = split_pixel(pixel, HEIGHT, WIDTH)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)

    # 2. The product with the transposed weight
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, PATCH, DEPTH):
        number = first + tl.arange(0, DEPTH)
        dh, dw, output = split_patch(first, OUTPUTS, SIDE, DEPTH, ALIGNED)
        hs = (h + PADDING)[:, None] - dh
        ws = (w + PADDING)[:, None] - dw
        inside = (hs >= 0) & (hs < OUT_HEIGHT) & (ws >= 0) & (ws < OUT_WIDTH)
        inside = inside & (pixel < num_pixels)[:, None] & (ALIGNED | (number < PATCH))
        place = ((sample[:, None] * OUT_HEIGHT + hs) * OUT_WIDTH + ws) * OUTPUTS
        left = tl.load(slopes + (place + output), mask=inside, other=0.0)
        place = ((dh * SIDE + dw) * CHANNELS + column[:, None]) * OUTPUTS + output
        inside = (column < CHANNELS)[:, None] & (number < PATCH)
        right = tl.load(weight + place, mask=inside, other=0.0)
        total = add_product(total, left, tl.trans(right), PRECISION)

    # 3. The ReLU of the layer below
    number = pixel[:, None] * CHANNELS + column
    inside = (pixel < num_pixels)[:, None] & (column < CHANNELS)
    place = client * num_pixels * CHANNELS + number
    is_positive = tl.load(x + place, mask=inside, other=0.0) > 0
    total = tl.where(is_positive, total, 0.0).to(x_slopes.dtype.element_ty)

    # 4. The pooling of the layer below
    if SLOPE_HEIGHT > X_HEIGHT:
        winner = tl.load(x_winners + place, mask=inside, other=0)
        sample, h, w = split_pixel(number // X_CHANNELS, X_HEIGHT, X_WIDTH)
        place = ((sample * SLOPE_HEIGHT + h * 2) * SLOPE_WIDTH + w * 2) * X_CHANNELS
        place += number % X_CHANNELS
        x_slopes += client * num_samples * (SLOPE_HEIGHT * SLOPE_WIDTH * X_CHANNELS)
        for window in tl.static_range(4):
            step = (window // 2 * SLOPE_WIDTH + window % 2) * X_CHANNELS
            slope = tl.where(winner == window, total, 0.0)
            tl.store(x_slopes + (place + step), slope, mask=inside)
    else:
        tl.store(x_slopes + place, total, mask=inside)


@triton.jit(do_not_specialize=["num_samples"])
def weight_gradient(
    x,
    slopes,
    sums,
    sums_stride,
    num_samples,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SIDE: tl.constexpr,
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write sums. The second axis of the grid is the part: a share of the pixels."""
    PATCH: tl.constexpr = SIDE * SIDE * CHANNELS
    ALIGNED: tl.constexpr = CHANNELS % ROWS == 0
    client = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    num_pixels = num_samples * (OUT_HEIGHT * OUT_WIDTH)
    x += client * num_samples * (HEIGHT * WIDTH * CHANNELS)
    slopes += client * num_pixels * OUTPUTS
    # 1. The tile: numbers of the patch by outputs
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    first_row = tl.program_id(0) // TILES * ROWS
    row = first_row + tl.arange(0, ROWS)
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    dh, dw, channel = split_patch(first_row, CHANNELS, SIDE, ROWS, ALIGNED)

    # 2. The transposed product, over the part's pixels
    blocks = tl.cdiv(tl.cdiv(num_pixels, DEPTH), tl.num_programs(1))
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    bias = tl.zeros((COLUMNS,), tl.float32)
    for block in range(part * blocks, (part + 1) * blocks):
        pixel = block * DEPTH + tl.arange(0, DEPTH)
        sample, h, w = split_pixel(pixel, OUT_HEIGHT, OUT_WIDTH)
        valid = (pixel < num_pixels)[:, None]
        place = pixel[:, None] * OUTPUTS + column
        slope = tl.load(slopes + place, mask=valid & (column < OUTPUTS), other=0.0)
        inside = valid & (ALIGNED | (row < PATCH))
        patch = load_patches(
            x, sample, h, w, dh, dw, channel, inside, HEIGHT, WIDTH, CHANNELS, PADDING
        )
        # This mask changes nothing, but without it Triton loads single numbers.
        patch = tl.where(valid, patch, 0.0)
        total = add_product(total, tl.trans(slope), patch, PRECISION)
        bias += tl.sum(slope.to(tl.float32), 0)

    sums += client * sums_stride + part * ((PATCH + 1) * OUTPUTS)
    inside = (row < PATCH)[:, None] & (column < OUTPUTS)
    tl.store(sums + row[:, None] * OUTPUTS + column, tl.trans(total), mask=inside)
    if first_row == 0:
        tl.store(sums + PATCH * OUTPUTS + column, bias, mask=column < OUTPUTS)


@triton.jit(do_not_specialize=["num_samples"])
def weight_gradient_of_winners(
    x,
    slopes,
    winners,
    sums,
    sums_stride,
    num_samples,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SIDE: tl.constexpr,
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write sums, like `weight_gradient`, for a first layer with pooling and few channels.

    Of the four patches of a window, only the winner's has a slope. This kernel loads it alone, for
    each output, and adds in float32. A program computes one row of the S x S pixels: its numbers,
    at most ROWS, lie next to one another in x.
    """
    NUMBERS: tl.constexpr = SIDE * CHANNELS
    client = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    num_pixels = num_samples * (OUT_HEIGHT * OUT_WIDTH)
    x += client * num_samples * (HEIGHT * WIDTH * CHANNELS)
    slopes += client * num_pixels * OUTPUTS
    winners += client * num_pixels * OUTPUTS
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    dh = tl.program_id(0) // TILES
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.arange(0, ROWS)

    blocks = tl.cdiv(tl.cdiv(num_pixels, DEPTH), tl.num_programs(1))
    totals = tl.zeros((DEPTH, COLUMNS, ROWS), tl.float32)
    bias = tl.zeros((DEPTH, COLUMNS), tl.float32)
    for block in range(part * blocks, (part + 1) * blocks):
        pixel = block * DEPTH + tl.arange(0, DEPTH)
        sample, h, w = split_pixel(pixel, OUT_HEIGHT, OUT_WIDTH)
        valid = (pixel < num_pixels)[:, None] & (column < OUTPUTS)
        place = pixel[:, None] * OUTPUTS + column
        slope = tl.load(slopes + place, mask=valid, other=0.0).to(tl.float32)
        winner = tl.load(winners + place, mask=valid, other=0).to(tl.int32)
        hs = (h * 2 + dh - PADDING)[:, None] + winner // 2
        ws = (w * 2 - PADDING)[:, None] + winner % 2
        place = ((sample[:, None] * HEIGHT + hs) * WIDTH + ws) * CHANNELS
        inside = valid[:, :, None] & (number < NUMBERS)
        if PADDING:
            in_row = ws[:, :, None] + number // CHANNELS
            inside = inside & ((hs >= 0) & (hs < HEIGHT))[:, :, None]
            inside = inside & (in_row >= 0) & (in_row < WIDTH)
        patch = tl.load(x + (place[:, :, None] + number), mask=inside, other=0.0)
        totals += slope[:, :, None] * patch.to(tl.float32)
        bias += slope

    sums += client * sums_stride + part * ((SIDE * NUMBERS + 1) * OUTPUTS) + column
    total = tl.trans(tl.sum(totals, 0))
    inside = (number < NUMBERS)[:, None] & (column < OUTPUTS)
    tl.store(sums + (dh * NUMBERS + number)[:, None] * OUTPUTS, total, mask=inside)
    if dh == 0:
        bias_place = SIDE * NUMBERS * OUTPUTS
        tl.store(sums + bias_place, tl.sum(bias, 0), mask=column < OUTPUTS)


@triton.jit
def add_parts(
    sums, grads, table, sums_stride, grads_stride, BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    """Write the gradients of all layers: the sums of their parts.

    A program adds one block of numbers, of up to PARTS parts at a time. Its row of the `table`
    [blocks, 5] holds the block's first place in `sums`, the distance between parts, the number of
    parts, the block's first place in `grads`, and its length.
    """
    client = tl.program_id(1).to(tl.int64)
    table += tl.program_id(0) * 5
    number = tl.arange(0, BLOCK)
    inside = number < tl.load(table + 4)
    sums += client * sums_stride + tl.load(table)
    distance = tl.load(table + 1)
    num_parts = tl.load(table + 2)
    totals = tl.zeros((PARTS, BLOCK), tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        mask = inside & (part < num_parts)
        totals += tl.load(sums + (part * distance + number), mask=mask, other=0.0)
    total = tl.sum(totals, 0)
    tl.store(grads + client * grads_stride + tl.load(table + 3) + number, total, mask=inside)


@triton.jit(do_not_specialize=["num_samples"])
def cross_entropy(
    logits,
    labels,
    weights,
    losses,
    slopes,
    num_samples,
    CLASSES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the losses of samples, and the gradients of the sum of weights x losses.

    These are zero for weights of zero, also if logits are not finite.
    """
    sample = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    valid = sample < num_samples
    place = sample[:, None].to(tl.int64) * CLASSES + column
    inside = valid[:, None] & (column < CLASSES)
    values = tl.load(logits + place, mask=inside, other=0.0).to(tl.float32)
    values = tl.where(column < CLASSES, values, -float("inf"))
    values -= tl.max(values, 1)[:, None]
    exponentials = tl.exp(values)
    total = tl.sum(exponentials, 1)
    is_label = column == tl.load(labels + sample, mask=valid, other=0)[:, None]
    loss = tl.log(total) - tl.sum(tl.where(is_label, values, 0.0), 1)
    weight = tl.load(weights + sample, mask=valid, other=0.0)[:, None]
    slope = (exponentials / total[:, None] - tl.where(is_label, 1.0, 0.0)) * weight
    tl.store(losses + sample, loss, mask=valid)
    slope = tl.where(weight > 0, slope, 0.0)
    tl.store(slopes + place, slope.to(slopes.dtype.element_ty), mask=inside)
