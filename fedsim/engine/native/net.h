/* What is asked for, and a net's room in memory.

   Weights lie as [depth][width]: `depth` inputs of a linear layer, or kernel x kernel x channels of a convolution;
   `width` is the number of outputs padded to whole vectors. Images lie with their channels last. All padding is zero
   and stays so. */

struct link {
    int64_t in, out;         /* numbers of inputs and outputs, of a convolution its channels */
    int64_t dropout;         /* the number of the dropout behind the layer, where `rate` is not 0 */
    int64_t kernel, padding; /* 0: linear */
    int64_t pool;            /* 1: the greatest of 2 x 2 pixels */
    int64_t height, width;   /* of a convolution's input, or of the image that a linear layer's inputs were, else 1 */
    double rate;
};

/* As fedsim/engine/native/calls.py has it. `start`, `result` and `velocity` point to weight and bias (0: none) of layer
   after layer, as torch lays them out. */
struct task {
    int64_t links, steps, width; /* `width`: samples of the largest batch */
    int64_t threads;
    const struct link *link;
    const real *const *start;
    const real *x;            /* samples */
    const int64_t *y;         /* their labels */
    const int64_t *positions; /* [steps][width] in x and y */
    const int64_t *counts;    /* [steps] valid positions */
    const int64_t *keys;      /* [steps] of dropout; 0: none */
    double lr, decay, momentum;
    int64_t nesterov;
    real *const *result;
    real *const *velocity; /* 0: not asked for */
    real *losses;          /* [steps][width] */
};

/* The samples of a batch are cut into so many parts, whose gradients of convolutions are added up one by one, and add
   up in the same order however many threads there are. */
enum { PARTS = 4 };

/* Height, width, and pixels of an image. */
struct size {
    int64_t h, w, area;
};

struct layer {
    struct link link;
    int64_t depth, width, biased;
    real *weight, *bias;             /* [depth][width], [width] */
    int64_t parts;                   /* the gradient is a sum of so many; of a convolution PARTS, else 1 */
    real *slope_weight, *slope_bias; /* [parts][depth][width], [parts][width]; 0 where the step is taken at once */
    real *speed_weight, *speed_bias; /* momentum; 0 without */
    real *turned;                    /* the weight as the way back needs it; 0 for the first layer */
    const real *given;               /* [batch][stride] its input */
    int64_t stride, *at;             /* `at`: where rows of the input start */

    /* of a convolution */
    struct size padded, seen, pooled; /* images: its input, its output, and that behind the pooling */
    real *image, *image_slope;        /* [threads][seen.area][width] its output for one sample, and the slope of that */
    real *which;                      /* [batch][pooled.area][width] which of the four was the greatest */
    struct size wide;                 /* the slope with a margin, for the way back */
    real *wide_slope, *below;         /* [threads][wide.area][width]; [threads][height width][width of `in`] */
    int64_t *back_at;
};

struct net {
    int64_t layers, convolutions, batch;
    struct layer *layer;
    real *output;        /* [batch][width] */
    real *slopes[2];     /* [batch][widest] of linear layers' outputs, by turns */
    int64_t *slope_at;   /* [layers][batch] where their rows start */
};

/* Pieces of one allocation; with `start` 0 it only counts. */
struct room {
    char *start;
    size_t used;
};

static void *take(struct room *room, int64_t count, size_t size)
{
    void *piece = room->start ? room->start + room->used : 0;
    room->used += (count * size + 63) / 64 * 64;
    return piece;
}

static real *reals(struct room *room, int64_t count) { return take(room, count, sizeof(real)); }

static int64_t *integers(struct room *room, int64_t count) { return take(room, count, sizeof(int64_t)); }

static struct size size_of(int64_t h, int64_t w) { return (struct size){h, w, h * w}; }

static int64_t vectors_of(int64_t n)
{
    int64_t width = (n + LANES - 1) / LANES * LANES;
    return width * sizeof(real) % 2048 ? width : width + LANES; /* rows at powers of two would share few cache lines */
}

/* What every layer needs. `at_once`: its gradient goes into the weight at once. */
static struct layer any_layer(struct room *room, const struct link *link, int momentum, int at_once, int first)
{
    int64_t pixels = link->kernel ? link->kernel * link->kernel : 1;
    struct layer layer = {.link = *link, .depth = link->in * pixels, .width = vectors_of(link->out)};
    int64_t weights = layer.depth * layer.width;
    layer.weight = reals(room, weights);
    layer.bias = reals(room, layer.width);
    layer.parts = link->kernel ? PARTS : 1;
    if (!at_once) layer.slope_weight = reals(room, layer.parts * weights);
    if (!at_once) layer.slope_bias = reals(room, layer.parts * layer.width);
    if (momentum) layer.speed_weight = reals(room, weights), layer.speed_bias = reals(room, layer.width);
    if (!first) layer.turned = reals(room, pixels * layer.width * vectors_of(link->in));
    return layer;
}

