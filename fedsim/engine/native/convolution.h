/* Convolutions of one sample after another, so that its images stay in the cache. The pixels of a kernel's row lie
   side by side in the input: a convolution is one product for each row of the kernel, and nothing is unfolded. */

/* From torch's layout into the input of the first layer. */
static void load_image(const struct layer *layer, int64_t b, const real *x)
{
    const struct link *link = &layer->link;
    real *given = (real *)layer->given + b * layer->stride;
    for (int64_t c = 0; c < link->in; c++)
        for (int64_t i = 0; i < link->height; i++)
            for (int64_t j = 0; j < link->width; j++)
                given[((i + link->padding) * layer->padded.w + j + link->padding) * link->in + c] = *x++;
}

/* Where the layer behind finds pixel (i, j) of sample b. */
static real *passed_on(const struct layer *layer, int64_t b, int64_t i, int64_t j)
{
    const struct layer *next = layer + 1;
    int64_t edge = next->link.padding, across = next->link.kernel ? next->padded.w : layer->pooled.w;
    return (real *)next->given + b * next->stride + ((i + edge) * across + j + edge) * layer->link.out;
}

/* Whether `x` takes the place of the greatest so far: it is greater, or NaN. */
INLINE int beats(real x, real most) { return (x > most) | (x != x); }

/* The greatest of four pixels of channels [out], rectified, and which of them it is; the last NaN if there is one. */
static void pool(const real *one, const real *two, const real *three, const real *four, int64_t out,
                 real *restrict value, real *restrict which)
{
    for (int64_t c = 0; c < out; c++) {
        real most = one[c], at = 0;
        at = beats(two[c], most) ? 1 : at, most = beats(two[c], most) ? two[c] : most;
        at = beats(three[c], most) ? 2 : at, most = beats(three[c], most) ? three[c] : most;
        at = beats(four[c], most) ? 3 : at, most = beats(four[c], most) ? four[c] : most;
        which[c] = at;
        value[c] = most < 0 ? 0 : most;
    }
}

static real *which_of(const struct layer *layer, int64_t b, int64_t i, int64_t j)
{
    return layer->which + ((b * layer->pooled.h + i) * layer->pooled.w + j) * layer->width;
}

/* A thread's own room for a sample. */
static real *own(real *room, const struct member *me, int64_t size) { return room + me->rank * size; }

static void convolve(const struct layer *layer, int64_t b, real *image)
{
    int64_t row = layer->link.kernel * layer->link.in, width = layer->width;
    for (int64_t i = 0; i < layer->seen.area; i++) memcpy(image + i * width, layer->bias, width * sizeof(real));
    for (int64_t k = 0; k < layer->link.kernel; k++)
        plain_product(
            (struct product){.a = layer->given + b * layer->stride + k * layer->padded.w * layer->link.in,
                             .at = layer->at, .b = layer->weight + k * row * width, .c = image, .n = width,
                             .depth = row, .ld = width, .keep = 1, .scale = 1},
            0, layer->seen.area);
}

static void convolution_forward(const struct member *me, const struct layer *layer, int64_t b)
{
    int64_t out = layer->link.out, width = layer->width, down = layer->seen.w * width;
    real *image = own(layer->image, me, layer->seen.area * width);
    convolve(layer, b, image);
    for (int64_t i = 0; i < layer->pooled.h; i++)
        for (int64_t j = 0; j < layer->pooled.w; j++) {
            const real *one = image + (layer->link.pool ? 2 : 1) * (i * down + j * width);
            real *value = passed_on(layer, b, i, j);
            if (layer->link.pool)
                pool(one, one + width, one + down, one + down + width, out, value, which_of(layer, b, i, j));
            else
                for (int64_t c = 0; c < out; c++) value[c] = one[c] < 0 ? 0 : one[c];
        }
}

/* The slope of those channels [out] whose value is positive (or NaN) and came from way `q`. */
static void pass_back(const real *value, const real *which, real q, const real *slope, int64_t out,
                      real *restrict result)
{
    for (int64_t c = 0; c < out; c++) result[c] = (!(value[c] <= 0) & (which[c] == q)) ? slope[c] : 0;
}

