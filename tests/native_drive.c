/* Runs every function of native.c on random networks, for tests that compile it with other flags.

   Without arguments: one line for each network, momentum, shift (or none) and number of threads: the hash of all
   results, the status, and whether all results are finite. It must not depend on the number of threads, nor on
   compiler, flags or processor. With the argument `invalid`: one line for each task that breaks a rule of task.h, with
   the status of train, gradient and outputs. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "../fedsim/engine/native/native.c"

enum { UNUSED = 39 }; /* a sample of no batch */
enum { SAMPLES = 40, INPUTS = 99, CLASSES = 4, STEPS = 6, BATCH = 17, MAX_POINTERS = 8 };

static const int64_t THREADS[] = {1, 2, 3, 4, 5, 6, 8};

static const struct layer_spec LINEAR[] = {
    {.inputs = 99, .outputs = 70, .height = 1, .width = 1, .dropout_rate = .3},
    {.inputs = 70, .outputs = 9, .dropout_index = 1, .height = 1, .width = 1},
    {.inputs = 9, .outputs = 4, .height = 1, .width = 1},
};
static const struct layer_spec CONVOLUTIONAL[] = {
    {.inputs = 1, .outputs = 5, .kernel = 3, .padding = 1, .pool = 1, .height = 9, .width = 11, .dropout_rate = .2},
    {.inputs = 5, .outputs = 20, .kernel = 5, .padding = 2, .height = 4, .width = 5, .dropout_index = 1,
     .dropout_rate = .3},
    {.inputs = 400, .outputs = 12, .dropout_index = 2, .height = 4, .width = 5, .dropout_rate = .4},
    {.inputs = 12, .outputs = 4, .height = 1, .width = 1},
};
static const struct layer_spec ONE_CONVOLUTION[] = {
    {.inputs = 1, .outputs = 6, .kernel = 4, .height = 9, .width = 11},
    {.inputs = 288, .outputs = 4, .height = 6, .width = 8},
};

/* A task and the memory behind its pointers. */
struct problem {
    struct task task;
    struct layer_spec layers[4];
    real *initial[MAX_POINTERS], *shift[MAX_POINTERS], *result[MAX_POINTERS], *velocity[MAX_POINTERS];
    real x[SAMPLES * INPUTS], losses[STEPS * BATCH];
    int64_t finite;
    int64_t sizes[MAX_POINTERS], labels[SAMPLES], positions[STEPS * BATCH], counts[STEPS], keys[STEPS];
};

static real *random_reals(real *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) values[i] = (real)rand() / RAND_MAX - (real).5;
    return values;
}

static real *new_reals(int64_t count) { return random_reals(malloc(count * sizeof(real)), count); }

static struct problem *new_problem(const struct layer_spec *layers, int64_t num_layers)
{
    struct problem *p = calloc(1, sizeof(struct problem));
    memcpy(p->layers, layers, num_layers * sizeof(*layers));
    memcpy(p->counts, (int64_t[STEPS]){17, 1, 17, 3, 11, 6}, sizeof(p->counts));
    random_reals(p->x, SAMPLES * INPUTS);
    for (int64_t i = 0; i < 2 * num_layers; i++) {
        const struct layer_spec *layer = layers + i / 2;
        int64_t pixels = layer->kernel ? layer->kernel * layer->kernel : 1;
        p->sizes[i] = layer->outputs * (i % 2 ? 1 : layer->inputs * pixels);
        p->initial[i] = new_reals(p->sizes[i]);
        p->shift[i] = new_reals(p->sizes[i]);
        p->result[i] = new_reals(p->sizes[i]);
        p->velocity[i] = new_reals(p->sizes[i]);
    }
    for (int64_t i = 0; i < SAMPLES; i++) p->labels[i] = rand() % CLASSES;
    for (int64_t i = 0; i < STEPS * BATCH; i++) p->positions[i] = rand() % UNUSED;
    for (int64_t i = 0; i < STEPS; i++) p->keys[i] = rand();
    p->task = (struct task){
        .num_layers = num_layers, .num_steps = STEPS, .batch_size = BATCH, .num_samples = SAMPLES, .num_threads = 1,
        .layers = p->layers, .initial = (const real *const *)p->initial, .samples = p->x, .labels = p->labels,
        .positions = p->positions, .counts = p->counts, .dropout_keys = p->keys, .learning_rate = .1,
        .weight_decay = .01, .nesterov = 1, .result = p->result, .velocity = p->velocity, .losses = p->losses,
        .finite = &p->finite};
    return p;
}

static void free_problem(struct problem *p)
{
    for (int64_t i = 0; i < 2 * p->task.num_layers; i++)
        free(p->initial[i]), free(p->shift[i]), free(p->result[i]), free(p->velocity[i]);
    free(p);
}

