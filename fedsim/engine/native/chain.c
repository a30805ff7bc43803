/* Local training, gradients and outputs of one client's chain of linear layers,
   y = L_n(relu(drop(... relu(drop(L_1(x)))))), in one call that touches nothing but its arguments.

   The mathematics is that of fedsim/engine/fused.py. Weights lie transposed, [in][width], where `width` pads `out` to
   whole vectors; the padding stays zero. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>

#include "product.h"

struct link {
    int64_t in, out, dropout; /* `dropout`: the number of the dropout behind the layer, where `rate` is not 0 */
    double rate;
};

/* What is asked for, laid out as fedsim/engine/native/task.py has it. `start`, `result` and `momentum` point to
   weight [out][in] and bias [out] (0: none) of layer after layer. */
struct task {
    int64_t links, steps, width; /* `width`: samples of the largest batch */
    const struct link *link;
    const real *const *start;
    const real *x;            /* samples, rows of link[0].in */
    const int64_t *y;         /* their labels */
    const int64_t *positions; /* [steps][width] in x and y */
    const int64_t *counts;    /* [steps] valid positions */
    const int64_t *keys;      /* [steps] of dropout; 0: none */
    double lr, decay, momentum;
    int64_t nesterov;
    real *const *result;
    real *const *velocity; /* 0: not asked for */
    real *losses;          /* [steps][width] */
};

struct layer {
    int64_t in, out, width, dropout;
    double rate;
    real *weight, *bias;                 /* [in][width], [width]: zeros where the layer has none */
    real *slope_weight, *slope_bias;     /* the gradient, unless it goes into the weights at once */
    real *speed_weight, *speed_bias;     /* momentum */
    real *value;                         /* [batch][width] */
    const real **given;                  /* [batch] rows of its input */
    int biased;
};

struct net {
    int64_t layers, batch, widest;
    struct layer *layer;
    real *slope, *below; /* [batch][widest] of a layer's output, and of the output below */
    real *across;        /* a weight in torch's layout, its rows padded */
    const real **slopes; /* [batch] */
    int plain;           /* SGD without momentum: the update is part of the product that gives the gradient */
};

/* --- room -------------------------------------------------------------------------------------------------------- */

/* Pieces of one allocation; with `start` 0 it only counts. */
struct room {
    char *start;
    size_t used;
};

static void *take(struct room *room, int64_t count, size_t size)
{
    void *piece = room->start ? room->start + room->used : 0;
    room->used += (count * size + 63) / 64 * 64;
    return piece;
}

static real *reals(struct room *room, int64_t count) { return take(room, count, sizeof(real)); }

static int64_t padded(int64_t n)
{
    int64_t width = (n + LANES - 1) / LANES * LANES;
    return width * sizeof(real) % 2048 ? width : width + LANES; /* rows at powers of two would share few cache lines */
}

static void lay_out(struct room *room, struct net *net, const struct task *t, int trains)
{
    net->layers = t->links;
    net->batch = t->width;
    net->plain = trains && t->momentum == 0;
    net->widest = padded(t->link[0].out);
    net->layer = take(room, t->links, sizeof(struct layer));
    int64_t largest = 0;
    for (int64_t l = 0; l < t->links; l++) {
        const struct link *link = t->link + l;
        int64_t width = padded(link->out), weights = link->in * width;
        struct layer layer = {.in = link->in, .out = link->out, .width = width, .dropout = link->dropout};
        layer.rate = t->keys ? link->rate : 0;
        layer.biased = t->start[2 * l + 1] != 0;
        layer.weight = reals(room, weights);
        layer.bias = reals(room, width);
        if (!net->plain) layer.slope_weight = reals(room, weights), layer.slope_bias = reals(room, width);
        if (trains && t->momentum != 0) layer.speed_weight = reals(room, weights), layer.speed_bias = reals(room, width);
        layer.value = reals(room, net->batch * width);
        layer.given = take(room, net->batch, sizeof(real *));
        if (width > net->widest) net->widest = width;
        if (l && link->out * padded(link->in) > largest) largest = link->out * padded(link->in);
        if (room->start) net->layer[l] = layer;
    }
    net->slope = reals(room, net->batch * net->widest);
    net->below = reals(room, net->batch * net->widest);
    net->across = reals(room, largest);
    net->slopes = take(room, net->batch, sizeof(real *));
}

/* [rows][ld] from or to the transpose, [columns][across]. */
static void transpose(int64_t rows, int64_t columns, const real *from, int64_t ld, real *to, int64_t across)
{
    enum { BLOCK = 16 };
    for (int64_t i = 0; i < rows; i += BLOCK)
        for (int64_t j = 0; j < columns; j += BLOCK)
            for (int64_t r = i; r < at_most(rows, i + BLOCK); r++)
                for (int64_t c = j; c < at_most(columns, j + BLOCK); c++) to[c * across + r] = from[r * ld + c];
}