static void add_images(struct room *room, struct layer *layer, int64_t batch, int64_t threads, int first)
{
    const struct link *link = &layer->link;
    int64_t margin = link->kernel - 1 - link->padding, side = 2 * link->padding;
    layer->padded = size_of(link->height + side, link->width + side);
    layer->seen = size_of(layer->padded.h - link->kernel + 1, layer->padded.w - link->kernel + 1);
    layer->pooled = link->pool ? size_of(layer->seen.h / 2, layer->seen.w / 2) : layer->seen;
    layer->stride = layer->padded.area * link->in;
    layer->at = integers(room, layer->seen.area);
    layer->image = reals(room, threads * layer->seen.area * layer->width);
    layer->image_slope = reals(room, threads * layer->seen.area * layer->width);
    layer->which = reals(room, batch * layer->pooled.area * layer->width);
    if (first) return;
    layer->wide = size_of(layer->seen.h + 2 * margin, layer->seen.w + 2 * margin);
    layer->wide_slope = reals(room, threads * layer->wide.area * layer->width);
    layer->below = reals(room, threads * link->height * link->width * vectors_of(link->in));
    layer->back_at = integers(room, link->height * link->width);
}

static void lay_out(struct room *room, struct net *net, const struct task *t, int trains)
{
    int64_t widest = 0, threads = at_most(PARTS, t->threads);
    *net = (struct net){.layers = t->links, .batch = t->width};
    net->layer = take(room, t->links, sizeof(struct layer));
    for (int64_t l = 0; l < t->links; l++) {
        const struct link *link = t->link + l;
        int momentum = trains && t->momentum != 0, at_once = trains && !momentum && !link->kernel;
        struct layer layer = any_layer(room, link, momentum, at_once, l == 0);
        layer.biased = t->start[2 * l + 1] != 0;
        if (!t->keys) layer.link.rate = 0;
        if (link->kernel) add_images(room, &layer, t->width, threads, l == 0), net->convolutions++;
        if (!link->kernel) layer.stride = l ? vectors_of(link->in) : link->in, layer.at = integers(room, t->width);
        layer.given = l || link->kernel ? reals(room, t->width * layer.stride) : t->x;
        if (!link->kernel) widest = layer.width > widest ? layer.width : widest;
        if (!link->kernel) widest = layer.stride > widest ? layer.stride : widest;
        if (room->start) net->layer[l] = layer;
    }
    net->output = reals(room, t->width * vectors_of(t->link[t->links - 1].out));
    for (int i = 0; i < 2; i++) net->slopes[i] = reals(room, t->width * widest);
    net->slope_at = integers(room, t->links * t->width);
}

/* Where row `i` of torch's weight, of a model with so many pixels behind each channel, lies with the channels last. */
static int64_t last(int64_t i, int64_t channels, int64_t pixels) { return i % pixels * channels + i / pixels; }

static int64_t pixels_of(const struct link *link)
{
    return link->kernel ? link->kernel * link->kernel : link->height * link->width;
}

/* From torch's layout. */
static void fill(struct layer *layer, const real *weight, const real *bias)
{
    int64_t pixels = pixels_of(&layer->link), channels = layer->depth / pixels;
    for (int64_t i = 0; i < layer->depth; i++) {
        real *row = layer->weight + last(i, channels, pixels) * layer->width;
        for (int64_t o = 0; o < layer->link.out; o++) row[o] = weight[o * layer->depth + i];
    }
    if (layer->biased) memcpy(layer->bias, bias, layer->link.out * sizeof(real));
}

/* To torch's layout, less what `start` holds where it is given. */
static void hand_over(const struct layer *layer, const real *weight, const real *bias, const real *const *start,
                      real *const *result)
{
    int64_t pixels = pixels_of(&layer->link), channels = layer->depth / pixels;
    for (int64_t i = 0; i < layer->depth; i++) {
        const real *row = weight + last(i, channels, pixels) * layer->width;
        for (int64_t o = 0; o < layer->link.out; o++) result[0][o * layer->depth + i] = row[o];
    }
    if (layer->biased) memcpy(result[1], bias, layer->link.out * sizeof(real));
    for (int64_t i = 0; start && i < layer->depth * layer->link.out; i++) result[0][i] -= start[0][i];
    for (int64_t o = 0; start && layer->biased && o < layer->link.out; o++) result[1][o] -= start[1][o];
}

/* Where the rows of a layer's input start. */
static void place_rows(struct layer *layer, int64_t batch)
{
    const struct link *link = &layer->link;
    for (int64_t b = 0; !link->kernel && b < batch; b++) layer->at[b] = b * layer->stride;
    for (int64_t i = 0; link->kernel && i < layer->seen.area; i++)
        layer->at[i] = (i / layer->seen.w * layer->padded.w + i % layer->seen.w) * link->in;
    for (int64_t i = 0; layer->back_at && i < link->height * link->width; i++)
        layer->back_at[i] = (i / link->width * layer->wide.w + i % link->width) * layer->width;
}

/* A net that holds the task's starting model; 0 without memory. Its address is what is to be freed. */
static struct net *build(const struct task *t, int trains)
{
    struct room room = {0};
    struct net plan;
    take(&room, 1, sizeof(struct net));
    lay_out(&room, &plan, t, trains);
    room.start = aligned_alloc(64, room.used);
    if (!room.start) return 0;
    memset(room.start, 0, room.used);
    room.used = 0;
    struct net *net = take(&room, 1, sizeof(struct net));
    lay_out(&room, net, t, trains);
    for (int64_t l = 0; l < net->layers; l++) {
        fill(net->layer + l, t->start[2 * l], t->start[2 * l + 1]);
        place_rows(net->layer + l, net->batch);
        for (int64_t b = 0; b < net->batch; b++) net->slope_at[l * net->batch + b] = b * net->layer[l].width;
    }
    return net;
}
