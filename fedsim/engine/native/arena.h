/* An arena: many blocks in one allocation, each aligned to a cache line.

   The same allocating code runs twice: with base 0 it only adds up the bytes that it needs, with memory of that size
   as base it hands out the blocks. */

#ifndef FEDSIM_ARENA_H
#define FEDSIM_ARENA_H

#include <stddef.h>
#include <stdint.h>

#include "simd.h"

enum { CACHE_LINE = 64 };

struct arena {
    char *base;
    size_t used;  /* bytes */
    int overflow; /* 1: more bytes were asked for than size_t can count */
};

static inline void *arena_alloc(struct arena *arena, int64_t count, size_t size)
{
    void *block = arena->base ? arena->base + arena->used : 0;
    size_t bytes;
    arena->overflow |= __builtin_mul_overflow(count, size, &bytes);
    arena->overflow |= __builtin_add_overflow(bytes, CACHE_LINE - 1, &bytes);
    arena->overflow |= __builtin_add_overflow(arena->used, bytes / CACHE_LINE * CACHE_LINE, &arena->used);
    return block;
}

static inline real *arena_reals(struct arena *arena, int64_t count) { return arena_alloc(arena, count, sizeof(real)); }

static inline int64_t *arena_integers(struct arena *arena, int64_t count)
{
    return arena_alloc(arena, count, sizeof(int64_t));
}

#endif
