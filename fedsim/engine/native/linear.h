/* Linear layers. Each of a team does some samples of a batch, and some rows of a weight's gradient. */

/* SplitMix64's finaliser; fedsim/engine/model/layers.py draws the same masks. */
static uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static void drop(const struct layer *layer, real *value, struct range rows, uint64_t key)
{
    const uint64_t golden = 0x9E3779B97F4A7C15u, limit = (uint64_t)llrint(layer->link.rate * (1 << 24));
    uint64_t start = mix(key + (1 + ((uint64_t)layer->link.dropout << 20)) * golden);
    real scale = 1 / (1 - layer->link.rate);
    for (int64_t b = rows.first; b < rows.end; b++)
        for (int64_t o = 0; o < layer->link.out; o++) {
            uint64_t bits = mix(start + (uint64_t)(b * layer->link.out + o) * golden);
            value[b * layer->width + o] *= bits >> 40 >= limit ? scale : 0;
        }
}

/* value [batch][width]: the layer's output. */
static void linear_forward(const struct layer *layer, struct range rows, real *value)
{
    for (int64_t b = rows.first; b < rows.end; b++)
        memcpy(value + b * layer->width, layer->bias, layer->width * sizeof(real));
    plain_product(
        (struct product){.a = layer->given, .at = layer->at, .b = layer->weight, .c = value, .n = layer->width,
                         .depth = layer->depth, .ld = layer->width, .keep = 1, .scale = 1},
        rows.first, rows.end);
}

/* ReLU. Here and below comparisons are such that NaN is passed on, forward and backward, as torch does. */
static void rectify(real *value, int64_t count)
{
    for (int64_t i = 0; i < count; i++) value[i] = value[i] < 0 ? 0 : value[i];
}

static void linear_turn(const struct layer *layer, struct range outputs)
{
    for (int64_t o = outputs.first; o < outputs.end; o++)
        for (int64_t i = 0; i < layer->depth; i++)
            layer->turned[o * layer->stride + i] = layer->weight[i * layer->width + o];
}

/* `below`: the slope of the layer's input, which went through a ReLU and, behind a linear layer, a dropout. */
static void linear_descend(const struct layer *layer, const int64_t *slope_at, struct range rows, const real *slope,
                           real *below)
{
    real scale = layer[-1].link.kernel ? 1 : 1 / (1 - layer[-1].link.rate);
    plain_product(
        (struct product){.a = slope, .at = slope_at, .b = layer->turned, .c = below, .n = layer->stride,
                         .depth = layer->link.out, .ld = layer->stride, .scale = scale},
        rows.first, rows.end);
    for (int64_t i = rows.first * layer->stride; i < rows.end * layer->stride; i++)
        below[i] = !(layer->given[i] <= 0) ? below[i] : 0;
}

/* weight <- keep weight + scale given^T slope, for those `inputs`. */
static void linear_gradient(const struct layer *layer, int64_t batch, struct range inputs, const real *slope,
                            real *weight, real keep, real scale)
{
    transposed_product(
        (struct product){.a = layer->given, .at = layer->at, .b = slope, .c = weight, .n = layer->width,
                         .depth = batch, .ld = layer->width, .keep = keep, .scale = scale},
        inputs.first, inputs.end);
}

static void bias_gradient(const struct layer *layer, int64_t batch, const real *slope, real *bias, real keep,
                          real scale)
{
    for (int64_t o = 0; o < layer->width; o++) bias[o] *= keep;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t o = 0; o < layer->width; o++) bias[o] += scale * slope[b * layer->width + o];
}
