/* Convolutions, 2 x 2 max pooling, ReLU and dropout, one sample after another, so that a sample's images stay in the
   cache.

   The input pixels under one row of the kernel are contiguous in memory. A convolution is therefore one matrix product
   for each row of the kernel, whose A [output pixels][kernel * inputs] are overlapping windows of the input image:
   nothing is unfolded (im2col). */

#ifndef FEDSIM_CONVOLUTION_H
#define FEDSIM_CONVOLUTION_H

#include <stdint.h>
#include <string.h>

#include "gemm.h"
#include "linear.h"
#include "network.h"
#include "simd.h"
#include "team.h"

/* Copies a sample x [inputs][height][width] into the first layer's input of sample b, channels last and padded. */
static inline void load_image(const struct layer *layer, int64_t b, const real *x)
{
    const struct layer_spec *spec = &layer->spec;
    real *image = (real *)layer->input + b * layer->input_stride;
    for (int64_t c = 0; c < spec->inputs; c++)
        for (int64_t i = 0; i < spec->height; i++)
            for (int64_t j = 0; j < spec->width; j++) {
                int64_t pixel = (i + spec->padding) * layer->padded_input.width + j + spec->padding;
                image[pixel * spec->inputs + c] = *x++;
            }
}

/* Pixel (i, j) of sample b in the input of the next layer. */
static inline real *next_input_pixel(const struct layer *layer, int64_t b, int64_t i, int64_t j)
{
    const struct layer *next = layer + 1;
    int64_t padding = next->spec.padding, width = next->spec.kernel ? next->padded_input.width : layer->pooled.width;
    return (real *)next->input + b * next->input_stride + ((i + padding) * width + j + padding) * layer->spec.outputs;
}

static inline real *argmax_pixel(const struct layer *layer, int64_t b, int64_t i, int64_t j)
{
    return layer->argmax + ((b * layer->pooled.height + i) * layer->pooled.width + j) * layer->ld;
}

/* Where x replaces the maximum so far: it is greater, or NaN. */
INLINE mask replaces_maximum(vec x, vec maximum) { return (x > maximum) | (x != x); }

/* value [channels] = ReLU of the maximum of four pixels, argmax [channels] = 0..3, the first of equal maxima, the last
   NaN if there is one. Pixels and argmax have whole vectors of channels. */
static inline void max_pool_relu(const real *pixel0, const real *pixel1, const real *pixel2, const real *pixel3,
                                 int64_t channels, real *restrict value, real *restrict argmax)
{
    const real *pixels[4] = {pixel0, pixel1, pixel2, pixel3};
    const vec zeros = {0};
    for (int64_t c = 0; c < channels; c += SIMD_WIDTH) {
        vec maximum = *(const vec *)(pixel0 + c), index = zeros;
        UNROLL for (int p = 1; p < 4; p++) {
            vec x = *(const vec *)(pixels[p] + c);
            mask is_next = replaces_maximum(x, maximum);
            index = choose(is_next, zeros + (real)p, index);
            maximum = choose(is_next, x, maximum);
        }
        *(vec *)(argmax + c) = index;
        store_first(value + c, choose(maximum < zeros, zeros, maximum), channels - c);
    }
}

/* image [output.area][ld] = b + the sum over rows k of the kernel of windows_k W_k, for sample b. */
static inline void convolve(const struct layer *layer, int64_t b, real *image)
{
    int64_t row = layer->spec.kernel * layer->spec.inputs;
    gemm_rows(
        (struct gemm){.a = layer->input + b * layer->input_stride, .row_offsets = layer->input_row_offsets,
                      .b = layer->weight, .bias = layer->bias, .c = image, .n = layer->ld, .k = row, .ld = layer->ld,
                      .segments = layer->spec.kernel, .segment_step = layer->padded_input.width * layer->spec.inputs,
                      .alpha = 1},
        0, layer->output.area);
}

