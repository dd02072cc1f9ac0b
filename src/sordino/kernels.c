/* The loops that a private step spends its own time in. Optional: sordino.kernels says what stands in for them,
 * checks them when they are loaded, and docs/guarantees/noise.md (section 3) bounds the errors of the first.
 *
 * Plain C for the compiler to vectorise; it may contract a*b + c, which is an error less, and nothing else. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDE
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE float as_float(int32_t x) { float y; memcpy(&y, &x, sizeof y); return y; }
INLINE int32_t as_int(float x) { int32_t y; memcpy(&y, &x, sizeof y); return y; }

/* -ln(u * 2^-32): u = 2^e * m with m in [sqrt(1/2), sqrt(2)), ln m = 2 artanh((m-1)/(m+1)). 0 gives over 100. */
INLINE float minus_log(uint32_t u) {
    const int32_t root_half = 0x3F3504F3;
    int32_t bits = as_int((float)u) - root_half;
    float m = as_float((bits & 0x7FFFFF) + root_half);
    float s = (m - 1.0f) / (m + 1.0f), z = s * s;
    float series = 1.0f + z * (1.0f / 3 + z * (1.0f / 5 + z * (1.0f / 7 + z * (1.0f / 9))));
    return (float)(32 - (bits >> 23)) * 0.693147180559945f - 2.0f * s * series;
}

/* Of 2 pi v 2^-32, v signed: brought within an eighth of a turn exactly, then Taylor's series. */
INLINE void cos_sin(uint32_t v, float *cosine, float *sine) {
    int32_t quarter = (int32_t)(v + (1u << 29)) >> 30;
    float angle = (float)(int32_t)(v - ((uint32_t)quarter << 30)) * (float)(2.0 * M_PI * 0x1p-32);
    float z = angle * angle;
    float sn = angle * (1 + z * (-1.f / 6 + z * (1.f / 120 + z * (-1.f / 5040 + z * (1.f / 362880)))));
    float cs = 1 + z * (-1.f / 2 + z * (1.f / 24 + z * (-1.f / 720 + z * (1.f / 40320))));
    *cosine = (quarter & 1 ? sn : cs) * (float)(1 - ((quarter + 1) & 2));
    *sine = (quarter & 1 ? cs : sn) * (float)(1 - (quarter & 2));
}

/* values <- spacing * round(values/spacing + scale * Z) for pairs of values, Z from 32 digits of U and of V, in single
 * precision; a pair for which that leaves more than one integer is marked and stays as it was. */
#define ROUNDED_SUM(NAME, T, RINT)                                                                                     \
    WIDE void NAME(T *restrict cosines, T *restrict sines, const uint32_t *restrict u, const uint32_t *restrict v,     \
                   int64_t pairs, double scale, double spacing, double limit_, double low_, double high_,              \
                   uint8_t *restrict undecided) {                                                                      \
        const T inverse = (T)(1.0 / spacing), step = (T)spacing;                                                       \
        const float factor = (float)(2.0 * scale * scale);                                                             \
        const float limit = (float)limit_, low = (float)low_, high = (float)high_;                                     \
        for (int64_t i = 0; i < pairs; i++) {                                                                          \
            float log = minus_log(u[i]);                                                                               \
            float radius = sqrtf(factor * log), cosine, sine;                                                          \
            cos_sin(v[i], &cosine, &sine);                                                                             \
            T left = cosines[i] * inverse, right = sines[i] * inverse;                                                 \
            T whole = RINT(left), other = RINT(right);                                                                 \
            float first = (float)(left - whole) + radius * cosine, second = (float)(right - other) + radius * sine;    \
            float rounded = rintf(first), turned = rintf(second);                                                      \
            int open = (log > low) | (log < high) | (fabsf(first - rounded) > limit) | (fabsf(second - turned) > limit); \
            /* two integers are added in the dtype, rounded once; adding +0 makes one zero of two */                   \
            T summed = (whole + (T)rounded + (T)0) * step, next = (other + (T)turned + (T)0) * step;                   \
            cosines[i] = open ? cosines[i] : summed;                                                                   \
            sines[i] = open ? sines[i] : next;                                                                         \
            undecided[i] = (uint8_t)open;                                                                              \
        }                                                                                                              \
    }

