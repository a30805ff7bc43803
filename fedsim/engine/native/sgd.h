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

/* One step for some elements: g = gradient + decay w; velocity = momentum velocity + g;
   w -= lr (nesterov ? g + momentum velocity : velocity). Without momentum `velocity` is 0 and w -= lr g. */
static inline void sgd_update(struct range elements, real *w, real *velocity, const real *gradient,
                              const struct task *task)
{
    real lr = task->learning_rate, decay = task->weight_decay, momentum = task->momentum;
    real shrink = 1 - task->learning_rate * task->weight_decay;
    if (!velocity)
        for (int64_t i = elements.first; i < elements.end; i++) w[i] = shrink * w[i] - lr * gradient[i];
    for (int64_t i = elements.first; velocity && i < elements.end; i++) {
        real g = gradient[i] + decay * w[i];
        velocity[i] = momentum * velocity[i] + g;
        w[i] -= lr * (task->nesterov ? g + momentum * velocity[i] : velocity[i]);
    }
}

/* The thread's share of the step of all layers whose update is not fused with their gradient. */
static inline void update_parameters(const struct thread *thread)
{
    const struct network *network = thread->network;
    for (int64_t l = 0; l < network->num_layers; l++) {
        const struct layer *layer = network->layers + l;
        int64_t weights = layer->fan_in * layer->ld;
        struct range elements = team_share(thread, weights, SIMD_WIDTH);
        struct range columns = team_share(thread, layer->has_bias ? layer->ld : 0, SIMD_WIDTH);
        if (!layer->weight_gradient) continue;
        sum_parts(elements, layer->weight_gradient, layer->num_parts, weights);
        sum_parts(columns, layer->bias_gradient, layer->num_parts, layer->ld);
        sgd_update(elements, layer->weight, layer->weight_velocity, layer->weight_gradient, thread->task);
        sgd_update(columns, layer->bias, layer->bias_velocity, layer->bias_gradient, thread->task);
    }
}

#endif