/* Convolution, pooling and ReLU of sample b, into the next layer's input. */
static inline void convolution_forward(const struct thread *thread, const struct layer *layer, int64_t b)
{
    int64_t outputs = layer->spec.outputs, ld = layer->ld, line = layer->output.width * ld;
    real *image = layer->output_image + thread->rank * layer->output.area * ld;
    convolve(layer, b, image);
    for (int64_t i = 0; i < layer->pooled.height; i++)
        for (int64_t j = 0; j < layer->pooled.width; j++) {
            const real *pixel = image + (layer->spec.pool ? 2 : 1) * (i * line + j * ld);
            real *value = next_input_pixel(layer, b, i, j);
            if (layer->spec.pool)
                max_pool_relu(pixel, pixel + ld, pixel + line, pixel + line + ld, outputs, value,
                              argmax_pixel(layer, b, i, j));
            else
                for (int64_t c = 0; c < outputs; c++) value[c] = pixel[c] < 0 ? 0 : pixel[c];
        }
}

/* Dropout of sample b in the next layer's input. Elements are counted with channels first, as torch has them. */
static inline void convolution_dropout(const struct layer *layer, int64_t b, uint64_t key)
{
    int64_t outputs = layer->spec.outputs, area = layer->pooled.area, width = layer->pooled.width;
    for (int64_t i = 0; i < layer->pooled.height; i++)
        for (int64_t j = 0; j < width; j++)
            apply_dropout(layer, next_input_pixel(layer, b, i, j), outputs, key, b * outputs * area + i * width + j,
                          area);
}

/* The gradients [channels] of the four pixels of a window from that of its maximum: passed on where ReLU and dropout
   passed the value (positive or NaN) and the pixel was the maximum, else 0. Pixels and argmax have whole vectors of
   channels. */
static inline void window_gradients(const real *value, const real *argmax, const real *gradient, int64_t channels,
                                    real *restrict pixel0, real *restrict pixel1, real *restrict pixel2,
                                    real *restrict pixel3)
{
    real *pixels[4] = {pixel0, pixel1, pixel2, pixel3};
    const vec zeros = {0};
    for (int64_t c = 0; c < channels; c += SIMD_WIDTH) {
        vec passed = load_first(gradient + c, channels - c), index = *(const vec *)(argmax + c);
        passed = choose(load_first(value + c, channels - c) <= zeros, zeros, passed);
        UNROLL for (int p = 0; p < 4; p++) *(vec *)(pixels[p] + c) = choose(index == zeros + (real)p, passed, zeros);
    }
}

/* The gradient of the convolution's output from that of the pooled image, for these rows of the pooled image of sample
   b. `pooled_gradient` has its pixels `stride` apart. The result's pixel (y, x) goes to
   gradient + (y * width + x) * ld. */
static inline void pool_relu_backward(const struct layer *layer, int64_t b, struct range rows,
                                      const real *pooled_gradient, int64_t stride, real *gradient, int64_t width)
{
    int64_t outputs = layer->spec.outputs, ld = layer->ld, line = width * ld;
    for (int64_t i = rows.first; i < rows.end; i++)
        for (int64_t j = 0; j < layer->pooled.width; j++) {
            const real *value = next_input_pixel(layer, b, i, j), *argmax = argmax_pixel(layer, b, i, j);
            const real *given = pooled_gradient + (i * layer->pooled.width + j) * stride;
            real *pixel = gradient + (layer->spec.pool ? 2 : 1) * (i * line + j * ld);
            if (layer->spec.pool)
                window_gradients(value, argmax, given, outputs, pixel, pixel + ld, pixel + line, pixel + line + ld);
            else
                for (int64_t c = 0; c < outputs; c++) pixel[c] = !(value[c] <= 0) ? given[c] : 0;
        }
}

/* Adds sample b's weight gradient, for these rows of the weight, and bias gradient, for these columns, to a part's. */
static inline void convolution_weight_gradient(const struct layer *layer, int64_t b, struct range rows,
                                               struct range columns, const real *output_gradient, int64_t part)
{
    int64_t row = layer->spec.kernel * layer->spec.inputs, ld = layer->ld;
    real *weight = layer->weight_gradient + part * layer->fan_in * ld;
    for (int64_t k = 0; k < layer->spec.kernel; k++) {
        int64_t first = min_int(row, rows.first > k * row ? rows.first - k * row : 0);
        int64_t end = min_int(row, rows.end > k * row ? rows.end - k * row : 0);
        gemm_transposed_rows(
            (struct gemm){.a = layer->input + b * layer->input_stride +
                               k * layer->padded_input.width * layer->spec.inputs,
                          .row_offsets = layer->input_row_offsets, .b = output_gradient, .c = weight + k * row * ld,
                          .n = ld, .k = layer->output.area, .ld = ld, .beta = 1, .alpha = 1},
            first, end);
    }
    if (layer->has_bias)
        bias_gradient(layer, layer->output.area, columns, output_gradient, layer->bias_gradient + part * ld, 1);
}

