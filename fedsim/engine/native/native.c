/* Local training, gradients and outputs of a chain of convolutions, 2 x 2 max poolings, linear layers, dropouts and
   ReLUs with softmax cross-entropy, for one client in one call. A call touches nothing but its arguments, so calls for
   several clients may run at the same time. Each returns an `enum status`. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "convolution.h"
#include "elementary.h"
#include "gemm.h"
#include "linear.h"
#include "loss.h"
#include "network.h"
#include "sgd.h"
#include "task.h"
#include "team.h"

#if defined(__clang__)
const char *const description = "clang " __clang_version__ ", " INSTRUCTIONS;
#else
const char *const description = "gcc " __VERSION__ ", " INSTRUCTIONS;
#endif

/* Makes some samples of a step's batch the input of the first layer: images are copied, vectors are read in place. */
static void load_batch(const struct thread *thread, int64_t step, struct range samples)
{
    const struct task *task = thread->task;
    const struct layer *first = thread->network->layers;
    const int64_t *positions = task->positions + step * task->batch_size;
    int64_t size = first->spec.inputs * first->spec.height * first->spec.width;
    for (int64_t b = samples.first; b < samples.end; b++)
        if (first->spec.kernel)
            load_image(first, b, task->samples + positions[b] * size);
        else
            first->input_row_offsets[b] = positions[b] * size;
}

/* Logits of the thread's share of a step's samples, which it returns. */
static struct range forward(const struct thread *thread, int64_t step, int with_dropout)
{
    const struct network *network = thread->network;
    int64_t batch = thread->task->counts[step];
    uint64_t key = with_dropout ? (uint64_t)thread->task->dropout_keys[step] : 0;
    struct range rows = team_share(thread, batch, TILE_ROWS);
    struct range images = network->num_convolutions ? team_share(thread, batch, 1) : rows;
    load_batch(thread, step, images);
    for (int64_t b = images.first; b < images.end; b++)
        for (int64_t l = 0; l < network->num_convolutions; l++) {
            const struct layer *layer = network->layers + l;
            convolution_forward(thread, layer, b);
            if (with_dropout && layer->spec.dropout_rate != 0) convolution_dropout(layer, b, key);
        }
    if (network->num_convolutions) team_barrier(thread);
    for (int64_t l = network->num_convolutions; l < network->num_layers; l++) {
        const struct layer *layer = network->layers + l;
        real *output = l + 1 < network->num_layers ? (real *)layer[1].input : network->logits;
        linear_forward(layer, rows, output);
        if (output == network->logits) break;
        if (with_dropout && layer->spec.dropout_rate != 0) linear_dropout(layer, output, rows, key);
        relu(output + rows.first * layer->ld, (rows.end - rows.first) * layer->ld);
    }
    return rows;
}

/* Backward pass through linear layer l: gradient = beta gradient + that of the batch, or, where the layer stores no
   gradient, w = shrink w + that of the batch (sgd.h). Writes the input's gradient unless l is 0. */
static void linear_backward(const struct thread *thread, int64_t l, int64_t batch, const real *output_gradient,
                            real *input_gradient, real beta)
{
    const struct task *task = thread->task;
    const struct layer *layer = thread->network->layers + l;
    const int64_t *offsets = thread->network->gradient_row_offsets + l * thread->network->batch_size;
    real *weight = layer->weight_gradient, *bias = layer->bias_gradient;
    if (!weight) weight = layer->weight, bias = layer->bias, beta = shrink(task);
    if (l) transpose_weight(layer, team_share(thread, layer->spec.outputs, 1));
    team_barrier(thread); /* output_gradient and weight_transposed are complete; the forward pass is over */
    if (l) linear_input_gradient(layer, offsets, team_share(thread, batch, TILE_ROWS), output_gradient, input_gradient);
    linear_weight_gradient(layer, batch, team_share(thread, layer->fan_in, TILE_ROWS), output_gradient, weight, beta);
    struct range columns = team_share(thread, layer->has_bias ? layer->ld : 0, SIMD_WIDTH);
    bias_gradient(layer, batch, columns, output_gradient, bias, beta);
}

static void clear(real *values, struct range elements)
{
    memset(values + elements.first, 0, (elements.end - elements.first) * sizeof(real));
}

/* The convolutions' gradients of one part of the batch, which may hold no samples: added to what is there if `beta` is
   1, in place of it if 0. `gradient` is that of the first linear layer's input. */
static void part_backward(const struct thread *thread, int64_t part, int64_t batch, const real *gradient, real beta)
{
    const struct network *network = thread->network;
    struct range samples = part_samples(part, batch);
    for (int64_t l = 0; beta == 0 && l < network->num_convolutions; l++) {
        const struct layer *layer = network->layers + l;
        int64_t weights = layer->fan_in * layer->ld;
        clear(layer->weight_gradient + part * weights, group_share(thread, weights, SIMD_WIDTH));
        clear(layer->bias_gradient + part * layer->ld, group_share(thread, layer->ld, SIMD_WIDTH));
    }
    for (int64_t b = samples.first; b < samples.end; b++)
        convolutions_backward(thread, b, gradient + b * network->layers[network->num_convolutions].input_stride, part);
}

/* Gradients of all layers from network->gradients[0], that of the logits. For `beta` see linear_backward. */
static void backward(const struct thread *thread, int64_t batch, real beta)
{
    const struct network *network = thread->network;
    struct range parts = group_parts(thread);
    int64_t current = 0;
    for (int64_t l = network->num_layers - 1; l >= network->num_convolutions; l--, current = 1 - current)
        linear_backward(thread, l, batch, network->gradients[current], network->gradients[1 - current], beta);
    for (int64_t l = 1; l < network->num_convolutions; l++) {
        const struct layer *layer = network->layers + l;
        rotate_kernel(layer, team_share(thread, layer->spec.kernel * layer->spec.kernel, 1));
    }
    team_barrier(thread);
    if (!network->num_convolutions) return;
    for (int64_t part = parts.first; part < parts.end; part++)
        part_backward(thread, part, batch, network->gradients[current], beta);
    team_barrier(thread);
}

