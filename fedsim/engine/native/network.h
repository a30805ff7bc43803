/* A model and its workspace: weights, gradients and activations of one client, in one allocation.

   Weights lie as [fan_in][ld]: one row for each input of a linear layer, or for each of kernel x kernel x input
   channels of a convolution; `ld` is the leading dimension (simd.h), the number of outputs rounded up to whole vectors.
   Images lie with their channels last: [height][width][channels]. Padding, of rows and of images, is zero and stays
   so. */

#ifndef FEDSIM_NETWORK_H
#define FEDSIM_NETWORK_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "simd.h"
#include "task.h"
#include "team.h"

struct image_size {
    int64_t height, width, area;
};

struct layer {
    struct layer_spec spec;
    int64_t fan_in, ld, has_bias;
    real *weight, *bias;                     /* [fan_in][ld], [ld] */
    int64_t num_parts;                       /* of the gradient: GRADIENT_PARTS for a convolution, else 1 */
    real *weight_gradient, *bias_gradient;   /* [num_parts][fan_in][ld], [num_parts][ld]; 0: fused with the update */
    real *weight_velocity, *bias_velocity;   /* as weight and bias; 0: no momentum */
    real *weight_shift, *bias_shift;         /* as weight and bias; 0: nothing is added to the gradient */
    real *weight_transposed;                 /* for the input's gradient; 0: first layer */
    const real *input;                       /* [batch_size][input_stride] */
    int64_t input_stride, *input_row_offsets; /* linear: [batch_size] offset of each sample's input;
                                                 convolution: [output.area] offset of each pixel's window */

    /* Of a convolution only. Buffers of one sample exist once for each thread, or for each group of threads. */
    struct image_size padded_input, output, pooled;
    struct image_size padded_gradient; /* the output's gradient with kernel - 1 - padding zeros on each side */
    real *output_image;                /* [threads][output.area][ld] before pooling and ReLU */
    real *output_gradient;             /* [groups][output.area][ld] */
    real *argmax;                      /* [batch_size][pooled.area][ld] 0..3: which pixel of a window was passed on */
    real *padded_output_gradient;      /* [groups][padded_gradient.area][ld] */
    real *input_gradient;              /* [groups][height * width][leading dimension of `inputs`] */
    int64_t *gradient_row_offsets;     /* [height * width] windows in padded_output_gradient */
};

struct network {
    int64_t num_layers, num_convolutions, batch_size, num_threads;
    struct layer *layers;          /* [num_layers] */
    struct thread *threads;        /* [num_threads] */
    real *logits;                  /* [batch_size][ld of the last layer] */
    real *gradients[2];            /* [batch_size][widest ld], of linear layers' outputs: one is read, one written */
    int64_t *gradient_row_offsets; /* [num_layers][batch_size] */
};

static inline struct image_size image_size(int64_t height, int64_t width)
{
    return (struct image_size){height, width, height * width};
}

/* What convolutions and linear layers have in common. `fused_update`: the gradient is added to the weight at once and
   never stored. */
static inline struct layer plan_layer(struct arena *arena, const struct layer_spec *spec, int with_momentum,
                                      int fused_update, int is_first)
{
    int64_t pixels = spec->kernel ? spec->kernel * spec->kernel : 1;
    struct layer layer = {.spec = *spec, .fan_in = spec->inputs * pixels, .ld = leading_dimension(spec->outputs)};
    int64_t weights = layer.fan_in * layer.ld;
    layer.weight = arena_reals(arena, weights);
    layer.bias = arena_reals(arena, layer.ld);
    layer.num_parts = spec->kernel ? GRADIENT_PARTS : 1;
    if (!fused_update) layer.weight_gradient = arena_reals(arena, layer.num_parts * weights);
    if (!fused_update) layer.bias_gradient = arena_reals(arena, layer.num_parts * layer.ld);
    if (with_momentum) layer.weight_velocity = arena_reals(arena, weights);
    if (with_momentum) layer.bias_velocity = arena_reals(arena, layer.ld);
    if (!is_first)
        layer.weight_transposed = arena_reals(arena, pixels * layer.ld * leading_dimension(spec->inputs));
    return layer;
}

