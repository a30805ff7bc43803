/* Matrix products C = alpha (beta C + A B) and C = alpha (beta C + A' B), where the rows of A may lie anywhere in memory, so that
   the samples of a batch are never copied together.

   C is computed in tiles of TILE_ROWS rows by TILE_VECTORS vectors that stay in registers; where one vector is left, of
   TALL_ROWS rows, so that enough sums are under way at once. An element is one chain of
   fused multiply-adds that begins with beta C and goes over k in ascending order; between blocks of K_BLOCK it waits in
   C. It is therefore the same to the last bit whatever tiles, blocks and vectors there are, whichever rows are computed
   in one call, and by whichever thread. */

#ifndef FEDSIM_GEMM_H
#define FEDSIM_GEMM_H

#include <stdint.h>

#include "simd.h"

#if defined(__AVX512F__)
enum { TILE_ROWS = 6, TILE_VECTORS = 4 }; /* 24 of 32 registers */
#elif defined(__AVX__)
enum { TILE_ROWS = 6, TILE_VECTORS = 2 }; /* 12 of 16 registers */
#else
enum { TILE_ROWS = 4, TILE_VECTORS = 2 };
#endif
enum { TALL_ROWS = 8 };
enum { K_BLOCK = 256, LINE_REALS = 64 / sizeof(real) /* of a cache line */ };

/* C is [m][n], B is [k][n], both with leading dimension `ld`; n is a multiple of SIMD_WIDTH.
   A [m][k] of the plain product: row i starts at a + row_offsets[i]. With `segments` > 1 a row of A has so many
   segments of k elements, `segment_step` apart, and B [segments * k][n].
   A [k][m] of the transposed product: row j starts at a + row_offsets[j]. */
struct gemm {
    const real *a, *b;
    const real *bias; /* [n]: what every row of C begins as, in place of what is in C; 0: none */
    const int64_t *row_offsets;
    real *c;
    int64_t m, n, k, ld, segments, segment_step;
    real beta, alpha;
};

/* What one pass over C adds up: some segments, and of each of them k_first <= k < k_end. */
struct block {
    int64_t first, end, k_first, k_end;
    int is_first, is_last;
};

/* One tile of C: rows i.. and columns j.., summed over a block. `fetch`: the rows of A are not in the cache, and the
   processor does not foresee where they lie, so the tile fetches those of the next one. */
INLINE void gemm_tile(int transposed, int fetch, int rows, int vectors, const struct gemm *g, int64_t i, int64_t j,
                      struct block block)
{
    vec sum[TALL_ROWS][TILE_VECTORS];
    const real *a[TALL_ROWS], *next_a[TALL_ROWS], *b = g->b + (block.first * g->k + block.k_first) * g->ld + j;
    const real *bias = block.is_first && g->bias ? g->bias + j : 0;
    real *c = g->c + i * g->ld + j, beta = block.is_first ? g->beta : 1, alpha = block.is_last ? g->alpha : 1;
    UNROLL for (int r = 0; r < rows; r++) {
        a[r] = transposed ? 0 : g->a + g->row_offsets[i + r] + block.first * g->segment_step;
        next_a[r] = fetch ? g->a + g->row_offsets[min_int(i + rows + r, g->m - 1)] : 0;
        UNROLL for (int v = 0; v < vectors; v++) {
            sum[r][v] = (vec){0};
            if (bias) sum[r][v] = *(const vec *)(bias + v * SIMD_WIDTH);
            else if (beta != 0) sum[r][v] = beta * *(const vec *)(c + r * g->ld + v * SIMD_WIDTH);
        }
    }
    for (int64_t s = block.first; s < block.end; s++) {
        for (int64_t k = block.k_first; k < block.k_end; k++, b += g->ld) {
            const real *a_row = transposed ? g->a + g->row_offsets[k] + i : 0;
            vec b_row[TILE_VECTORS];
            if (fetch && k % LINE_REALS == 0) UNROLL for (int r = 0; r < rows; r++) __builtin_prefetch(next_a[r] + k);
            UNROLL for (int v = 0; v < vectors; v++) b_row[v] = *(const vec *)(b + v * SIMD_WIDTH);
            UNROLL for (int r = 0; r < rows; r++) {
                real x = transposed ? a_row[r] : a[r][k];
                UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = fused_add_vec(x, b_row[v], sum[r][v]);
            }
        }
        if (!transposed && !fetch) UNROLL for (int r = 0; r < rows; r++) a[r] += g->segment_step;
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) *(vec *)(c + r * g->ld + v * SIMD_WIDTH) = alpha * sum[r][v];
}

