/* Calls every function of native.c on random nets and prints what comes out, for tests that build it in other ways:
   one line per net, momentum and number of threads, which must be the same for all numbers of threads. */

#include "../fedsim/engine/native/native.c"

#include <stdio.h>

enum { SAMPLES = 40, INPUTS = 99, CLASSES = 4, STEPS = 6, WIDTH = 17, MOST = 8 };

static const struct link LINEAR[] = {
    {.in = 99, .out = 70, .height = 1, .width = 1, .rate = .3},
    {.in = 70, .out = 9, .dropout = 1, .height = 1, .width = 1},
    {.in = 9, .out = 4, .height = 1, .width = 1},
};
static const struct link CONVOLUTIONAL[] = {
    {.in = 1, .out = 5, .kernel = 3, .padding = 1, .pool = 1, .height = 9, .width = 11},
    {.in = 5, .out = 20, .kernel = 5, .padding = 2, .height = 4, .width = 5},
    {.in = 400, .out = 12, .height = 4, .width = 5, .rate = .4},
    {.in = 12, .out = 4, .height = 1, .width = 1},
};

static real *some(int64_t count)
{
    real *values = malloc(count * sizeof(real));
    for (int64_t i = 0; i < count; i++) values[i] = (real)rand() / RAND_MAX - (real).5;
    return values;
}

static double total(real *const *values, const int64_t *sizes, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < sizes[i]; j++) sum += (j % 7 + 1) * (double)values[i][j];
    return sum;
}

static void drive(const struct link *link, int64_t links, double momentum, int64_t threads)
{
    real *start[MOST], *result[MOST], *velocity[MOST], *x = some(SAMPLES * INPUTS), *losses = some(STEPS * WIDTH);
    real *logits = some(STEPS * WIDTH * CLASSES);
    int64_t sizes[MOST], y[SAMPLES], positions[STEPS * WIDTH], counts[] = {17, 1, 17, 3, 11, 6}, keys[STEPS], all = 0;
    for (int64_t i = 0; i < 2 * links; i++) {
        int64_t pixels = link[i / 2].kernel ? link[i / 2].kernel * link[i / 2].kernel : 1;
        sizes[i] = link[i / 2].out * (i % 2 ? 1 : link[i / 2].in * pixels);
        start[i] = some(sizes[i]), result[i] = some(sizes[i]), velocity[i] = some(sizes[i]);
    }
    for (int64_t i = 0; i < SAMPLES; i++) y[i] = rand() % CLASSES;
    for (int64_t i = 0; i < STEPS * WIDTH; i++) positions[i] = rand() % SAMPLES;
    for (int64_t i = 0; i < STEPS; i++) keys[i] = rand(), all += counts[i];
    struct task task = {
        .links = links, .steps = STEPS, .width = WIDTH, .threads = threads, .link = link,
        .start = (const real *const *)start, .x = x, .y = y, .positions = positions, .counts = counts, .keys = keys,
        .lr = .1, .decay = .01, .momentum = momentum, .nesterov = 1, .result = result,
        .velocity = momentum != 0 ? velocity : 0, .losses = losses};
    int failed = train(&task);
    double trained = total(result, sizes, 2 * links), moved = momentum != 0 ? total(velocity, sizes, 2 * links) : 0;
    failed |= gradient(&task);
    double slope = total(result, sizes, 2 * links);
    task.result = &logits;
    failed |= outputs(&task);
    double output = total(&logits, &(int64_t){all * CLASSES}, 1);
    printf("%lld %d %.17g %.17g %.17g %.17g %d\n", (long long)links, momentum != 0, trained, moved, slope, output,
           failed);
    for (int64_t i = 0; i < 2 * links; i++) free(start[i]), free(result[i]), free(velocity[i]);
    free(x), free(losses), free(logits);
}

int main(void)
{
    for (int net = 0; net < 2; net++)
        for (int momentum = 0; momentum < 2; momentum++)
            for (int64_t threads = 1; threads <= 5; threads++) {
                srand(1);
                drive(net ? CONVOLUTIONAL : LINEAR, net ? 4 : 3, momentum * .9, threads);
            }
}