/* The hash of Fowler, Noll and Vo (1a) of all bits, from one array of values to the next. */
static uint64_t hash(uint64_t sum, real *const *values, const int64_t *sizes, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        for (size_t j = 0; j < sizes[i] * sizeof(real); j++)
            sum = (sum ^ ((const unsigned char *)values[i])[j]) * 0x100000001B3u;
    return sum;
}

static int all_finite(real *const *values, const int64_t *sizes, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < sizes[i]; j++)
            if (values[i][j] - values[i][j] != 0) return 0;
    return 1;
}

static int outputs_into(struct task task, real *logits)
{
    task.result = &logits;
    return outputs(&task);
}

static void print_results(struct problem *p)
{
    int64_t pointers = 2 * p->task.num_layers, logits_size = 0;
    for (int64_t step = 0; step < STEPS; step++) logits_size += p->counts[step] * CLASSES;
    real *logits = new_reals(logits_size);
    real *losses = p->losses;
    memset(losses, 0, sizeof(p->losses));
    int failed = train(&p->task), finite = all_finite(p->result, p->sizes, pointers);
    uint64_t sum = hash(0xCBF29CE484222325u, p->result, p->sizes, pointers);
    sum = hash(sum, p->velocity, p->sizes, pointers);
    failed |= gradient(&p->task), finite &= all_finite(p->result, p->sizes, pointers);
    sum = hash(sum, p->result, p->sizes, pointers);
    sum = hash(sum, &losses, (const int64_t[]){STEPS * BATCH}, 1);
    failed |= outputs_into(p->task, logits), finite &= all_finite(&logits, &logits_size, 1);
    printf("%016llx %d %d\n", (unsigned long long)hash(sum, &logits, &logits_size, 1), failed, finite);
    free(logits);
}

static void drive(const struct layer_spec *layers, int64_t num_layers)
{
    for (int kind = 0; kind < 4; kind++)
        for (size_t i = 0; i < sizeof(THREADS) / sizeof(*THREADS); i++) {
            srand(1);
            struct problem *p = new_problem(layers, num_layers);
            p->task.momentum = kind % 2 * .9;
            if (kind / 2) p->task.shift = (const real *const *)p->shift;
            p->task.num_threads = THREADS[i];
            print_results(p);
            free_problem(p);
        }
}

/* Sets *place to `value`, prints the status of all functions, and sets it back. */
static void print_status(struct problem *p, const char *name, int64_t *place, int64_t value)
{
    int64_t valid = *place;
    real *logits = new_reals(STEPS * BATCH * CLASSES);
    *place = value;
    printf("%s %lld: %d %d %d\n", name, (long long)value, train(&p->task), gradient(&p->task),
           outputs_into(p->task, logits));
    *place = valid;
    free(logits);
}

static void drive_invalid(void)
{
    struct problem *p = new_problem(CONVOLUTIONAL, 4);
    p->positions[0] = 7;
    print_status(p, "label", p->labels + 7, -1);
    print_status(p, "label", p->labels + 7, CLASSES);
    print_status(p, "position", p->positions + 2 * BATCH + 16, -1);
    print_status(p, "position", p->positions + 2 * BATCH + 16, SAMPLES);
    print_status(p, "count", p->counts + 2, -1);
    print_status(p, "count", p->counts + 5, BATCH + 1);
    print_status(p, "threads", &p->task.num_threads, 0);
    print_status(p, "batch_size", &p->task.batch_size, 0);
    print_status(p, "num_steps", &p->task.num_steps, -1);
    print_status(p, "num_layers", &p->task.num_layers, 0);
    print_status(p, "num_layers", &p->task.num_layers, 2); /* ends with a convolution */
    print_status(p, "inputs", &p->layers[1].inputs, 6);
    print_status(p, "inputs", &p->layers[2].inputs, 401);
    print_status(p, "inputs", &p->layers[3].inputs, 13);
    print_status(p, "outputs", &p->layers[1].outputs, 0);
    print_status(p, "kernel", &p->layers[1].kernel, 9);
    print_status(p, "kernel", &p->layers[3].kernel, 1); /* a convolution behind a linear layer */
    print_status(p, "padding", &p->layers[0].padding, 3);
    print_status(p, "padding", &p->layers[0].padding, -1);
    print_status(p, "padding", &p->layers[2].padding, 1); /* of a linear layer */
    print_status(p, "pool", &p->layers[1].pool, 2);
    print_status(p, "height", &p->layers[1].height, 5);
    print_status(p, "unused label", p->labels + UNUSED, -1);
    print_status(p, "unused position", p->positions + BATCH + 1, -1);
    free_problem(p);
}

int main(int argc, char **argv)
{
    (void)argv;
    if (argc > 1) {
        srand(1);
        drive_invalid();
        return 0;
    }
    drive(LINEAR, 3);
    drive(CONVOLUTIONAL, 4);
    drive(ONE_CONVOLUTION, 2);
}
