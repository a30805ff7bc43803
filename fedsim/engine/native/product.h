/* Matrix products from rows that lie anywhere: batches are never gathered.

   Tiles of ROWS rows times VECTORS vectors of the result stay in registers; the vectors are GCC's, so the same source
   serves every processor. Sums run over ascending depth, DEPTH at a time, whatever else is computed beside them. */

#ifndef REAL
#define REAL float
#endif
typedef REAL real;

#if defined(__AVX512F__)
enum { BYTES = 64, ROWS = 6, VECTORS = 4 }; /* 24 of 32 registers */
#elif defined(__AVX__)
enum { BYTES = 32, ROWS = 6, VECTORS = 2 }; /* 12 of 16 */
#else
enum { BYTES = 16, ROWS = 4, VECTORS = 2 };
#endif
enum { LANES = BYTES / sizeof(real), DEPTH = 256 };
typedef real vec __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

/* c = keep c + scale a b, for c [m][n], b [depth][n]; row i of c starts at c + i ld, row k of b at b + k ld; n is a
   multiple of LANES. Plain: row i of a starts at a + at[i]; transposed: row k of its transpose does at a + at[k]. */
struct product {
    const real *a, *b;
    const int64_t *at;
    real *c;
    int64_t m, n, depth, ld;
    real keep, scale;
};

INLINE void tile(int transposed, int rows, int vectors, const struct product *p, int64_t i, int64_t j, int64_t first,
                 int64_t end)
{
    vec sum[ROWS][VECTORS];
    const real *a[ROWS], *b = p->b + first * p->ld + j;
    UNROLL for (int r = 0; r < rows; r++) {
        a[r] = transposed ? 0 : p->a + p->at[i + r];
        UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = (vec){0};
    }
    for (int64_t k = first; k < end; k++, b += p->ld) {
        const real *column = transposed ? p->a + p->at[k] + i : 0;
        vec row[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) row[v] = *(const vec *)(b + v * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            real x = transposed ? column[r] : a[r][k];
            UNROLL for (int v = 0; v < vectors; v++) sum[r][v] += x * row[v];
        }
    }
    real keep = first ? 1 : p->keep;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) {
            vec *c = (vec *)(p->c + (i + r) * p->ld + j + v * LANES);
            sum[r][v] *= p->scale;
            if (keep != 0) sum[r][v] += keep * *c;
            *c = sum[r][v];
        }
}

#define ONE_TILE(r, v) \
    case (r) * 8 + (v): \
        if ((r) <= ROWS && (v) <= VECTORS) tile(transposed, r, v, p, i, j, first, end); \
        break;
#define TILES(r) ONE_TILE(r, 1) ONE_TILE(r, 2) ONE_TILE(r, 3) ONE_TILE(r, 4)

INLINE int64_t at_most(int64_t limit, int64_t x) { return x < limit ? x : limit; }

INLINE void tiles(int transposed, const struct product *p)
{
    for (int64_t first = 0; first < p->depth; first += DEPTH)
        for (int64_t j = 0; j < p->n; j += VECTORS * LANES)
            for (int64_t i = 0; i < p->m; i += ROWS) {
                int64_t end = at_most(p->depth, first + DEPTH);
                switch (at_most(ROWS, p->m - i) * 8 + at_most(VECTORS, (p->n - j) / LANES)) {
                    TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
                }
            }
}

/* Both for rows `first` to `end` of c, which do not depend on the others. */
static void plain_product(struct product p, int64_t first, int64_t end)
{
    p.at += first, p.c += first * p.ld, p.m = end - first;
    tiles(0, &p);
}

static void transposed_product(struct product p, int64_t first, int64_t end)
{
    p.a += first, p.c += first * p.ld, p.m = end - first;
    tiles(1, &p);
}
