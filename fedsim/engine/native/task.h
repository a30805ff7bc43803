/* The arguments of the library's functions, their status codes, and the checks that keep indexes within their arrays.

   fedsim/engine/native/calls.py declares the same structures and codes for ctypes: change both together. */

#ifndef FEDSIM_TASK_H
#define FEDSIM_TASK_H

#include <stdint.h>

#include "simd.h"

enum status {
    STATUS_OK = 0,
    STATUS_NO_MEMORY = 1,
    STATUS_BAD_LAYER = 2,    /* a layer's sizes are out of range, or are not those of the layer before it */
    STATUS_BAD_SIZE = 3,     /* num_steps, batch_size or num_threads is out of range */
    STATUS_BAD_COUNT = 4,    /* a count is not in 0..batch_size */
    STATUS_BAD_POSITION = 5, /* a position is not in 0..num_samples - 1 */
    STATUS_BAD_LABEL = 6,    /* a label is not in 0..outputs - 1 of the last layer */
};

/* A convolution of stride 1 with a square kernel, followed by 2 x 2 max pooling (if `pool`), ReLU and dropout; or a
   linear layer, followed by dropout and ReLU, the last one by nothing. */
struct layer_spec {
    int64_t inputs, outputs; /* of a convolution: channels */
    int64_t dropout_index;   /* which of the model's dropouts is behind the layer, where dropout_rate is not 0 */
    int64_t kernel;          /* side of the kernel; 0: a linear layer */
    int64_t padding;         /* zeros around the image on each side; less than `kernel` */
    int64_t pool;            /* 0 or 1 */
    int64_t height, width;   /* of the input image; behind the last convolution that of its output; else 1 */
    double dropout_rate;
};

/* Local training or evaluation of one model on one client's batches. `initial`, `shift`, `result` and `velocity` are
   arrays of 2 * num_layers pointers to weight and bias (0: no bias) of layer after layer, in torch's layout:
   [outputs][inputs], or [outputs][inputs][kernel][kernel]. */
struct task {
    int64_t num_layers, num_steps, batch_size; /* batch_size: of the largest batch */
    int64_t num_samples;
    int64_t num_threads; /* that share the work; no more than MAX_THREADS are used */
    const struct layer_spec *layers; /* [num_layers], convolutions first */
    const real *const *initial;
    const real *const *shift;    /* added to the gradient of each step; 0: nothing is */
    const real *samples;         /* [num_samples][inputs of the first layer], images with channels first */
    const int64_t *labels;       /* [num_samples]; not read by `outputs` */
    const int64_t *positions;    /* [num_steps][batch_size] rows of `samples` and `labels` */
    const int64_t *counts;       /* [num_steps] how many positions of a step are valid */
    const int64_t *dropout_keys; /* [num_steps]; 0: no dropout */
    double learning_rate, weight_decay, momentum;
    int64_t nesterov;
    real *const *result;
    real *const *velocity; /* 0: not wanted */
    real *losses;          /* [num_steps][batch_size], cross-entropy of each valid position */
    int64_t *finite;       /* of `train`: receives 1 if all of `result` is finite, else 0 */
};

enum { SIZE_LIMIT = 1 << 30 };

static inline int in_range(int64_t x, int64_t low, int64_t high) { return low <= x && x <= high; }

/* Whether every size of a layer lies in its range, the kernel fits into the padded image and pooling leaves a pixel. */
static inline int layer_is_sound(const struct layer_spec *layer)
{
    if (!in_range(layer->inputs, 1, SIZE_LIMIT) || !in_range(layer->outputs, 1, SIZE_LIMIT)) return 0;
    if (!in_range(layer->height, 1, SIZE_LIMIT) || !in_range(layer->width, 1, SIZE_LIMIT)) return 0;
    if (!in_range(layer->kernel, 0, SIZE_LIMIT) || !in_range(layer->pool, 0, 1)) return 0;
    if (!(layer->dropout_rate >= 0 && layer->dropout_rate <= 1)) return 0;
    if (!layer->kernel) return !layer->padding && !layer->pool;
    int64_t shortest = min_int(layer->height, layer->width) + 2 * layer->padding - layer->kernel + 1;
    return in_range(layer->padding, 0, layer->kernel - 1) && shortest >= 1 + layer->pool;
}

static inline int64_t pooled_side(const struct layer_spec *layer, int64_t side)
{
    return (side + 2 * layer->padding - layer->kernel + 1) / (1 + layer->pool);
}

/* Whether `next` takes what `layer` gives. */
static inline int layers_fit(const struct layer_spec *layer, const struct layer_spec *next)
{
    if (!layer->kernel) return !next->kernel && next->inputs == layer->outputs && next->height * next->width == 1;
    int64_t channels = next->kernel ? next->inputs : next->inputs / (next->height * next->width);
    int whole = next->kernel || next->inputs % (next->height * next->width) == 0;
    return whole && channels == layer->outputs && next->height == pooled_side(layer, layer->height) &&
           next->width == pooled_side(layer, layer->width);
}

static inline enum status check_layers(const struct task *task)
{
    if (task->num_layers < 1) return STATUS_BAD_LAYER;
    const struct layer_spec *first = task->layers, *last = task->layers + task->num_layers - 1;
    for (const struct layer_spec *layer = first; layer <= last; layer++)
        if (!layer_is_sound(layer)) return STATUS_BAD_LAYER;
    for (const struct layer_spec *layer = first; layer < last; layer++)
        if (!layers_fit(layer, layer + 1)) return STATUS_BAD_LAYER;
    int flat = first->kernel || first->height * first->width == 1;
    return !last->kernel && flat ? STATUS_OK : STATUS_BAD_LAYER;
}

/* `with_labels`: labels are read too. */
static inline enum status check_batch(const struct task *task, int64_t step, int with_labels)
{
    const int64_t *positions = task->positions + step * task->batch_size;
    int64_t count = task->counts[step], outputs = task->layers[task->num_layers - 1].outputs;
    if (!in_range(count, 0, task->batch_size)) return STATUS_BAD_COUNT;
    for (int64_t b = 0; b < count; b++) {
        if (!in_range(positions[b], 0, task->num_samples - 1)) return STATUS_BAD_POSITION;
        if (with_labels && !in_range(task->labels[positions[b]], 0, outputs - 1)) return STATUS_BAD_LABEL;
    }
    return STATUS_OK;
}

/* STATUS_OK, or which rule the task breaks. Positions and labels that no batch uses are not read. */
static inline enum status check_task(const struct task *task, int with_labels)
{
    enum status status = check_layers(task);
    int steps_fit = in_range(task->num_steps, 0, SIZE_LIMIT) && in_range(task->batch_size, 1, SIZE_LIMIT);
    if (status == STATUS_OK && !(steps_fit && task->num_threads >= 1)) status = STATUS_BAD_SIZE;
    for (int64_t step = 0; status == STATUS_OK && step < task->num_steps; step++)
        status = check_batch(task, step, with_labels);
    return status;
}

#endif
