/* A team of threads that trains one client. All threads run the same function; each works on its share of samples, rows
   or columns, and barriers separate the phases. Results are the same to the last bit for any number of threads: a share
   changes who computes a number, never the order of the sums within it.

   The convolutions' weight gradients of a batch are the sum of GRADIENT_PARTS partial sums, each over a fixed share of
   the samples. Threads form groups of equal size, as many groups as divide both the team and the parts; a group works
   on the same whole parts. With 1, 2 or 4 threads a group is one thread; in larger groups the threads share the rows of
   each product of a sample. */

#ifndef FEDSIM_TEAM_H
#define FEDSIM_TEAM_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#include "simd.h"

struct network;
struct task;

enum { GRADIENT_PARTS = 4 }; /* a power of two */
enum { MAX_THREADS = 256 };
enum { SPINS_BEFORE_YIELD = 4096 };

/* For `size` threads; reusable. `generation` counts how often all have arrived. */
struct barrier {
    int64_t size;
    atomic_long waiting, generation;
};

struct team {
    struct barrier barrier;                        /* of all threads */
    int64_t num_groups;
    struct barrier group_barriers[GRADIENT_PARTS]; /* [num_groups] */
    atomic_int started;                            /* 1: the size of the team is known */
};

struct thread {
    struct network *network;
    const struct task *task;
    struct team *team;
    int64_t rank; /* 0..size of the team - 1 */
    void (*run)(const struct thread *);
    pthread_t handle;
};

struct range {
    int64_t first, end;
};

/* Returns when all threads have called it. */
static inline void barrier_wait(struct barrier *barrier)
{
    if (barrier->size == 1) return;
    long generation = atomic_load(&barrier->generation);
    if (atomic_fetch_add(&barrier->waiting, 1) == barrier->size - 1) {
        atomic_store(&barrier->waiting, 0);
        atomic_fetch_add(&barrier->generation, 1);
        return;
    }
    for (int64_t spins = 0; atomic_load(&barrier->generation) == generation; spins++)
        if (spins > SPINS_BEFORE_YIELD) sched_yield();
}

static inline void team_barrier(const struct thread *thread) { barrier_wait(&thread->team->barrier); }

static inline int64_t group_size(const struct thread *thread)
{
    return thread->team->barrier.size / thread->team->num_groups;
}

static inline int64_t group_of(const struct thread *thread) { return thread->rank / group_size(thread); }

static inline void group_barrier(const struct thread *thread)
{
    barrier_wait(&thread->team->group_barriers[group_of(thread)]);
}

/* The share of the `rank`-th of `size` threads in 0..count - 1, in whole blocks of `grain`. */
static inline struct range share(int64_t rank, int64_t size, int64_t count, int64_t grain)
{
    int64_t blocks = (count + grain - 1) / grain;
    return (struct range){min_int(count, blocks * rank / size * grain),
                          min_int(count, blocks * (rank + 1) / size * grain)};
}

static inline struct range team_share(const struct thread *thread, int64_t count, int64_t grain)
{
    return share(thread->rank, thread->team->barrier.size, count, grain);
}

static inline struct range group_share(const struct thread *thread, int64_t count, int64_t grain)
{
    int64_t size = group_size(thread);
    return share(thread->rank % size, size, count, grain);
}

/* The gradient parts of the thread's group. */
static inline struct range group_parts(const struct thread *thread)
{
    return share(group_of(thread), thread->team->num_groups, GRADIENT_PARTS, 1);
}

/* The samples of a batch that make up a gradient part. */
static inline struct range part_samples(int64_t part, int64_t batch)
{
    return (struct range){batch * part / GRADIENT_PARTS, batch * (part + 1) / GRADIENT_PARTS};
}

static inline void *thread_main(void *argument)
{
    struct thread *thread = argument;
    while (!atomic_load(&thread->team->started)) sched_yield();
    thread->run(thread);
    return 0;
}

/* Run `run` on `num_threads` threads, the calling one among them; on fewer where the system refuses to start more.
   `threads` [num_threads] is uninitialised room for them. Returns when all have finished. */
static inline void run_team(struct thread *threads, int64_t num_threads, struct network *network,
                            const struct task *task, void (*run)(const struct thread *))
{
    struct team team = {.num_groups = GRADIENT_PARTS};
    int64_t size = 1;
    for (int64_t i = 0; i < num_threads; i++)
        threads[i] = (struct thread){.network = network, .task = task, .team = &team, .rank = i, .run = run};
    while (size < num_threads && !pthread_create(&threads[size].handle, 0, thread_main, threads + size)) size++;
    team.barrier.size = size;
    while (size % team.num_groups) team.num_groups /= 2;
    for (int64_t group = 0; group < team.num_groups; group++)
        team.group_barriers[group].size = size / team.num_groups;
    atomic_store(&team.started, 1);
    run(threads);
    for (int64_t i = 1; i < size; i++) pthread_join(threads[i].handle, 0);
}

#endif
