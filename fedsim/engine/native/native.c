/* Local training, gradients and outputs of one client's net of convolutions, poolings, linear layers and ReLUs, in one
   call that touches nothing but its arguments. Several may run at once. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>

#include "product.h"

#include "net.h"

#include "team.h"

#include "linear.h"

#include "convolution.h"

/* The samples of a batch that a member's share of its parts holds. */
static struct range samples_of(const struct member *me, int64_t batch)
{
    struct range parts = share(me, PARTS, 1);
    return (struct range){batch * parts.first / PARTS, batch * parts.end / PARTS};
}

/* One's samples of a step, as the first layer wants them. */
static void load(const struct member *me, int64_t step, struct range samples)
{
    struct layer *first = me->net->layer;
    const struct task *t = me->task;
    const int64_t *positions = t->positions + step * t->width;
    int64_t size = first->link.in * (first->link.kernel ? first->link.height * first->link.width : 1);
    for (int64_t b = samples.first; b < samples.end; b++)
        if (first->link.kernel)
            load_image(first, b, t->x + positions[b] * size);
        else
            first->at[b] = positions[b] * size;
}

/* Losses of some samples, and the slope of `scale` times the sum. */
static void cross_entropy(const struct net *net, struct range rows, const int64_t *y, const int64_t *positions,
                          real scale, real *losses)
{
    const struct layer *layer = net->layer + net->layers - 1;
    for (int64_t b = rows.first; b < rows.end; b++) {
        const real *z = net->output + b * layer->width;
        real *slope = net->slopes[0] + b * layer->width, most = z[0], total = 0;
        int64_t label = y[positions[b]], classes = layer->link.out;
        memset(slope, 0, layer->width * sizeof(real));
        for (int64_t c = 1; c < classes; c++) most = z[c] > most ? z[c] : most;
        for (int64_t c = 0; c < classes; c++) total += slope[c] = exp(z[c] - most);
        for (int64_t c = 0; c < classes; c++) slope[c] = (slope[c] / total - (c == label)) * scale;
        losses[b] = log(total) - (z[label] - most);
    }
}

/* From a step's samples to the output of one's rows. `dropout`: with it. */
static struct range forward(const struct member *me, int64_t step, int dropout)
{
    struct net *net = me->net;
    int64_t batch = me->task->counts[step];
    struct range rows = share(me, batch, ROWS), samples = net->convolutions ? samples_of(me, batch) : rows;
    load(me, step, samples);
    for (int64_t b = samples.first; b < samples.end; b++)
        for (int64_t l = 0; l < net->convolutions; l++) convolution_forward(me, net->layer + l, b);
    if (net->convolutions) meet(me);
    for (int64_t l = net->convolutions; l < net->layers; l++) {
        const struct layer *layer = net->layer + l;
        real *value = l + 1 < net->layers ? (real *)layer[1].given : net->output;
        linear_forward(layer, rows, value);
        if (value == net->output) break;
        if (dropout && layer->link.rate != 0) drop(layer, value, rows, (uint64_t)me->task->keys[step]);
        rectify(value + rows.first * layer->width, (rows.end - rows.first) * layer->width);
    }
    return rows;
}

/* Adds to the gradient that is `keep` of what it was; where a layer has no room for one, plain SGD steps at once. */
static void linear_backward(const struct member *me, int64_t l, int64_t batch, const real *slope, real *below,
                            real keep)
{
    const struct task *t = me->task;
    const struct layer *layer = me->net->layer + l;
    real *weight = layer->slope_weight, *bias = layer->slope_bias, scale = 1;
    if (!weight) weight = layer->weight, bias = layer->bias, keep = 1 - t->lr * t->decay, scale = -t->lr;
    if (l) linear_turn(layer, share(me, layer->link.out, 1));
    meet(me); /* all have the slope and the turned weight, and nobody needs the weight or what `below` held */
    if (l) linear_descend(layer, me->net->slope_at + l * me->net->batch, share(me, batch, ROWS), slope, below);
    linear_gradient(layer, batch, share(me, layer->depth, ROWS), slope, weight, keep, scale);
    if (layer->biased && !me->rank) bias_gradient(layer, batch, slope, bias, keep, scale);
}

/* The convolutions' gradients of one part of the batch, which may have no samples. */
static void part_backward(const struct member *me, int64_t part, int64_t batch, const real *slope, real keep)
{
    const struct net *net = me->net;
    int64_t stride = net->layer[net->convolutions].stride;
    for (int64_t l = 0; keep == 0 && l < net->convolutions; l++) {
        const struct layer *layer = net->layer + l;
        int64_t weights = layer->depth * layer->width;
        memset(layer->slope_weight + part * weights, 0, weights * sizeof(real));
        memset(layer->slope_bias + part * layer->width, 0, layer->width * sizeof(real));
    }
    for (int64_t b = batch * part / PARTS; b < batch * (part + 1) / PARTS; b++)
        convolutions_backward(me, b, slope + b * stride, part);
}

