/* Linear maps in single precision. A result depends on its own row alone, whatever the number of rows. */

#include "tiles.h"

/* As `panels` of (rows, columns), from a matrix that is stored as (columns, rows). */
INLINE void turned(const float *restrict from, int64_t stride, int64_t rows, int64_t columns, int64_t width,
                   float *restrict to) {
    for (int64_t j = 0; j < columns; j += width, to += width * rows)
        for (int64_t c = 0; c < width; c++) {
            const float *restrict column = from + (j + c) * stride;
            for (int64_t k = 0; k < rows; k++) to[k * width + c] = j + c < columns ? column[k] : 0;
        }
}

/* out (n, q) = x (n, p) times matrix (p, q), plus bias (q) unless it is 0. sizes: n, p, q, the strides of the rows of x
 * and of those of the matrix, and whether it is stored as (q, p). DEPTH of its rows and BREADTH of its columns are laid
 * out in `room` at a time, and LINES rows of x if fewer are left. */
enum { DEPTH = 512, BREADTH = 256 };

#define MAPS(NAME, TARGET, TILE, VECTOR, VECTORS)                                                                      \
    INLINE void NAME##_tile(const float *x, int64_t line, const float *panel, int64_t depth, const float *bias,        \
                            float *out, int64_t stride, int64_t lines, int64_t columns, int more) {                    \
        enum { LANES = sizeof(VECTOR) / sizeof(float), ACROSS = VECTORS * LANES };                                     \
        VECTOR sum[LINES][VECTORS];                                                                                    \
        _Pragma("GCC unroll 8") for (int r = 0; r < LINES; r++)                                                        \
            _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; v++) sum[r][v] = (VECTOR){0};                         \
        TILE(x, line, 1, panel, depth, sum);                                                                           \
        if (lines == LINES && columns == ACROSS) {                                                                     \
            _Pragma("GCC unroll 8") for (int r = 0; r < LINES; r++)                                                    \
                _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; v++) {                                            \
                    VECTOR *place = (VECTOR *)(out + r * stride + v * LANES);                                          \
                    if (more) sum[r][v] += *place;                                                                     \
                    else if (bias) sum[r][v] += *(const VECTOR *)(bias + v * LANES);                                   \
                    *place = sum[r][v];                                                                                \
                }                                                                                                      \
            return;                                                                                                    \
        }                                                                                                              \
        for (int64_t r = 0; r < lines; r++)                                                                            \
            for (int64_t j = 0; j < columns; j++) {                                                                    \
                float *place = out + r * stride + j;                                                                   \
                *place = ((const float *)sum[r])[j] + (more ? *place : bias ? bias[j] : 0);                            \
            }                                                                                                          \
    }                                                                                                                  \
    TARGET static void NAME(const float *x, const float *matrix, const float *bias, const int64_t *sizes, float *room, \
                            float *out) {                                                                              \
        enum { ACROSS = VECTORS * sizeof(VECTOR) / sizeof(float) };                                                    \
        const int64_t n = sizes[0], p = sizes[1], q = sizes[2], stride = sizes[4];                                     \
        float *last = room + DEPTH * (BREADTH + ACROSS);                                                               \
        for (int64_t k = 0; k < p; k += DEPTH) {                                                                       \
            const int64_t depth = k + DEPTH < p ? DEPTH : p - k, rest = n % LINES;                                     \
            for (int64_t r = 0; r < LINES * depth; r++)                                                                \
                last[r] = r / depth < rest ? x[(n - rest + r / depth) * sizes[3] + k + r % depth] : 0;                 \
            for (int64_t w = 0; w < q; w += BREADTH) {                                                                 \
                const int64_t breadth = w + BREADTH < q ? BREADTH : q - w;                                             \
                if (sizes[5]) turned(matrix + w * stride + k, stride, depth, breadth, ACROSS, room);                   \
                else panels(matrix + k * stride + w, stride, depth, breadth, ACROSS, room);                            \
                for (int64_t i = 0; i < n; i += LINES) {                                                               \
                    const int whole = i + LINES <= n;                                                                  \
                    for (int64_t j = 0; j < breadth; j += ACROSS)                                                      \
                        NAME##_tile(whole ? x + i * sizes[3] + k : last, whole ? sizes[3] : depth, room + j * depth,   \
                                    depth, bias ? bias + w + j : 0, out + i * q + w + j, q, whole ? LINES : rest,      \
                                    j + ACROSS < breadth ? ACROSS : breadth - j, k > 0);                               \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

MAPS(maps_256, WIDE, panel_256, Eight, 1)
#if defined(WIDE_CLONES)
MAPS(maps_512, BITS_512, panel_512, Sixteen, 2)
#endif

/* narrow: use vectors of 256 bits in any case. */
void maps_f32(const float *x, const float *matrix, const float *bias, const int64_t *sizes, float *room, float *out,
              int32_t narrow) {
#if defined(WIDE_CLONES)
    if (!narrow && has_512_bits()) {
        maps_512(x, matrix, bias, sizes, room, out);
        return;
    }
#endif
    maps_256(x, matrix, bias, sizes, room, out);
}

/* The floats that `maps_f32` needs as room. */
int64_t maps_room(void) { return DEPTH * (BREADTH + 32 + LINES); }

/* Are these maps faster than those of MKL? It has no loops with 512 bits for AMD's processors: theirs take 2.3 times as
 * long. */
int32_t maps_pay(void) {
#if defined(WIDE_CLONES)
    return __builtin_cpu_is("amd") && has_512_bits();
#else
    return 0;
#endif
}
