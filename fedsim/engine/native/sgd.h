/* The update rule of torch.optim.SGD, and the sum of a gradient's parts that comes before it. */

#ifndef FEDSIM_SGD_H
#define FEDSIM_SGD_H

#include <stdint.h>

#include "network.h"
#include "simd.h"
#include "task.h"
#include "team.h"

/* values[0] += values[1] + values[2] + ..., in this order, for some elements of values [parts][size]. */
static inline void sum_parts(struct range elements, real *values, int64_t parts, int64_t size)
{
    for (int64_t p = 1; p < parts; p++)
        for (int64_t i = elements.first; i < elements.end; i++) values[i] += values[p * size + i];
}

/* What the gradient of the sum of a batch's losses is multiplied by, before it goes through the layers: 1 / batch with
   momentum; -lr / batch without, so that it is what is added to the parameters. */
static inline real gradient_scale(const struct task *task, int64_t batch)
{
    return (task->momentum != 0 ? 1 : -task->learning_rate) / batch;
}

/* What weight decay leaves of a parameter in a step without momentum. */
static inline real shrink(const struct task *task) { return 1 - task->learning_rate * task->weight_decay; }

/* One step for some elements. With momentum: g = gradient + decay w; velocity = momentum velocity + g;
   w -= lr (nesterov ? g + momentum velocity : velocity). Without (`velocity` is 0): w = shrink w + gradient, which is
   multiplied by -lr already. */
static inline void sgd_update(struct range elements, real *w, real *velocity, const real *gradient,
                              const struct task *task)
{
    real lr = task->learning_rate, decay = task->weight_decay, momentum = task->momentum, kept = shrink(task);
    if (!velocity)
        for (int64_t i = elements.first; i < elements.end; i++) w[i] = fused_add(kept, w[i], gradient[i]);
    for (int64_t i = elements.first; velocity && i < elements.end; i++) {
        real g = fused_add(decay, w[i], gradient[i]);
        velocity[i] = fused_add(momentum, velocity[i], g);
        w[i] = fused_add(-lr, task->nesterov ? fused_add(momentum, velocity[i], g) : velocity[i], w[i]);
    }
}

/* Adds the shift to some elements of the gradient, or to those of the parameters that already have the gradient added:
   as scaled as that is. */
static inline void add_shift(struct range elements, real *values, const real *shift, const struct task *task)
{
    real scale = gradient_scale(task, 1);
    for (int64_t i = elements.first; i < elements.end; i++) values[i] = fused_add(scale, shift[i], values[i]);
}

/* The thread's share of what is left of the step behind the gradients: the shift, if there is one, and the update of
   all layers where it is not fused with the gradient. */
static inline void update_parameters(const struct thread *thread)
{
    const struct network *network = thread->network;
    for (int64_t l = 0; l < network->num_layers; l++) {
        const struct layer *layer = network->layers + l;
        int64_t weights = layer->fan_in * layer->ld;
        struct range elements = team_share(thread, weights, SIMD_WIDTH);
        struct range columns = team_share(thread, layer->has_bias ? layer->ld : 0, SIMD_WIDTH);
        int fused = !layer->weight_gradient;
        if (!fused) sum_parts(elements, layer->weight_gradient, layer->num_parts, weights);
        if (!fused) sum_parts(columns, layer->bias_gradient, layer->num_parts, layer->ld);
        if (layer->weight_shift) {
            add_shift(elements, fused ? layer->weight : layer->weight_gradient, layer->weight_shift, thread->task);
            add_shift(columns, fused ? layer->bias : layer->bias_gradient, layer->bias_shift, thread->task);
        }
        if (fused) continue;
        sgd_update(elements, layer->weight, layer->weight_velocity, layer->weight_gradient, thread->task);
        sgd_update(columns, layer->bias, layer->bias_velocity, layer->bias_gradient, thread->task);
    }
}

#endif