static void backward(const struct member *me, int64_t batch, real keep)
{
    struct net *net = me->net;
    int64_t turn = 0;
    for (int64_t l = net->layers - 1; l >= net->convolutions; l--, turn ^= 1)
        linear_backward(me, l, batch, net->slopes[turn], net->slopes[turn ^ 1], keep);
    for (int64_t l = 1; l < net->convolutions; l++)
        convolution_turn(net->layer + l, share(me, net->layer[l].link.kernel * net->layer[l].link.kernel, 1));
    meet(me);
    if (!net->convolutions) return;
    struct range parts = share(me, PARTS, 1);
    for (int64_t p = parts.first; p < parts.end; p++) part_backward(me, p, batch, net->slopes[turn], keep);
    meet(me);
}

/* The first part of [parts][size] becomes the sum of all. */
static void add_up(struct range some, real *values, int64_t parts, int64_t size)
{
    for (int64_t p = 1; p < parts; p++)
        for (int64_t i = some.first; i < some.end; i++) values[i] += values[p * size + i];
}

/* torch.optim.SGD's rule for some of the values. */
static void move(struct range some, real *w, real *speed, const real *slope, const struct task *t)
{
    real lr = t->lr, decay = t->decay, momentum = t->momentum, kept = 1 - t->lr * t->decay;
    if (!speed)
        for (int64_t i = some.first; i < some.end; i++) w[i] = kept * w[i] - lr * slope[i];
    for (int64_t i = some.first; speed && i < some.end; i++) {
        real g = slope[i] + decay * w[i];
        speed[i] = momentum * speed[i] + g;
        w[i] -= lr * (t->nesterov ? g + momentum * speed[i] : speed[i]);
    }
}

/* The optimiser's step, where it was not taken at once. */
static void move_all(const struct member *me)
{
    for (int64_t l = 0; l < me->net->layers; l++) {
        struct layer *layer = me->net->layer + l;
        int64_t weights = layer->depth * layer->width;
        struct range rows = share(me, weights, LANES), columns = share(me, layer->biased ? layer->width : 0, LANES);
        if (!layer->slope_weight) continue;
        add_up(rows, layer->slope_weight, layer->parts, weights);
        add_up(columns, layer->slope_bias, layer->parts, layer->width);
        move(rows, layer->weight, layer->speed_weight, layer->slope_weight, me->task);
        move(columns, layer->bias, layer->speed_bias, layer->slope_bias, me->task);
    }
}

static void train_together(const struct member *me)
{
    const struct task *t = me->task;
    for (int64_t s = 0; s < t->steps; s++) {
        int64_t first = s * t->width, batch = t->counts[s];
        struct range rows = forward(me, s, t->keys != 0);
        cross_entropy(me->net, rows, t->y, t->positions + first, (real)1 / batch, t->losses + first);
        backward(me, batch, 0);
        move_all(me);
        meet(me);
    }
}

/* Local training; `result` is what it changed. 0, or 1 without memory. */
int train(const struct task *t)
{
    struct net *net = build(t, 1);
    if (!net) return 1;
    work_together(net, t, train_together);
    for (int64_t l = 0; l < net->layers; l++) {
        struct layer *layer = net->layer + l;
        hand_over(layer, layer->weight, layer->bias, t->start + 2 * l, t->result + 2 * l);
        if (t->velocity) hand_over(layer, layer->speed_weight, layer->speed_bias, 0, t->velocity + 2 * l);
    }
    free(net);
    return 0;
}

static void gradient_together(const struct member *me)
{
    const struct task *t = me->task;
    for (int64_t s = 0; s < t->steps; s++) {
        int64_t first = s * t->width;
        struct range rows = forward(me, s, 0);
        cross_entropy(me->net, rows, t->y, t->positions + first, 1, t->losses + first);
        backward(me, t->counts[s], 1);
    }
}

/* `result`: the gradient of the sum of all samples' cross-entropies, without dropout. 0, or 1 without memory. */
int gradient(const struct task *t)
{
    struct net *net = build(t, 0);
    if (!net) return 1;
    work_together(net, t, gradient_together);
    for (int64_t l = 0; l < net->layers; l++) {
        struct layer *layer = net->layer + l;
        int64_t weights = layer->depth * layer->width;
        add_up((struct range){0, weights}, layer->slope_weight, layer->parts, weights);
        add_up((struct range){0, layer->width}, layer->slope_bias, layer->parts, layer->width);
        hand_over(layer, layer->slope_weight, layer->slope_bias, 0, t->result + 2 * l);
    }
    free(net);
    return 0;
}

static void outputs_together(const struct member *me)
{
    const struct task *t = me->task;
    const struct layer *last_layer = me->net->layer + me->net->layers - 1;
    real *to = t->result[0];
    for (int64_t s = 0; s < t->steps; meet(me), to += t->counts[s++] * last_layer->link.out) {
        struct range rows = forward(me, s, 0);
        for (int64_t b = rows.first; b < rows.end; b++)
            memcpy(to + b * last_layer->link.out, me->net->output + b * last_layer->width,
                   last_layer->link.out * sizeof(real));
    }
}

/* `result[0]` [counts[0] + counts[1] + ...][C]: the last layer's output, without dropout. 0, or 1 without memory. */
int outputs(const struct task *t)
{
    struct net *net = build(t, 0);
    if (!net) return 1;
    work_together(net, t, outputs_together);
    free(net);
    return 0;
}