/* A net that holds the task's starting model; 0 without memory. Its address is what is to be freed. */
static struct net *build(const struct task *t, int trains)
{
    struct room room = {0};
    struct net plan;
    take(&room, 1, sizeof(struct net));
    lay_out(&room, &plan, t, trains);
    room.start = aligned_alloc(64, room.used);
    if (!room.start) return 0;
    memset(room.start, 0, room.used);
    room.used = 0;
    struct net *net = take(&room, 1, sizeof(struct net));
    lay_out(&room, net, t, trains);
    for (int64_t l = 0; l < net->layers; l++) {
        struct layer *layer = net->layer + l;
        transpose(layer->out, layer->in, t->start[2 * l], layer->in, layer->weight, layer->width);
        if (layer->biased) memcpy(layer->bias, t->start[2 * l + 1], layer->out * sizeof(real));
        for (int64_t b = 0; l && b < net->batch; b++) layer->given[b] = layer[-1].value + b * layer[-1].width;
    }
    return net;
}

/* --- forward ----------------------------------------------------------------------------------------------------- */

/* SplitMix64's finaliser; fedsim/engine/layers.py draws the same masks. */
static uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static void drop(const struct layer *layer, int64_t batch, uint64_t key)
{
    const uint64_t golden = 0x9E3779B97F4A7C15u, limit = (uint64_t)llrint(layer->rate * (1 << 24));
    uint64_t start = mix(key + (1 + ((uint64_t)layer->dropout << 20)) * golden);
    real scale = 1 / (1 - layer->rate);
    for (int64_t b = 0; b < batch; b++)
        for (int64_t o = 0; o < layer->out; o++) {
            uint64_t bits = mix(start + (uint64_t)(b * layer->out + o) * golden);
            layer->value[b * layer->width + o] *= bits >> 40 >= limit ? scale : 0;
        }
}

static void rectify(real *value, int64_t count)
{
    for (int64_t i = 0; i < count; i++) value[i] = value[i] > 0 ? value[i] : 0;
}

/* From the first layer's `given` to the last one's `value`. */
static void forward(struct net *net, int64_t batch, const int64_t *key)
{
    for (int64_t l = 0; l < net->layers; l++) {
        struct layer *layer = net->layer + l;
        for (int64_t b = 0; b < batch; b++) memcpy(layer->value + b * layer->width, layer->bias, layer->width * sizeof(real));
        plain_product(&(struct product){
            .a = layer->given, .b = layer->weight, .c = layer->value, .m = batch, .n = layer->width,
            .depth = layer->in, .ldb = layer->width, .ldc = layer->width, .keep = 1, .scale = 1});
        if (l == net->layers - 1) break;
        if (layer->rate != 0) drop(layer, batch, (uint64_t)*key);
        rectify(layer->value, batch * layer->width);
    }
}

/* Losses of the batch, and the slope of `scale` times their sum. */
static void cross_entropy(struct net *net, int64_t batch, const int64_t *y, const int64_t *positions, real scale, real *losses)
{
    const struct layer *last = net->layer + net->layers - 1;
    memset(net->slope, 0, batch * last->width * sizeof(real));
    for (int64_t b = 0; b < batch; b++) {
        const real *z = last->value + b * last->width;
        real *slope = net->slope + b * last->width, most = z[0], total = 0;
        int64_t label = y[positions[b]];
        for (int64_t c = 1; c < last->out; c++) most = z[c] > most ? z[c] : most;
        for (int64_t c = 0; c < last->out; c++) total += slope[c] = exp(z[c] - most);
        for (int64_t c = 0; c < last->out; c++) slope[c] = (slope[c] / total - (c == label)) * scale;
        losses[b] = log(total) - (z[label] - most);
    }
}

/* --- backward ---------------------------------------------------------------------------------------------------- */

/* net->below: the slope of the output of the layer below `l`. */
static void descend(struct net *net, int64_t l, int64_t batch)
{
    const struct layer *layer = net->layer + l, *lower = layer - 1;
    transpose(layer->in, layer->out, layer->weight, layer->width, net->across, lower->width);
    for (int64_t b = 0; b < batch; b++) net->slopes[b] = net->slope + b * layer->width;
    plain_product(&(struct product){
        .a = net->slopes, .b = net->across, .c = net->below, .m = batch, .n = lower->width,
        .depth = layer->out, .ldb = lower->width, .ldc = lower->width, .scale = 1 / (1 - lower->rate)});
    for (int64_t i = 0; i < batch * lower->width; i++) net->below[i] = lower->value[i] > 0 ? net->below[i] : 0;
}

/* weight <- keep weight + scale given^T slope, and the bias likewise. */
static void add_gradient(const struct net *net, const struct layer *layer, int64_t batch, real *weight, real *bias, real keep, real scale)
{
    transposed_product(&(struct product){
        .a = layer->given, .b = net->slope, .c = weight, .m = layer->in, .n = layer->width,
        .depth = batch, .ldb = layer->width, .ldc = layer->width, .keep = keep, .scale = scale});
    if (!layer->biased) return;
    for (int64_t o = 0; o < layer->width; o++) bias[o] *= keep;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t o = 0; o < layer->width; o++) bias[o] += scale * net->slope[b * layer->width + o];
}