static inline void plan_convolution(struct arena *arena, struct layer *layer, int64_t batch_size, int64_t num_threads,
                                    int is_first)
{
    const struct layer_spec *spec = &layer->spec;
    int64_t margin = spec->kernel - 1 - spec->padding, groups = min_int(GRADIENT_PARTS, num_threads);
    layer->padded_input = image_size(spec->height + 2 * spec->padding, spec->width + 2 * spec->padding);
    layer->output = image_size(layer->padded_input.height - spec->kernel + 1,
                               layer->padded_input.width - spec->kernel + 1);
    layer->pooled = spec->pool ? image_size(layer->output.height / 2, layer->output.width / 2) : layer->output;
    layer->input_stride = layer->padded_input.area * spec->inputs;
    layer->input_row_offsets = arena_integers(arena, layer->output.area);
    layer->output_image = arena_reals(arena, num_threads * layer->output.area * layer->ld);
    layer->output_gradient = arena_reals(arena, groups * layer->output.area * layer->ld);
    layer->argmax = arena_reals(arena, batch_size * layer->pooled.area * layer->ld);
    if (is_first) return;
    layer->padded_gradient = image_size(layer->output.height + 2 * margin, layer->output.width + 2 * margin);
    layer->padded_output_gradient = arena_reals(arena, groups * layer->padded_gradient.area * layer->ld);
    layer->input_gradient = arena_reals(arena, groups * spec->height * spec->width * leading_dimension(spec->inputs));
    layer->gradient_row_offsets = arena_integers(arena, spec->height * spec->width);
}

/* Where the input of linear layer `l` lies. The first layer of all reads the task's samples where they are. */
static inline void plan_linear(struct arena *arena, struct layer *layer, int64_t batch_size, int is_first)
{
    layer->input_stride = is_first ? layer->spec.inputs : leading_dimension(layer->spec.inputs);
    layer->input_row_offsets = arena_integers(arena, batch_size);
}

/* Allocates a network for the task. Run once with an empty arena to learn the size, and once to hand out memory.
   `training`: weights will be updated. */
static inline void plan_network(struct arena *arena, struct network *network, const struct task *task, int training)
{
    int64_t widest = 0;
    *network = (struct network){.num_layers = task->num_layers, .batch_size = task->batch_size,
                                .num_threads = min_int(task->num_threads, MAX_THREADS)};
    network->layers = arena_alloc(arena, task->num_layers, sizeof(struct layer));
    for (int64_t l = 0; l < task->num_layers; l++) {
        const struct layer_spec *spec = task->layers + l;
        int with_momentum = training && task->momentum != 0;
        int fused_update = training && !with_momentum && !spec->kernel;
        struct layer layer = plan_layer(arena, spec, with_momentum, fused_update, l == 0);
        if (task->shift) layer.weight_shift = arena_reals(arena, layer.fan_in * layer.ld);
        if (task->shift) layer.bias_shift = arena_reals(arena, layer.ld);
        layer.has_bias = task->initial[2 * l + 1] != 0;
        if (!task->dropout_keys) layer.spec.dropout_rate = 0;
        if (spec->kernel)
            plan_convolution(arena, &layer, task->batch_size, network->num_threads, l == 0);
        else
            plan_linear(arena, &layer, task->batch_size, l == 0);
        layer.input = l || spec->kernel ? arena_reals(arena, task->batch_size * layer.input_stride) : task->samples;
        network->num_convolutions += spec->kernel > 0;
        if (!spec->kernel) widest = max_int(widest, max_int(layer.ld, layer.input_stride));
        if (arena->base) network->layers[l] = layer;
    }
    int64_t logits_ld = leading_dimension(task->layers[task->num_layers - 1].outputs);
    network->logits = arena_reals(arena, task->batch_size * logits_ld);
    for (int i = 0; i < 2; i++) network->gradients[i] = arena_reals(arena, task->batch_size * widest);
    network->gradient_row_offsets = arena_integers(arena, task->num_layers * task->batch_size);
    network->threads = arena_alloc(arena, network->num_threads, sizeof(struct thread));
}

/* Pixels behind each input channel in a row of torch's weight. */
static inline int64_t pixels_per_channel(const struct layer_spec *spec)
{
    return spec->kernel ? spec->kernel * spec->kernel : spec->height * spec->width;
}