/* weight_transposed [kernel * kernel][ld][leading dimension of inputs]: the kernel rotated by 180 degrees, with inputs
   and outputs exchanged; convolving the padded output gradient with it gives the input gradient. For these pixels of
   the kernel. */
static inline void rotate_kernel(const struct layer *layer, struct range pixels)
{
    int64_t area = layer->spec.kernel * layer->spec.kernel, inputs = layer->spec.inputs;
    int64_t input_ld = leading_dimension(inputs);
    for (int64_t p = pixels.first; p < pixels.end; p++)
        for (int64_t c = 0; c < inputs; c++)
            for (int64_t o = 0; o < layer->spec.outputs; o++)
                layer->weight_transposed[((area - 1 - p) * layer->ld + o) * input_ld + c] =
                    layer->weight[(p * inputs + c) * layer->ld + o];
}

/* input_gradient [height * width][leading dimension of inputs], for these pixels, divided by what the dropout of the
   layer before keeps. */
static inline void convolution_input_gradient(const struct layer *layer, struct range pixels,
                                              const real *padded_output_gradient, real *input_gradient)
{
    int64_t input_ld = leading_dimension(layer->spec.inputs);
    gemm_rows(
        (struct gemm){.a = padded_output_gradient, .row_offsets = layer->gradient_row_offsets,
                      .b = layer->weight_transposed, .c = input_gradient, .n = input_ld,
                      .k = layer->spec.kernel * layer->ld, .ld = input_ld, .segments = layer->spec.kernel,
                      .segment_step = layer->padded_gradient.width * layer->ld,
                      .alpha = 1 / (1 - layer[-1].spec.dropout_rate)},
        pixels.first, pixels.end);
}

/* Backward pass of sample b through all convolutions, from the last to the first, adding their gradients to those of a
   part. `gradient` is that of the last convolution's pooled image. The threads of a group share the work. */
static inline void convolutions_backward(const struct thread *thread, int64_t b, const real *gradient, int64_t part)
{
    const struct network *network = thread->network;
    int64_t group = group_of(thread), stride = network->layers[network->num_convolutions - 1].spec.outputs;
    for (int64_t l = network->num_convolutions - 1; l >= 0; l--) {
        const struct layer *layer = network->layers + l;
        int64_t pixels = layer->spec.height * layer->spec.width, input_ld = leading_dimension(layer->spec.inputs);
        real *output_gradient = layer->output_gradient + group * layer->output.area * layer->ld;
        real *padded = l ? layer->padded_output_gradient + group * layer->padded_gradient.area * layer->ld : 0;
        real *input_gradient = l ? layer->input_gradient + group * pixels * input_ld : 0;
        int64_t margin = layer->spec.kernel - 1 - layer->spec.padding, width = layer->padded_gradient.width;
        struct range rows = group_share(thread, layer->pooled.height, 1);
        pool_relu_backward(layer, b, rows, gradient, stride, output_gradient, layer->output.width);
        if (l)
            pool_relu_backward(layer, b, rows, gradient, stride, padded + margin * (width + 1) * layer->ld, width);
        group_barrier(thread); /* output_gradient and padded are complete */
        convolution_weight_gradient(layer, b, group_share(thread, layer->fan_in, TILE_ROWS),
                                    group_share(thread, layer->ld, SIMD_WIDTH), output_gradient, part);
        if (l) convolution_input_gradient(layer, group_share(thread, pixels, TILE_ROWS), padded, input_gradient);
        group_barrier(thread); /* input_gradient is complete, and output_gradient may be overwritten */
        gradient = input_gradient;
        stride = input_ld;
    }
}

#endif
