/* The product of each record, and its squared norm while the product is in the registers. */

#include "tiles.h"

/* As `panels` of LINES columns, for (rows, columns) whose columns lie `apart` numbers from each other. */
INLINE void apart(const float *restrict from, int64_t stride, int64_t rows, int64_t columns, int64_t between,
                  float *restrict to) {
    for (int64_t j = 0; j < columns; j += LINES, to += LINES * rows)
        for (int64_t c = 0; c < LINES; c++) {
            const float *restrict column = from + (j + c) * between;
            for (int64_t k = 0; k < rows; k++) to[k * LINES + c] = j + c < columns ? column[k * stride] : 0;
        }
}

/* out (n, p, q): the sum over k < depth of left_k (p) times right_k (q) of each of n records; norm2 (n): the sums of
 * squares in double precision of what is written to out. out may be 0: then only norm2 is written. sizes: n, depth, p,
 * q; the strides of left between records, rows k and columns; those of right between records and rows, whose columns are
 * contiguous. DEEP rows at a time are laid out in `room`. What pads a tile is zero, or NaN if a number of the record is
 * not finite; then a number of the product is not finite, either. narrow: use vectors of 256 bits in any case. */
enum { DEEP = 512 };

#define PRODUCTS(NAME, TARGET, TILE, VECTOR, VECTORS, HALF, WIDER)                                                     \
    INLINE void NAME##_tile(const float *left, const float *panel, int64_t depth, float *to, int64_t stride,           \
                            int64_t lines, int64_t columns, int more, WIDER *squares) {                                \
        enum { LANES = sizeof(VECTOR) / sizeof(float), ACROSS = VECTORS * LANES };                                     \
        VECTOR sum[LINES][VECTORS];                                                                                    \
        const int whole = lines == LINES && columns == ACROSS;                                                         \
        _Pragma("GCC unroll 8") for (int r = 0; r < LINES; r++)                                                        \
            _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; v++)                                                  \
                sum[r][v] = more && whole ? *(const VECTOR *)(to + r * stride + v * LANES) : (VECTOR){0};              \
        if (more && !whole)                                                                                            \
            for (int64_t r = 0; r < lines; r++) memcpy(sum[r], to + r * stride, columns * sizeof(float));              \
        TILE(left, 1, LINES, panel, depth, sum);                                                                       \
        if (squares)                                                                                                   \
            _Pragma("GCC unroll 8") for (int r = 0; r < LINES; r++)                                                    \
                _Pragma("GCC unroll 4") for (int v = 0; v < 2 * VECTORS; v++) {                                        \
                    HALF half;                                                                                         \
                    memcpy(&half, (const float *)&sum[r][v / 2] + v % 2 * (LANES / 2), sizeof half);                   \
                    const WIDER wide = __builtin_convertvector(half, WIDER);                                           \
                    squares[r] += wide * wide;                                                                         \
                }                                                                                                      \
        if (whole && to)                                                                                               \
            _Pragma("GCC unroll 8") for (int r = 0; r < LINES; r++)                                                    \
                _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; v++) *(VECTOR *)(to + r * stride + v * LANES) = sum[r][v]; \
        else if (to)                                                                                                   \
            for (int64_t r = 0; r < lines; r++) memcpy(to + r * stride, sum[r], columns * sizeof(float));              \
    }                                                                                                                  \
    TARGET static void NAME(const float *left, const float *right, const int64_t *sizes, float *room, float *out,      \
                            double *norm2) {                                                                           \
        enum { ACROSS = VECTORS * sizeof(VECTOR) / sizeof(float) };                                                    \
        const int64_t n = sizes[0], depth = sizes[1], p = sizes[2], q = sizes[3];                                      \
        const int64_t rows = depth < DEEP ? depth : DEEP;                                                              \
        float *rights = room, *lefts = rights + rows * (q + ACROSS), *kept = lefts + rows * (p + LINES);               \
        for (int64_t i = 0; i < n; i++, left += sizes[4], right += sizes[7]) {                                         \
            float *const to = out ? out + i * p * q : depth > DEEP ? kept : 0;                                         \
            WIDER squares[LINES];                                                                                      \
            for (int r = 0; r < LINES; r++) squares[r] = (WIDER){0};                                                   \
            for (int64_t k = 0; k == 0 || k < depth; k += DEEP) {                                                      \
                const int64_t deep = k + DEEP < depth ? DEEP : depth - k;                                              \
                panels(right + k * sizes[8], sizes[8], deep, q, ACROSS, rights);                                       \
                if (sizes[6] == 1) panels(left + k * sizes[5], sizes[5], deep, p, LINES, lefts);                       \
                else apart(left + k * sizes[5], sizes[5], deep, p, sizes[6], lefts);                                   \
                for (int64_t x = 0; x < q; x += ACROSS)                                                                \
                    for (int64_t y = 0; y < p; y += LINES)                                                             \
                        NAME##_tile(lefts + y * deep, rights + x * deep, deep, to ? to + y * q + x : 0, q,             \
                                    y + LINES < p ? LINES : p - y, x + ACROSS < q ? ACROSS : q - x, k > 0,             \
                                    k + deep < depth ? 0 : squares);                                                   \
            }                                                                                                          \
            double total = 0;                                                                                          \
            for (int r = 0; r < LINES; r++)                                                                            \
                for (size_t l = 0; l < sizeof(WIDER) / sizeof(double); l++) total += squares[r][l];                    \
            norm2[i] = total;                                                                                          \
        }                                                                                                              \
    }

PRODUCTS(products_256, WIDE, panel_256, Eight, 1, Four, Four64)
#if defined(WIDE_CLONES)
PRODUCTS(products_512, BITS_512, panel_512, Sixteen, 2, Eight, Eight64)
#endif

void products_f32(const float *left, const float *right, const int64_t *sizes, float *room, float *out, double *norm2,
                  int32_t narrow) {
#if defined(WIDE_CLONES)
    if (!narrow && has_512_bits()) {
        products_512(left, right, sizes, room, out, norm2);
        return;
    }
#endif
    products_256(left, right, sizes, room, out, norm2);
}

/* The floats that `products_f32` needs as room. */
int64_t products_room(int64_t depth, int64_t p, int64_t q) {
    return (depth < DEEP ? depth : DEEP) * (p + q + 40) + (depth > DEEP ? p * q : 0);
}