/* The row of our weight, channels last, that holds element i = channel * pixels + pixel of a row of torch's weight. */
static inline int64_t channels_last(int64_t i, int64_t channels, int64_t pixels)
{
    return i % pixels * channels + i / pixels;
}

/* Copies given[0] and given[1], in torch's layout, to `weight` and `bias` of the layer's shapes. */
static inline void load_parameters(const struct layer *layer, const real *const *given, real *weight, real *bias)
{
    int64_t pixels = pixels_per_channel(&layer->spec), channels = layer->fan_in / pixels;
    for (int64_t i = 0; i < layer->fan_in; i++) {
        real *row = weight + channels_last(i, channels, pixels) * layer->ld;
        for (int64_t o = 0; o < layer->spec.outputs; o++) row[o] = given[0][o * layer->fan_in + i];
    }
    if (layer->has_bias) memcpy(bias, given[1], layer->spec.outputs * sizeof(real));
}

/* Copies `weight` and `bias` of the layer's shapes into torch's layout at result[0] and result[1], and subtracts
   subtrahend[0] and subtrahend[1] unless `subtrahend` is 0. */
static inline void store_parameters(const struct layer *layer, const real *weight, const real *bias,
                                    const real *const *subtrahend, real *const *result)
{
    int64_t pixels = pixels_per_channel(&layer->spec), channels = layer->fan_in / pixels;
    int64_t outputs = layer->spec.outputs;
    for (int64_t i = 0; i < layer->fan_in; i++) {
        const real *row = weight + channels_last(i, channels, pixels) * layer->ld;
        for (int64_t o = 0; o < outputs; o++) result[0][o * layer->fan_in + i] = row[o];
    }
    if (layer->has_bias) memcpy(result[1], bias, outputs * sizeof(real));
    if (!subtrahend) return;
    for (int64_t i = 0; i < layer->fan_in * outputs; i++) result[0][i] -= subtrahend[0][i];
    for (int64_t o = 0; layer->has_bias && o < outputs; o++) result[1][o] -= subtrahend[1][o];
}

/* Fills in the offsets at which products find the rows of a layer's input and of its output's gradient. */
static inline void set_row_offsets(struct layer *layer, int64_t batch_size)
{
    const struct layer_spec *spec = &layer->spec;
    for (int64_t b = 0; !spec->kernel && b < batch_size; b++) layer->input_row_offsets[b] = b * layer->input_stride;
    for (int64_t i = 0; spec->kernel && i < layer->output.area; i++) {
        int64_t y = i / layer->output.width, x = i % layer->output.width;
        layer->input_row_offsets[i] = (y * layer->padded_input.width + x) * spec->inputs;
    }
    for (int64_t i = 0; layer->gradient_row_offsets && i < spec->height * spec->width; i++) {
        int64_t y = i / spec->width, x = i % spec->width;
        layer->gradient_row_offsets[i] = (y * layer->padded_gradient.width + x) * layer->ld;
    }
}

/* A network with the task's initial parameters, to be released by free(); 0 if there is no memory. */
static inline struct network *create_network(const struct task *task, int training)
{
    struct arena arena = {0};
    struct network plan;
    arena_alloc(&arena, 1, sizeof(struct network));
    plan_network(&arena, &plan, task, training);
    arena.base = arena.overflow ? 0 : aligned_alloc(CACHE_LINE, arena.used);
    if (!arena.base) return 0;
    memset(arena.base, 0, arena.used);
    arena.used = 0;
    struct network *network = arena_alloc(&arena, 1, sizeof(struct network));
    plan_network(&arena, network, task, training);
    for (int64_t l = 0; l < network->num_layers; l++) {
        int64_t *offsets = network->gradient_row_offsets + l * network->batch_size;
        struct layer *layer = network->layers + l;
        load_parameters(layer, task->initial + 2 * l, layer->weight, layer->bias);
        if (task->shift) load_parameters(layer, task->shift + 2 * l, layer->weight_shift, layer->bias_shift);
        set_row_offsets(layer, network->batch_size);
        for (int64_t b = 0; b < network->batch_size; b++) offsets[b] = b * network->layers[l].ld;
    }
    return network;
}

#endif
