/* Threads that work on one client together: all run the same code on shares of their own, and meet where one needs
   what another has done. What comes out is the same to the last bit whatever their number. */

enum { PATIENCE = 4096 };

struct team {
    int64_t size;
    atomic_long open, waiting, meetings;
};

/* One of them, and what they work on. */
struct member {
    struct net *net;
    const struct task *task;
    struct team *team;
    int64_t rank;
    void (*work)(const struct member *);
};

/* Returns when all have come here. */
static void meet(const struct member *me)
{
    struct team *team = me->team;
    long meeting = atomic_load(&team->meetings);
    if (team->size == 1) return;
    if (atomic_fetch_add(&team->waiting, 1) == team->size - 1) {
        atomic_store(&team->waiting, 0);
        atomic_fetch_add(&team->meetings, 1);
        return;
    }
    for (int64_t tries = 0; atomic_load(&team->meetings) == meeting; tries++)
        if (tries > PATIENCE) sched_yield();
}

struct range {
    int64_t first, end;
};

/* One's share of `count`, in whole grains. */
static struct range share(const struct member *me, int64_t count, int64_t grain)
{
    int64_t grains = (count + grain - 1) / grain, size = me->team->size;
    return (struct range){at_most(count, grains * me->rank / size * grain),
                          at_most(count, grains * (me->rank + 1) / size * grain)};
}

static void *come_in(void *given)
{
    struct member *me = given;
    while (!atomic_load(&me->team->open)) sched_yield();
    me->work(me);
    return 0;
}

/* Run `work` by `task->threads` threads, the caller's among them; by fewer if the system gives no more. */
static void work_together(struct net *net, const struct task *task, void (*work)(const struct member *))
{
    struct team team = {.size = 1};
    struct member members[PARTS];
    pthread_t threads[PARTS];
    for (int64_t i = 0; i < PARTS; i++) members[i] = (struct member){net, task, &team, i, work};
    while (team.size < at_most(PARTS, task->threads) &&
           !pthread_create(threads + team.size, 0, come_in, members + team.size))
        team.size++;
    atomic_store(&team.open, 1);
    work(members);
    for (int64_t i = 1; i < team.size; i++) pthread_join(threads[i], 0);
}
