/* Linear layers of a whole batch. */

/* SplitMix64's finaliser; fedsim/engine/layers.py draws the same masks. */
static uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static void drop(const struct layer *layer, real *value, int64_t batch, uint64_t key)
{
    const uint64_t golden = 0x9E3779B97F4A7C15u, limit = (uint64_t)llrint(layer->link.rate * (1 << 24));
    uint64_t start = mix(key + (1 + ((uint64_t)layer->link.dropout << 20)) * golden);
    real scale = 1 / (1 - layer->link.rate);
    for (int64_t b = 0; b < batch; b++)
        for (int64_t o = 0; o < layer->link.out; o++) {
            uint64_t bits = mix(start + (uint64_t)(b * layer->link.out + o) * golden);
            value[b * layer->width + o] *= bits >> 40 >= limit ? scale : 0;
        }
}

/* value [batch][width]: the layer's output. */
static void linear_forward(const struct layer *layer, int64_t batch, real *value)
{
    for (int64_t b = 0; b < batch; b++) memcpy(value + b * layer->width, layer->bias, layer->width * sizeof(real));
    plain_product(&(struct product){
        .a = layer->given, .at = layer->at, .b = layer->weight, .c = value, .m = batch, .n = layer->width,
        .depth = layer->depth, .ld = layer->width, .keep = 1, .scale = 1});
}

static void rectify(real *value, int64_t count)
{
    for (int64_t i = 0; i < count; i++) value[i] = value[i] > 0 ? value[i] : 0;
}

/* net->below: the slope of the layer's input, which went through a ReLU and, behind a linear layer, a dropout. */
static void linear_descend(struct net *net, const struct layer *layer, int64_t batch)
{
    real scale = layer[-1].link.kernel ? 1 : 1 / (1 - layer[-1].link.rate);
    for (int64_t o = 0; o < layer->link.out; o++)
        for (int64_t i = 0; i < layer->depth; i++) layer->turned[o * layer->stride + i] = layer->weight[i * layer->width + o];
    for (int64_t b = 0; b < batch; b++) net->slope_at[b] = b * layer->width;
    plain_product(&(struct product){
        .a = net->slope, .at = net->slope_at, .b = layer->turned, .c = net->below, .m = batch, .n = layer->stride,
        .depth = layer->link.out, .ld = layer->stride, .scale = scale});
    for (int64_t i = 0; i < batch * layer->stride; i++) net->below[i] = layer->given[i] > 0 ? net->below[i] : 0;
}

/* weight <- keep weight + scale given^T slope, and the bias likewise. */
static void linear_gradient(const struct net *net, const struct layer *layer, int64_t batch, real *weight, real *bias,
                            real keep, real scale)
{
    transposed_product(&(struct product){
        .a = layer->given, .at = layer->at, .b = net->slope, .c = weight, .m = layer->depth, .n = layer->width,
        .depth = batch, .ld = layer->width, .keep = keep, .scale = scale});
    if (!layer->biased) return;
    for (int64_t o = 0; o < layer->width; o++) bias[o] *= keep;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t o = 0; o < layer->width; o++) bias[o] += scale * net->slope[b * layer->width + o];
}
