/* Softmax cross-entropy. */

#ifndef FEDSIM_LOSS_H
#define FEDSIM_LOSS_H

#include <stdint.h>
#include <string.h>

#include "elementary.h"
#include "network.h"
#include "simd.h"
#include "team.h"

/* losses[b] = -log softmax(logits of b)[label of b], and network->gradients[0] = scale (softmax - one-hot label), the
   gradient of `scale` times the sum of the losses, for these samples of a batch at `positions`. */
static inline void cross_entropy(const struct network *network, struct range samples, const int64_t *labels,
                                 const int64_t *positions, real scale, real *losses)
{
    const struct layer *layer = network->layers + network->num_layers - 1;
    int64_t classes = layer->spec.outputs;
    for (int64_t b = samples.first; b < samples.end; b++) {
        const real *logits = network->logits + b * layer->ld;
        real *gradient = network->gradients[0] + b * layer->ld, maximum = logits[0], total = 0;
        int64_t label = labels[positions[b]];
        memset(gradient, 0, layer->ld * sizeof(real));
        for (int64_t c = 1; c < classes; c++) maximum = logits[c] > maximum ? logits[c] : maximum;
        for (int64_t c = 0; c < classes; c++) gradient[c] = exponential(logits[c] - maximum);
        for (int64_t c = 0; c < classes; c++) total += gradient[c];
        for (int64_t c = 0; c < classes; c++) gradient[c] = (gradient[c] / total - (c == label)) * scale;
        losses[b] = logarithm(total) - (logits[label] - maximum);
    }
}

enum { LOSS_BLOCK = 64 }; /* samples that go through one loop side by side */

/* losses[i] = -log softmax(logits of sample i)[label] of `count` <= LOSS_BLOCK samples, logits [count][classes]: to the
   bit what cross_entropy gives. */
static inline void block_losses(const real *logits, const int64_t *labels, int64_t count, int64_t classes, real *losses)
{
    real maximum[LOSS_BLOCK], total[LOSS_BLOCK] = {0}, column[LOSS_BLOCK] = {0};
    for (int64_t i = 0; i < count; i++) maximum[i] = logits[i * classes];
    for (int64_t c = 1; c < classes; c++)
        for (int64_t i = 0; i < count; i++)
            maximum[i] = logits[i * classes + c] > maximum[i] ? logits[i * classes + c] : maximum[i];
    for (int64_t i = count; i < LOSS_BLOCK; i++) maximum[i] = 0;
    for (int64_t c = 0; c < classes; c++) {
        for (int64_t i = 0; i < count; i++) column[i] = logits[i * classes + c];
        for (int64_t i = 0; i < LOSS_BLOCK; i++) total[i] += exponential(column[i] - maximum[i]);
    }
    for (int64_t i = 0; i < count; i++) losses[i] = logarithm(total[i]) - (logits[i * classes + labels[i]] - maximum[i]);
}

#endif