/* torch.optim.SGD's rule. */
static void move(real *w, real *speed, const real *slope, int64_t count, const struct task *t)
{
    real lr = t->lr, decay = t->decay, momentum = t->momentum, ahead = t->nesterov ? 1 : 0;
    for (int64_t i = 0; i < count; i++) {
        real g = slope[i] + decay * w[i];
        speed[i] = momentum * speed[i] + g;
        w[i] -= lr * (ahead != 0 ? g + momentum * speed[i] : speed[i]);
    }
}

/* Takes the step of plain SGD, or adds to the gradient that is `keep` of what it was. */
static void backward(struct net *net, int64_t batch, const struct task *t, real keep)
{
    for (int64_t l = net->layers - 1; l >= 0; l--) {
        struct layer *layer = net->layer + l;
        if (l) descend(net, l, batch);
        if (net->plain)
            add_gradient(net, layer, batch, layer->weight, layer->bias, 1 - t->lr * t->decay, -t->lr);
        else
            add_gradient(net, layer, batch, layer->slope_weight, layer->slope_bias, keep, 1);
        real *spent = net->slope;
        net->slope = net->below;
        net->below = spent;
    }
}

/* --- what is asked for ------------------------------------------------------------------------------------------- */

static void load(struct net *net, const struct task *t, int64_t step)
{
    for (int64_t b = 0; b < t->counts[step]; b++)
        net->layer[0].given[b] = t->x + t->positions[step * t->width + b] * net->layer[0].in;
}

/* In torch's layout: `weight` and `bias`, less what `start` holds where it is given. */
static void hand_over(const struct layer *layer, const real *weight, const real *bias, const real *const *start, real *const *result)
{
    transpose(layer->in, layer->out, weight, layer->width, result[0], layer->in);
    if (layer->biased) memcpy(result[1], bias, layer->out * sizeof(real));
    for (int64_t i = 0; start && i < layer->in * layer->out; i++) result[0][i] -= start[0][i];
    for (int64_t o = 0; start && layer->biased && o < layer->out; o++) result[1][o] -= start[1][o];
}

/* Local training; `result` is what it changed. 0, or 1 without memory. */
int train(const struct task *t)
{
    struct net *net = build(t, 1);
    if (!net) return 1;
    for (int64_t s = 0; s < t->steps; s++) {
        load(net, t, s);
        forward(net, t->counts[s], t->keys ? t->keys + s : 0);
        cross_entropy(net, t->counts[s], t->y, t->positions + s * t->width, (real)1 / t->counts[s], t->losses + s * t->width);
        backward(net, t->counts[s], t, 0);
        for (int64_t l = 0; !net->plain && l < net->layers; l++) {
            struct layer *layer = net->layer + l;
            move(layer->weight, layer->speed_weight, layer->slope_weight, layer->in * layer->width, t);
            if (layer->biased) move(layer->bias, layer->speed_bias, layer->slope_bias, layer->width, t);
        }
    }
    for (int64_t l = 0; l < net->layers; l++) {
        struct layer *layer = net->layer + l;
        hand_over(layer, layer->weight, layer->bias, t->start + 2 * l, t->result + 2 * l);
        if (t->velocity) hand_over(layer, layer->speed_weight, layer->speed_bias, 0, t->velocity + 2 * l);
    }
    free(net);
    return 0;
}

/* `result`: the gradient of the sum of all samples' cross-entropies, without dropout. 0, or 1 without memory. */
int gradient(const struct task *t)
{
    struct net *net = build(t, 0);
    if (!net) return 1;
    for (int64_t s = 0; s < t->steps; s++) {
        load(net, t, s);
        forward(net, t->counts[s], 0);
        cross_entropy(net, t->counts[s], t->y, t->positions + s * t->width, 1, t->losses + s * t->width);
        backward(net, t->counts[s], t, 1);
    }
    for (int64_t l = 0; l < net->layers; l++)
        hand_over(net->layer + l, net->layer[l].slope_weight, net->layer[l].slope_bias, 0, t->result + 2 * l);
    free(net);
    return 0;
}

/* `result[0]` [counts[0] + counts[1] + ...][C]: the last layer's output, without dropout. 0, or 1 without memory. */
int outputs(const struct task *t)
{
    struct net *net = build(t, 0);
    if (!net) return 1;
    const struct layer *last = net->layer + net->layers - 1;
    real *to = t->result[0];
    for (int64_t s = 0; s < t->steps; s++) {
        load(net, t, s);
        forward(net, t->counts[s], 0);
        for (int64_t b = 0; b < t->counts[s]; b++, to += last->out)
            memcpy(to, last->value + b * last->width, last->out * sizeof(real));
    }
    free(net);
    return 0;
}