/* Tile sizes are compile-time constants, so that a tile's sums stay in registers: one case for each size. */
#define GEMM_TILE(r, v) \
    case (r) * 8 + (v): \
        if ((r) <= ((v) == 1 ? TALL_ROWS : TILE_ROWS) && (v) <= TILE_VECTORS) \
            gemm_tile(transposed, fetch, r, v, g, i, j, block); \
        break;
#define GEMM_TILES(r) GEMM_TILE(r, 1) GEMM_TILE(r, 2) GEMM_TILE(r, 3) GEMM_TILE(r, 4)

/* The size of parts of `whole` that are as even as possible, and at most `largest`. */
INLINE int64_t even_share(int64_t whole, int64_t largest)
{
    int64_t parts = max_int((whole + largest - 1) / largest, 1);
    return (whole + parts - 1) / parts;
}

INLINE void gemm_block(int transposed, int fetch, const struct gemm *g, struct block block)
{
    for (int64_t j = 0; j < g->n; j += TILE_VECTORS * SIMD_WIDTH) {
        int64_t vectors = min_int(TILE_VECTORS, (g->n - j) / SIMD_WIDTH), rows = TILE_ROWS;
        if (vectors == 1) rows = even_share(g->m, TALL_ROWS);
        for (int64_t i = 0; i < g->m; i += rows)
            switch (min_int(rows, g->m - i) * 8 + vectors) {
                GEMM_TILES(1) GEMM_TILES(2) GEMM_TILES(3) GEMM_TILES(4) GEMM_TILES(5) GEMM_TILES(6)
                GEMM_TILE(7, 1) GEMM_TILE(8, 1)
            }
    }
}

/* Blocks of K_BLOCK elements of k: parts of one segment, or of several whole ones. */
INLINE void gemm_tiles(int transposed, int fetch, const struct gemm *g)
{
    int64_t segments = max_int(g->segments, 1), step = segments > 1 ? g->k : min_int(K_BLOCK, g->k);
    int64_t together = segments > 1 ? max_int(K_BLOCK / g->k, 1) : 1;
    for (int64_t first = 0; first < segments; first += together)
        for (int64_t k = 0; k < g->k; k += step) {
            int64_t end = min_int(segments, first + together), k_end = min_int(g->k, k + step);
            gemm_block(transposed, fetch, g,
                       (struct block){first, end, k, k_end, !first && !k, end == segments && k_end == g->k});
        }
}

/* C = alpha (beta C + A B) for rows first <= i < end of C; g.m is not read. */
static inline void gemm_rows(struct gemm g, int64_t first, int64_t end)
{
    g.row_offsets += first, g.c += first * g.ld, g.m = end - first;
    gemm_tiles(0, 0, &g);
}

/* The same, for rows of A that lie anywhere in a large array. */
static inline void gemm_distant_rows(struct gemm g, int64_t first, int64_t end)
{
    g.row_offsets += first, g.c += first * g.ld, g.m = end - first;
    gemm_tiles(0, 1, &g);
}

/* C = alpha (beta C + A' B) for rows first <= i < end of C; g.m is not read. */
static inline void gemm_transposed_rows(struct gemm g, int64_t first, int64_t end)
{
    g.a += first, g.c += first * g.ld, g.m = end - first;
    gemm_tiles(1, 0, &g);
}

#endif
