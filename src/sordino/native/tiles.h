/* What the compiled loops share: which processors they are compiled for, vectors, and tiles of matrix products. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define WIDE_CLONES 1
#define BITS_512 __attribute__((target("arch=x86-64-v4")))
#else
#define WIDE
#endif
#define INLINE static inline __attribute__((always_inline))

#if defined(WIDE_CLONES)
INLINE int has_512_bits(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
}
#endif

INLINE float as_float(int32_t x) { float y; memcpy(&y, &x, sizeof y); return y; }
INLINE int32_t as_int(float x) { int32_t y; memcpy(&y, &x, sizeof y); return y; }

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float Sixteen __attribute__((vector_size(64), aligned(4), may_alias));
typedef double Four64 __attribute__((vector_size(32), aligned(8), may_alias));
typedef double Eight64 __attribute__((vector_size(64), aligned(8), may_alias));

/* Copies (rows, columns) with the given stride into consecutive panels of `width` columns; the last one is padded with
 * zeros. */
INLINE void panels(const float *restrict from, int64_t stride, int64_t rows, int64_t columns, int64_t width,
                   float *restrict to) {
    const int64_t whole = columns / width * width;
    for (int64_t k = 0; k < rows; k++, from += stride, to += width) {
        for (int64_t j = 0; j < whole; j += width) memcpy(to + j * rows, from + j, width * sizeof(float));
        if (whole < columns)
            for (int64_t c = 0; c < width; c++) to[whole * rows + c] = whole + c < columns ? from[whole + c] : 0;
    }
}


/* sum (LINES, VECTORS) += for each of `depth` steps, left (LINES) times the panel's row of VECTORS vectors. left: line r
 * of step k is left[r * line + k * step]. */
enum { LINES = 8 };

#define PANEL_TILE(NAME, VECTOR, VECTORS)                                                                              \
    INLINE void NAME(const float *restrict left, int64_t line, int64_t step, const float *restrict panel,              \
                     int64_t depth, VECTOR sum[LINES][VECTORS]) {                                                      \
        enum { LANES = sizeof(VECTOR) / sizeof(float) };                                                               \
        for (int64_t k = 0; k < depth; k++, left += step, panel += VECTORS * LANES) {                                  \
            VECTOR x[VECTORS];                                                                                         \
            _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; v++) x[v] = *(const VECTOR *)(panel + v * LANES);     \
            _Pragma("GCC unroll 8") for (int r = 0; r < LINES; r++)                                                    \
                _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; v++) sum[r][v] += x[v] * left[r * line];          \
        }                                                                                                              \
    }

PANEL_TILE(panel_256, Eight, 1)
PANEL_TILE(panel_512, Sixteen, 2)
