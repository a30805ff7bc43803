/* Local training, gradients and outputs of one client's net of convolutions, poolings, linear layers and ReLUs, in one
   call that touches nothing but its arguments. Several may run at once. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>

#include "product.h"

#include "net.h"

#include "linear.h"

#include "convolution.h"

/* The samples of a step, as the first layer wants them. */
static void load(struct net *net, const struct task *t, int64_t step)
{
    struct layer *first = net->layer;
    const int64_t *positions = t->positions + step * t->width;
    int64_t sample = first->link.in * (first->link.kernel ? first->link.height * first->link.width : 1);
    for (int64_t b = 0; b < t->counts[step]; b++)
        if (first->link.kernel)
            load_image(first, b, t->x + positions[b] * sample);
        else
            first->at[b] = positions[b] * sample;
    if (!first->link.kernel) first->given = t->x;
}

static void forward(struct net *net, int64_t batch, const int64_t *key)
{
    for (int64_t b = 0; b < batch; b++)
        for (int64_t l = 0; l < net->convolutions; l++) convolution_forward(net->layer + l, b);
    for (int64_t l = net->convolutions; l < net->layers; l++) {
        const struct layer *layer = net->layer + l;
        real *value = l + 1 < net->layers ? (real *)layer[1].given : net->output;
        linear_forward(layer, batch, value);
        if (value == net->output) break;
        if (layer->link.rate != 0) drop(layer, value, batch, (uint64_t)*key);
        rectify(value, batch * layer->width);
    }
}

/* Losses of the batch, and the slope of `scale` times their sum. */
static void cross_entropy(struct net *net, int64_t batch, const int64_t *y, const int64_t *positions, real scale,
                          real *losses)
{
    const struct layer *layer = net->layer + net->layers - 1;
    memset(net->slope, 0, batch * layer->width * sizeof(real));
    for (int64_t b = 0; b < batch; b++) {
        const real *z = net->output + b * layer->width;
        real *slope = net->slope + b * layer->width, most = z[0], total = 0;
        int64_t label = y[positions[b]], classes = layer->link.out;
        for (int64_t c = 1; c < classes; c++) most = z[c] > most ? z[c] : most;
        for (int64_t c = 0; c < classes; c++) total += slope[c] = exp(z[c] - most);
        for (int64_t c = 0; c < classes; c++) slope[c] = (slope[c] / total - (c == label)) * scale;
        losses[b] = log(total) - (z[label] - most);
    }
}

/* From the top of a sample's convolutions down, whose slope is given with pixels `pitch` apart. */
static void convolutions_backward(struct net *net, int64_t b, const real *slope, real keep)
{
    int64_t pitch = net->layer[net->convolutions - 1].link.out;
    for (int64_t l = net->convolutions - 1; l >= 0; l--) {
        const struct layer *layer = net->layer + l;
        unpool(layer, b, slope, pitch);
        convolution_gradient(layer, b, b ? 1 : keep);
        if (!l) return;
        convolution_descend(layer);
        slope = layer->below;
        pitch = vectors_of(layer->link.in);
    }
}

/* Adds to the gradient that is `keep` of what it was; where a layer has no room for one, plain SGD steps at once. */
static void backward(struct net *net, int64_t batch, const struct task *t, real keep)
{
    for (int64_t l = net->layers - 1; l >= net->convolutions; l--) {
        struct layer *layer = net->layer + l;
        if (l) linear_descend(net, layer, batch);
        if (layer->slope_weight)
            linear_gradient(net, layer, batch, layer->slope_weight, layer->slope_bias, keep, 1);
        else
            linear_gradient(net, layer, batch, layer->weight, layer->bias, 1 - t->lr * t->decay, -t->lr);
        real *spent = net->slope;
        net->slope = net->below;
        net->below = spent;
    }
    for (int64_t l = 1; l < net->convolutions; l++) turn(net->layer + l);
    for (int64_t b = 0; net->convolutions && b < batch; b++)
        convolutions_backward(net, b, net->slope + b * net->layer[net->convolutions].stride, keep);
}

/* torch.optim.SGD's rule. */
static void move(real *w, real *speed, const real *slope, int64_t count, const struct task *t)
{
    real lr = t->lr, decay = t->decay, momentum = t->momentum, kept = 1 - t->lr * t->decay;
    if (!speed)
        for (int64_t i = 0; i < count; i++) w[i] = kept * w[i] - lr * slope[i];
    for (int64_t i = 0; speed && i < count; i++) {
        real g = slope[i] + decay * w[i];
        speed[i] = momentum * speed[i] + g;
        w[i] -= lr * (t->nesterov ? g + momentum * speed[i] : speed[i]);
    }
}

/* The optimiser's step, where it was not taken at once. */
static void move_all(struct net *net, const struct task *t)
{
    for (int64_t l = 0; l < net->layers; l++) {
        struct layer *layer = net->layer + l;
        if (!layer->slope_weight) continue;
        move(layer->weight, layer->speed_weight, layer->slope_weight, layer->depth * layer->width, t);
        if (layer->biased) move(layer->bias, layer->speed_bias, layer->slope_bias, layer->width, t);
    }
}

/* Local training; `result` is what it changed. 0, or 1 without memory. */
int train(const struct task *t)
{
    struct net *net = build(t, 1);
    if (!net) return 1;
    for (int64_t s = 0; s < t->steps; s++) {
        int64_t first = s * t->width, batch = t->counts[s];
        load(net, t, s);
        forward(net, batch, t->keys ? t->keys + s : 0);
        cross_entropy(net, batch, t->y, t->positions + first, (real)1 / batch, t->losses + first);
        backward(net, batch, t, 0);
        move_all(net, t);
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
        int64_t first = s * t->width, batch = t->counts[s];
        load(net, t, s);
        forward(net, batch, 0);
        cross_entropy(net, batch, t->y, t->positions + first, 1, t->losses + first);
        backward(net, batch, t, 1);
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
    const struct layer *last_layer = net->layer + net->layers - 1;
    real *to = t->result[0];
    for (int64_t s = 0; s < t->steps; s++) {
        load(net, t, s);
        forward(net, t->counts[s], 0);
        for (int64_t b = 0; b < t->counts[s]; b++, to += last_layer->link.out)
            memcpy(to, net->output + b * last_layer->width, last_layer->link.out * sizeof(real));
    }
    free(net);
    return 0;
}
