/* Linear layers, dropout and ReLU: forward and backward passes over a range of samples, inputs or outputs, so that a
   team of threads can divide them. */

#ifndef FEDSIM_LINEAR_H
#define FEDSIM_LINEAR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "gemm.h"
#include "network.h"
#include "simd.h"
#include "team.h"

/* The finaliser of SplitMix64 (Steele, Lea and Flood, 2014). */
static inline uint64_t splitmix64_mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* Inverted dropout of values [count]: 0 with probability dropout_rate, else value / (1 - rate). The mask is a function
   of the step's key, the layer and the element: that of fedsim/engine/training_layers.py. The element is the value's
   place in torch's layout of the batch: `first` for the first value, and `step` more for each next one. */
static inline void apply_dropout(const struct layer *layer, real *values, int64_t count, uint64_t key, int64_t first,
                                 int64_t step)
{
    const uint64_t golden = 0x9E3779B97F4A7C15u, threshold = (uint64_t)llrint(layer->spec.dropout_rate * (1 << 24));
    uint64_t start = splitmix64_mix(key + (1 + ((uint64_t)layer->spec.dropout_index << 20)) * golden);
    real scale = 1 / (1 - layer->spec.dropout_rate);
    for (int64_t i = 0; i < count; i++) {
        uint64_t bits = splitmix64_mix(start + (uint64_t)(first + i * step) * golden);
        values[i] *= bits >> 40 >= threshold ? scale : 0;
    }
}

/* Dropout of the samples' outputs [batch][ld]. */
static inline void linear_dropout(const struct layer *layer, real *output, struct range samples, uint64_t key)
{
    int64_t outputs = layer->spec.outputs;
    for (int64_t b = samples.first; b < samples.end; b++)
        apply_dropout(layer, output + b * layer->ld, outputs, key, b * outputs, 1);
}

/* max(0, value); NaN stays NaN, as in torch. */
static inline void relu(real *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) values[i] = values[i] < 0 ? 0 : values[i];
}

/* output [batch][ld] = input W + b, for these samples. */
static inline void linear_forward(const struct layer *layer, struct range samples, real *output)
{
    gemm_distant_rows(
        (struct gemm){.a = layer->input, .row_offsets = layer->input_row_offsets, .b = layer->weight,
                      .bias = layer->bias, .c = output, .n = layer->ld, .k = layer->fan_in, .ld = layer->ld,
                      .alpha = 1},
        samples.first, samples.end);
}

/* weight_transposed [outputs][input_stride] = W', for these outputs, in blocks of inputs: their rows stay in the cache
   until the last output. */
static inline void transpose_weight(const struct layer *layer, struct range outputs)
{
    for (int64_t first = 0; first < layer->fan_in; first += LINE_REALS)
        for (int64_t o = outputs.first; o < outputs.end; o++)
            for (int64_t i = first; i < min_int(first + LINE_REALS, layer->fan_in); i++)
                layer->weight_transposed[o * layer->input_stride + i] = layer->weight[i * layer->ld + o];
}

/* input_gradient [batch][input_stride] = (output_gradient W') / (1 - rate) where the input is positive or NaN, else 0,
   for these samples: the input is what ReLU and dropout with this rate have left, and where either of them has set it
   to 0 no gradient passes. */
static inline void linear_input_gradient(const struct layer *layer, const int64_t *gradient_row_offsets,
                                         struct range samples, const real *output_gradient, real *input_gradient)
{
    real scale = 1 / (1 - layer[-1].spec.dropout_rate);
    gemm_rows(
        (struct gemm){.a = output_gradient, .row_offsets = gradient_row_offsets, .b = layer->weight_transposed,
                      .c = input_gradient, .n = layer->input_stride, .k = layer->spec.outputs,
                      .ld = layer->input_stride, .alpha = scale},
        samples.first, samples.end);
    for (int64_t i = samples.first * layer->input_stride; i < samples.end * layer->input_stride; i++)
        input_gradient[i] = !(layer->input[i] <= 0) ? input_gradient[i] : 0;
}

/* weight [fan_in][ld] = beta weight + input' output_gradient, for these inputs (rows of the weight). */
static inline void linear_weight_gradient(const struct layer *layer, int64_t batch, struct range inputs,
                                          const real *output_gradient, real *weight, real beta)
{
    gemm_transposed_rows(
        (struct gemm){.a = layer->input, .row_offsets = layer->input_row_offsets, .b = output_gradient, .c = weight,
                      .n = layer->ld, .k = batch, .ld = layer->ld, .beta = beta, .alpha = 1},
        inputs.first, inputs.end);
}

/* bias = beta bias + the sum of the rows of output_gradient [rows][ld], for these columns. */
static inline void bias_gradient(const struct layer *layer, int64_t rows, struct range columns,
                                 const real *output_gradient, real *bias, real beta)
{
    for (int64_t o = columns.first; o < columns.end; o++) bias[o] *= beta;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t o = columns.first; o < columns.end; o++) bias[o] += output_gradient[row * layer->ld + o];
}

#endif