ROUNDED_SUM(rounded_sum_f32, float, rintf)
ROUNDED_SUM(rounded_sum_f64, double, rint)

/* out[i] = extra + the sum of squares of row i */
#define SQUARES(NAME, T)                                                                                               \
    WIDE void NAME(const T *restrict rows, int64_t n, int64_t columns, int64_t stride, double extra, T *restrict out) { \
        enum { LANES = 64 };                                                                                           \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            const T *row = rows + i * stride;                                                                          \
            T sums[LANES] = {0};                                                                                       \
            int64_t j = 0;                                                                                             \
            for (; j + LANES <= columns; j += LANES)                                                                   \
                for (int k = 0; k < LANES; k++) sums[k] += row[j + k] * row[j + k];                                    \
            for (int k = 0; k < columns - j; k++) sums[k] += row[j + k] * row[j + k];                                  \
            for (int half = LANES / 2; half; half /= 2)                                                                \
                for (int k = 0; k < half; k++) sums[k] += sums[k + half];                                              \
            out[i] = sums[0] + (T)extra;                                                                               \
        }                                                                                                              \
    }

SQUARES(squares_f32, float)
SQUARES(squares_f64, double)

/* Copies, and returns the bits of the largest magnitude: the order of magnitudes is that of their bits, NaN last. */
WIDE int32_t copy_f32(const int32_t *restrict from, int32_t *restrict to, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t bits = from[i], magnitude = bits & 0x7FFFFFFF;
        to[i] = bits;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

/* (n, C, H, W) -> (n, places, C * kh * kw): the patch under a kernel at each of its places. Rows of the usual kernels
 * are copied as one constant piece. */
typedef struct {
    int64_t channels, height, width, kernel_height, kernel_width, stride_y, stride_x, dilation_y, dilation_x;
    int64_t places_y, places_x;
} Shape;

#define PATCHES(NAME, T)                                                                                               \
    INLINE void NAME##_of(const T *restrict from, T *restrict to, int64_t n, Shape s, int64_t k, int64_t step) {       \
        for (int64_t i = 0; i < n; i++, from += s.channels * s.height * s.width)                                       \
            for (int64_t y = 0; y < s.places_y; y++)                                                                   \
                for (int64_t x = 0; x < s.places_x; x++)                                                               \
                    for (int64_t c = 0; c < s.channels; c++) {                                                         \
                        const T *row = from + (c * s.height + y * s.stride_y) * s.width + x * s.stride_x;              \
                        for (int64_t r = 0; r < s.kernel_height; r++, row += s.dilation_y * s.width, to += k)          \
                            for (int64_t j = 0; j < k; j++) to[j] = row[j * step];                                     \
                    }                                                                                                  \
    }                                                                                                                  \
    WIDE void NAME(const T *from, T *to, int64_t n, const Shape *shape) {                                              \
        switch (shape->dilation_x == 1 ? shape->kernel_width : 0) {                                                    \
        case 3: NAME##_of(from, to, n, *shape, 3, 1); break;                                                           \
        case 4: NAME##_of(from, to, n, *shape, 4, 1); break;                                                           \
        case 5: NAME##_of(from, to, n, *shape, 5, 1); break;                                                           \
        case 7: NAME##_of(from, to, n, *shape, 7, 1); break;                                                           \
        case 8: NAME##_of(from, to, n, *shape, 8, 1); break;                                                           \
        default: NAME##_of(from, to, n, *shape, shape->kernel_width, shape->dilation_x);                               \
        }                                                                                                              \
    }

PATCHES(patches_f32, float)
PATCHES(patches_f64, double)