/* The slopes of the image, without and with a margin, from that of what was passed on, with pixels `pitch` apart. */
static void unpool(const struct layer *layer, int64_t b, const real *slope, int64_t pitch, real *image, real *wide)
{
    int64_t out = layer->link.out, ways = layer->link.pool ? 2 : 1;
    int64_t margin = layer->link.kernel - 1 - layer->link.padding;
    for (int64_t i = 0; i < layer->pooled.h; i++)
        for (int64_t j = 0; j < layer->pooled.w; j++, slope += pitch) {
            const real *value = passed_on(layer, b, i, j), *which = which_of(layer, b, i, j);
            for (int64_t q = 0; q < ways * ways; q++) {
                int64_t y = ways * i + q / 2, x = ways * j + q % 2;
                int64_t middle = (y + margin) * layer->wide.w + x + margin;
                pass_back(value, which, q, slope, out, image + (y * layer->seen.w + x) * layer->width);
                if (wide) pass_back(value, which, q, slope, out, wide + middle * layer->width);
            }
        }
}

/* Adds a sample's gradient to that of its part. */
static void convolution_gradient(const struct layer *layer, int64_t b, const real *image, int64_t part)
{
    int64_t row = layer->link.kernel * layer->link.in, width = layer->width;
    real *weight = layer->slope_weight + part * layer->depth * width;
    for (int64_t k = 0; k < layer->link.kernel; k++)
        transposed_product(
            (struct product){.a = layer->given + b * layer->stride + k * layer->padded.w * layer->link.in,
                             .at = layer->at, .b = image, .c = weight + k * row * width, .n = width,
                             .depth = layer->seen.area, .ld = width, .keep = 1, .scale = 1},
            0, row);
    if (layer->biased) bias_gradient(layer, layer->seen.area, image, layer->slope_bias + part * width, 1, 1);
}

/* The kernel turned by half a circle, its inputs as outputs; some of its pixels. */
static void convolution_turn(const struct layer *layer, struct range some)
{
    int64_t pixels = layer->link.kernel * layer->link.kernel, in = layer->link.in, across = vectors_of(in);
    for (int64_t p = some.first; p < some.end; p++)
        for (int64_t c = 0; c < in; c++)
            for (int64_t o = 0; o < layer->link.out; o++)
                layer->turned[((pixels - 1 - p) * layer->width + o) * across + c] =
                    layer->weight[(p * in + c) * layer->width + o];
}

/* `below`: the slope of the input. */
static void convolution_descend(const struct layer *layer, const real *wide, real *below)
{
    int64_t row = layer->link.kernel * layer->width, across = vectors_of(layer->link.in);
    for (int64_t k = 0; k < layer->link.kernel; k++)
        plain_product(
            (struct product){.a = wide + k * layer->wide.w * layer->width, .at = layer->back_at,
                             .b = layer->turned + k * row * across, .c = below, .n = across, .depth = row,
                             .ld = across, .keep = k ? 1 : 0, .scale = 1},
            0, layer->link.height * layer->link.width);
}

/* Adds a sample's gradients to those of its part, from the top of the convolutions down; `slope` is that of what the
   last one passed on. */
static void convolutions_backward(const struct member *me, int64_t b, const real *slope, int64_t part)
{
    int64_t pitch = me->net->layer[me->net->convolutions - 1].link.out;
    for (int64_t l = me->net->convolutions - 1; l >= 0; l--) {
        const struct layer *layer = me->net->layer + l;
        real *image = own(layer->image_slope, me, layer->seen.area * layer->width);
        real *wide = l ? own(layer->wide_slope, me, layer->wide.area * layer->width) : 0;
        unpool(layer, b, slope, pitch, image, wide);
        convolution_gradient(layer, b, image, part);
        if (!l) return;
        pitch = vectors_of(layer->link.in);
        real *below = own(layer->below, me, layer->link.height * layer->link.width * pitch);
        convolution_descend(layer, wide, below);
        slope = below;
    }
}