static void train_thread(const struct thread *thread)
{
    const struct task *task = thread->task;
    for (int64_t step = 0; step < task->num_steps; step++) {
        int64_t first = step * task->batch_size, batch = task->counts[step];
        struct range rows = forward(thread, step, task->dropout_keys != 0);
        cross_entropy(thread->network, rows, task->labels, task->positions + first, gradient_scale(task, batch),
                      task->losses + first);
        backward(thread, batch, 0);
        update_parameters(thread);
        team_barrier(thread);
    }
}

static void gradient_thread(const struct thread *thread)
{
    const struct task *task = thread->task;
    for (int64_t step = 0; step < task->num_steps; step++) {
        int64_t first = step * task->batch_size;
        struct range rows = forward(thread, step, 0);
        cross_entropy(thread->network, rows, task->labels, task->positions + first, 1, task->losses + first);
        backward(thread, task->counts[step], 1);
    }
}

static void outputs_thread(const struct thread *thread)
{
    const struct task *task = thread->task;
    const struct layer *last = thread->network->layers + thread->network->num_layers - 1;
    int64_t outputs = last->spec.outputs;
    real *result = task->result[0];
    for (int64_t step = 0; step < task->num_steps; step++) {
        struct range rows = forward(thread, step, 0);
        for (int64_t b = rows.first; b < rows.end; b++)
            memcpy(result + b * outputs, thread->network->logits + b * last->ld, outputs * sizeof(real));
        result += task->counts[step] * outputs;
        team_barrier(thread); /* the next step overwrites the layers' inputs */
    }
}

/* Checks the task, builds its network and runs it. With STATUS_OK `network` is to be released by free(). */
static enum status run_task(const struct task *task, int training, int with_labels,
                            void (*run)(const struct thread *), struct network **network)
{
    enum status status = check_task(task, with_labels);
    if (status != STATUS_OK) return status;
    *network = create_network(task, training);
    if (!*network) return STATUS_NO_MEMORY;
    run_team((*network)->threads, (*network)->num_threads, *network, task, run);
    return STATUS_OK;
}

/* SGD on the task's batches, with dropout. `result`: final minus initial parameters; `velocity`: the final momentum
   buffers, left as it is without momentum; `losses`: of each sample before its step; `finite`: whether `result` is. */
int train(const struct task *task)
{
    struct network *network;
    enum status status = run_task(task, 1, 1, train_thread, &network);
    if (status != STATUS_OK) return status;
    *task->finite = 1;
    for (int64_t l = 0; l < network->num_layers; l++) {
        const struct layer *layer = network->layers + l;
        store_parameters(layer, layer->weight, layer->bias, task->initial + 2 * l, task->result + 2 * l);
        *task->finite &= are_finite(task->result[2 * l], layer->fan_in * layer->spec.outputs) &
                         are_finite(task->result[2 * l + 1], layer->has_bias ? layer->spec.outputs : 0);
        if (task->velocity && layer->weight_velocity)
            store_parameters(layer, layer->weight_velocity, layer->bias_velocity, 0, task->velocity + 2 * l);
    }
    free(network);
    return status;
}

/* `result`: the gradient of the sum of all samples' cross-entropies, without dropout; `losses`: these. */
int gradient(const struct task *task)
{
    struct network *network;
    enum status status = run_task(task, 0, 1, gradient_thread, &network);
    if (status != STATUS_OK) return status;
    for (int64_t l = 0; l < network->num_layers; l++) {
        const struct layer *layer = network->layers + l;
        int64_t weights = layer->fan_in * layer->ld;
        sum_parts((struct range){0, weights}, layer->weight_gradient, layer->num_parts, weights);
        sum_parts((struct range){0, layer->ld}, layer->bias_gradient, layer->num_parts, layer->ld);
        store_parameters(layer, layer->weight_gradient, layer->bias_gradient, 0, task->result + 2 * l);
    }
    free(network);
    return status;
}

/* `result[0]` [counts[0] + counts[1] + ...][outputs]: the logits of all samples, without dropout. */
int outputs(const struct task *task)
{
    struct network *network;
    enum status status = run_task(task, 0, 0, outputs_thread, &network);
    if (status == STATUS_OK) free(network);
    return status;
}

/* `hits` [samples]: 1 where the first of the highest `logits` [samples][classes], or the first NaN, is that of the
   label, else 0. */
int hits_of_logits(const real *logits, const int64_t *labels, int64_t samples, int64_t classes, uint8_t *hits)
{
    for (int64_t i = 0; i < samples; i++, logits += classes) {
        int64_t best = 0;
        for (int64_t c = 1; c < classes; c++)
            if (!(logits[c] <= logits[best]) & (logits[best] == logits[best])) best = c;
        hits[i] = best == labels[i];
    }
    return STATUS_OK;
}

/* `losses` [samples]: the cross-entropies of `logits` [samples][classes] and `labels` [samples]. */
int losses_of_logits(const real *logits, const int64_t *labels, int64_t samples, int64_t classes, real *losses)
{
    for (int64_t i = 0; i < samples; i++)
        if (!in_range(labels[i], 0, classes - 1)) return STATUS_BAD_LABEL;
    for (int64_t first = 0; first < samples; first += LOSS_BLOCK)
        block_losses(logits + first * classes, labels + first, min_int(LOSS_BLOCK, samples - first), classes,
                     losses + first);
    return STATUS_OK;
}
