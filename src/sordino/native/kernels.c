/* Optional C kernels for the loops in which a private step spends most of its own time. sordino.native.kernels lists
 * the Python code that each of them replaces and tests them when it loads the library. docs/guarantees/noise.md bounds
 * their errors: section 3 those of rounded_sum, section 6 those of the norms.
 *
 * The loops are plain C that the compiler vectorises. Fused multiply-add is allowed: it only removes a rounding. No
 * other change of floating-point results is allowed (no -ffast-math). */


#include "tiles.h"

/* -ln(u * 2^-32) from u = 2^e * m with m in [sqrt(1/2), sqrt(2)) and ln m = 2 artanh((m-1)/(m+1)). For u = 0 the result
 * is larger than 100. */
INLINE float minus_log(uint32_t u) {
    const int32_t root_half = 0x3F3504F3;
    int32_t bits = as_int((float)u) - root_half;
    float m = as_float((bits & 0x7FFFFF) + root_half);
    float s = (m - 1.0f) / (m + 1.0f), z = s * s;
    float series = 1.0f + z * (1.0f / 3 + z * (1.0f / 5 + z * (1.0f / 7 + z * (1.0f / 9))));
    return (float)(32 - (bits >> 23)) * 0.693147180559945f - 2.0f * s * series;
}

/* Cosine and sine of 2 pi v 2^-32, with v as a signed number. The angle is reduced exactly to at most an eighth of a
 * turn; then the Taylor series is used. */
INLINE void cos_sin(uint32_t v, float *cosine, float *sine) {
    int32_t quarter = (int32_t)(v + (1u << 29)) >> 30;
    float angle = (float)(int32_t)(v - ((uint32_t)quarter << 30)) * (float)(2.0 * M_PI * 0x1p-32);
    float z = angle * angle;
    float sn = angle * (1 + z * (-1.f / 6 + z * (1.f / 120 + z * (-1.f / 5040 + z * (1.f / 362880)))));
    float cs = 1 + z * (-1.f / 2 + z * (1.f / 24 + z * (-1.f / 720 + z * (1.f / 40320))));
    *cosine = as_float(as_int(quarter & 1 ? sn : cs) ^ (int32_t)((uint32_t)((quarter + 1) & 2) << 30));
    *sine = as_float(as_int(quarter & 1 ? cs : sn) ^ (int32_t)((uint32_t)(quarter & 2) << 30));
}

/* A tensor in memory: its address and its number of elements. The released vector is the concatenation of several. */
typedef struct { int64_t at, n; } Part;

/* An element of the concatenation: `number` elements after the beginning of `part`, perhaps in a later part. `rest`
 * moves `part` forward to the part that contains the element and returns how many elements this part has from there
 * on. */
typedef struct { const Part *part; int64_t number; } Place;

INLINE int64_t rest(Place *place) {
    while (place->number >= place->part->n) place->number -= place->part++->n;
    return place->part->n - place->number;
}

/* An undecided pair: the addresses of its two values and of its two results (the second ones are 0 if it has no sine),
 * and 32 binary digits of U and of V. */
typedef struct { int64_t values[2], results[2]; uint32_t u, v; } Open;

/* The scale of the noise in grid steps, the spacing of the grid, the value of one grid step in the result, and when a
 * stage may decide: if the sum is at most `limit` from an integer and -ln U is between `least` and `most`. */
typedef struct { double scale, spacing, step, limit, least, most; } Rule;

/* to <- step * round(from/spacing + scale * Z) for pairs of values, with Z computed in single precision from 32
 * digits of U and of V. A pair for which the error bound leaves more than one integer is marked as undecided, and
 * its values are copied unchanged. The type R of the results is the type T of the values or a narrower one. If R is
 * T, `to` may be `from`. */
#define ROUNDED_SUM(NAME, T, R, RINT)                                                                                  \
    INLINE void NAME##_run(const T *from, const T *sines_from, R *to, R *sines_to, const uint32_t *u,                  \
                           const uint32_t *v, int64_t pairs, const Rule *rule, uint8_t *undecided) {                   \
        const T inverse = (T)(1.0 / rule->spacing), step = (T)rule->step;                                              \
        const float factor = (float)(2.0 * rule->scale * rule->scale);                                                 \
        const float limit = (float)rule->limit, least = (float)rule->least, most = (float)rule->most;                  \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < pairs; i++) {                                                     \
            float log = minus_log(u[i]);                                                                               \
            float radius = sqrtf(factor * log), cosine, sine;                                                          \
            cos_sin(v[i], &cosine, &sine);                                                                             \
            T left = from[i] * inverse, right = sines_from[i] * inverse;                                               \
            T whole = RINT(left), other = RINT(right);                                                                 \
            float first = (float)(left - whole) + radius * cosine, second = (float)(right - other) + radius * sine;    \
            float rounded = rintf(first), turned = rintf(second);                                                      \
            int open = (log > most) | (log < least);                                                                   \
            open |= (fabsf(first - rounded) > limit) | (fabsf(second - turned) > limit);                               \
            /* The sum of two integers is rounded once, in type T. Adding +0 turns -0 into +0. */                      \
            T summed = (whole + (T)rounded + (T)0) * step, next = (other + (T)turned + (T)0) * step;                   \
            to[i] = (R)(open ? from[i] : summed);                                                                      \
            sines_to[i] = (R)(open ? sines_from[i] : next);                                                            \
            undecided[i] = (uint8_t)open;                                                                              \
        }                                                                                                              \
    }                                                                                                                  \
    /* One block: n values, beginning at element `start` of the parts. `digits` contains the digits of U of all        \
     * pairs, then those of V; `address` is the position of the first pair's digits in the stream. Appends the         \
     * open pairs to `open` and their positions, as AES counter blocks, to `counters`, after the first `count`         \
     * entries, and returns the new count. If n is odd, the last pair is always left open. */                          \
    WIDE int64_t NAME(const Part *parts, const Part *results, int64_t start, int64_t n, const uint32_t *digits,        \
                      const Rule *rule, uint64_t address, uint8_t *mask, Open *open, uint64_t *counters,               \
                      int64_t count) {                                                                                 \
        const int64_t pairs = (n + 1) / 2, both = n - pairs;                                                           \
        Place places[4] = {{parts, start}, {results, start}, {parts, start + pairs}, {results, start + pairs}};        \
        for (int64_t done = 0, run; done < pairs; done += run) {                                                       \
            const int sides = done < both ? 4 : 2;                                                                     \
            run = done < both ? both - done : 1;                                                                       \
            int64_t at[4] = {0};                                                                                       \
            for (int k = 0; k < sides; k++) {                                                                          \
                const int64_t here = rest(places + k), size = k & 1 ? sizeof(R) : sizeof(T);                           \
                at[k] = places[k].part->at + places[k].number * size;                                                  \
                run = here < run ? here : run;                                                                         \
            }                                                                                                          \
            if (sides == 4)                                                                                            \
                NAME##_run((const T *)at[0], (const T *)at[2], (R *)at[1], (R *)at[3], digits + done,                  \
                           digits + pairs + done, run, rule, mask);                                                    \
            else *mask = 1;                                                                                            \
            for (int64_t k = 0; k < run; k++) {                                                                        \
                uint64_t eight;                                                                                        \
                if (k + 8 <= run && !(k & 7) && (memcpy(&eight, mask + k, 8), !eight)) k += 7;                         \
                else if (mask[k]) {                                                                                    \
                    for (int side = 0; side < 2; side++) {                                                             \
                        const int there = 2 * side < sides;                                                            \
                        open[count].values[side] = there ? at[2 * side] + k * (int64_t)sizeof(T) : 0;                  \
                        open[count].results[side] = there ? at[2 * side + 1] + k * (int64_t)sizeof(R) : 0;             \
                    }                                                                                                  \
                    open[count].u = digits[done + k], open[count].v = digits[pairs + done + k];                        \
                    counters[2 * count] = address + (uint64_t)(done + k), counters[2 * count++ + 1] = 0;               \
                }                                                                                                      \
            }                                                                                                          \
            for (int k = 0; k < sides; k++) places[k].number += run;                                                   \
        }                                                                                                              \
        return count;                                                                                                  \
    }                                                                                                                  \
    /* The same for the open pairs in double precision. Each 16 bytes of `further` begin with 32 further digits of     \
     * U and 32 of V. Writes the indices of the pairs that are still open to `left` and returns their number. */       \
    int64_t NAME##_again(const Open *open, int64_t count, const uint32_t *further, const Rule *rule, int64_t *left) {  \
        const T inverse = (T)(1.0 / rule->spacing), step = (T)rule->step;                                              \
        int64_t still = 0;                                                                                             \
        for (int64_t k = 0; k < count; k++) {                                                                          \
            const T *const from[2] = {(const T *)open[k].values[0], (const T *)open[k].values[1]};                     \
            R *const to[2] = {(R *)open[k].results[0], (R *)open[k].results[1]};                                       \
            uint64_t u = ((uint64_t)open[k].u << 32 | further[4 * k]) >> 1;                                            \
            int64_t v = (int64_t)((uint64_t)open[k].v << 32 | further[4 * k + 1]);                                     \
            double log_u = -log((double)u * 0x1p-63), radius = sqrt(2.0 * rule->scale * rule->scale * log_u);          \
            double angle = (double)v * (2.0 * M_PI * 0x1p-64), turn[2] = {cos(angle), sin(angle)};                     \
            int undecided = !(log_u >= rule->least && log_u <= rule->most);                                            \
            T next[2] = {0};                                                                                           \
            for (int side = 0; side < 2 && from[side]; side++) {                                                       \
                T scaled = *from[side] * inverse, whole = RINT(scaled);                                                \
                double total = radius * turn[side] + (double)(scaled - whole), rounded = rint(total);                  \
                undecided |= !(fabs(total - rounded) <= rule->limit);                                                  \
                next[side] = (whole + (T)rounded + (T)0) * step;                                                       \
            }                                                                                                          \
            if (undecided) left[still++] = k;                                                                          \
            else for (int side = 0; side < 2 && to[side]; side++) *to[side] = (R)next[side];                           \
        }                                                                                                              \
        return still;                                                                                                  \
    }

ROUNDED_SUM(rounded_sum_f32, float, float, rintf)
ROUNDED_SUM(rounded_sum_f64, double, double, rint)
ROUNDED_SUM(rounded_sum_f64_f32, double, float, rint)

/* AES-256 in counter mode (FIPS 197, SP 800-38A) with the processor's AES instructions, whose time does not depend
 * on the key. Block i is the encryption of i as a big-endian number of 16 bytes. These are the bytes that OpenSSL's
 * AES-256-CTR returns for zeros if the IV is zero. */
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

enum { ROUNDS = 14 };
#define AES __attribute__((target("aes,sse4.1")))
#if defined(WIDE_CLONES)
#define VAES __attribute__((target("vaes,aes,avx2")))
#endif

/* Word k of the result is the exclusive or of words 0 to k of a. */
AES static inline __m128i prefix(__m128i a) {
    a = _mm_xor_si128(a, _mm_slli_si128(a, 4));
    return _mm_xor_si128(a, _mm_slli_si128(a, 8));
}

/* The round keys of a 256-bit key (FIPS 197, section 5.2). */
AES static void schedule_of(const uint8_t *key, __m128i *keys) {
    keys[0] = _mm_loadu_si128((const __m128i *)key), keys[1] = _mm_loadu_si128((const __m128i *)(key + 16));
#define NEXT(I, CONSTANT)                                                                                              \
    keys[I] = _mm_xor_si128(prefix(keys[I - 2]),                                                                       \
                            _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[I - 1], CONSTANT), 0xFF));                \
    if (I < ROUNDS)                                                                                                    \
        keys[I + 1] = _mm_xor_si128(prefix(keys[I - 1]),                                                               \
                                    _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[I], 0), 0xAA));
    NEXT(2, 1) NEXT(4, 2) NEXT(6, 4) NEXT(8, 8) NEXT(10, 16) NEXT(12, 32) NEXT(14, 64)
#undef NEXT
}

/* Blocks `first` to first + blocks - 1 of the key stream. */
AES static void some_blocks(const __m128i *keys, uint64_t first, int64_t blocks, uint8_t *out) {
    enum { LANES = 8 };
    for (int64_t done = 0; done < blocks; done += LANES) {
        const int64_t here = blocks - done < LANES ? blocks - done : LANES;
        __m128i state[LANES];
        for (int k = 0; k < LANES; k++) {
            const uint64_t counter = __builtin_bswap64(first + (uint64_t)(done + k));
            state[k] = _mm_xor_si128(_mm_set_epi64x((int64_t)counter, 0), keys[0]);
        }
        for (int r = 1; r < ROUNDS; r++)
            for (int k = 0; k < LANES; k++) state[k] = _mm_aesenc_si128(state[k], keys[r]);
        for (int k = 0; k < LANES; k++) state[k] = _mm_aesenclast_si128(state[k], keys[ROUNDS]);
        for (int64_t k = 0; k < here; k++) _mm_storeu_si128((__m128i *)(out + 16 * (done + k)), state[k]);
    }
}

#ifdef VAES
/* The same with two blocks in each register; `blocks` must be a multiple of 16. */
VAES static void many_blocks(const __m128i *keys, uint64_t first, int64_t blocks, uint8_t *out) {
    enum { LANES = 8 };
    const __m256i swap = _mm256_broadcastsi128_si256(_mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 7, 6, 5, 4, 3, 2, 1, 0));
    const __m256i two = _mm256_set_epi64x(2, 0, 2, 0);
    __m256i counter = _mm256_set_epi64x((int64_t)(first + 1), 0, (int64_t)first, 0);
    for (int64_t done = 0; done < blocks; done += 2 * LANES) {
        __m256i state[LANES];
        const __m256i begin = _mm256_broadcastsi128_si256(keys[0]);
        for (int k = 0; k < LANES; k++) {
            state[k] = _mm256_xor_si256(_mm256_shuffle_epi8(counter, swap), begin);
            counter = _mm256_add_epi64(counter, two);
        }
        for (int r = 1; r < ROUNDS; r++) {
            const __m256i key = _mm256_broadcastsi128_si256(keys[r]);
            for (int k = 0; k < LANES; k++) state[k] = _mm256_aesenc_epi128(state[k], key);
        }
        const __m256i last = _mm256_broadcastsi128_si256(keys[ROUNDS]);
        for (int k = 0; k < LANES; k++)
            _mm256_storeu_si256((__m256i *)(out + 16 * (done + 2 * k)), _mm256_aesenclast_epi128(state[k], last));
    }
}

#endif

/* Writes `bytes` bytes of the key stream, beginning with block `first`, and returns 1. Returns 0 and writes nothing
 * if the processor has no AES instructions. */
int32_t key_stream(const uint8_t *key, uint64_t first, int64_t bytes, uint8_t *out) {
    if (!__builtin_cpu_supports("aes") || !__builtin_cpu_supports("sse4.1")) return 0;
    __m128i keys[ROUNDS + 1], last;
    schedule_of(key, keys);
    const int64_t blocks = bytes / 16;
    int64_t many = 0;
#ifdef VAES
    if (__builtin_cpu_supports("vaes") && __builtin_cpu_supports("avx2")) many = blocks & ~(int64_t)15;
    if (many) many_blocks(keys, first, many, out);
#endif
    some_blocks(keys, first + (uint64_t)many, blocks - many, out + 16 * many);
    if (bytes % 16) {
        some_blocks(keys, first + (uint64_t)blocks, 1, (uint8_t *)&last);
        memcpy(out + 16 * blocks, &last, (size_t)(bytes % 16));
    }
    return 1;
}
#else
int32_t key_stream(const uint8_t *key, uint64_t first, int64_t bytes, uint8_t *out) { return 0; }
#endif

/* out[i] = the sum of squares of row i, times factors[i] if `factors` is not null, as a double. Each vector lane
 * adds at most PIECE squares in type T before the partial sums are added in double precision. In single precision,
 * if the sum is outside the range in which no square overflows and underflow is negligible, it is computed again
 * from squares in double precision, where the square of every float is zero or a normal number. In double
 * precision, the smallest normal number is added for each column, because its square may have underflowed.
 * (docs/guarantees/noise.md, section 6) */
#define SQUARES(NAME, T, SINGLE)                                                                                       \
    WIDE void NAME(const T *restrict rows, int64_t n, int64_t columns, int64_t stride, const double *restrict factors, \
                   double *restrict out) {                                                                             \
        enum { LANES = 8, PIECE = 64 };                                                                                \
        typedef T Lanes __attribute__((vector_size(LANES * sizeof(T)), aligned(sizeof(T)), may_alias));                \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            const T *row = rows + i * stride;                                                                          \
            double total = SINGLE ? 0 : (double)columns * DBL_MIN;                                                     \
            int64_t j = 0;                                                                                             \
            while (j + LANES <= columns) {                                                                             \
                Lanes a = {0}, b = {0}, c = {0}, d = {0};                                                              \
                int k = 0;                                                                                             \
                for (; k < PIECE && j + 4 * LANES <= columns; k++, j += 4 * LANES) {                                   \
                    const Lanes *x = (const Lanes *)(row + j);                                                         \
                    a += x[0] * x[0], b += x[1] * x[1], c += x[2] * x[2], d += x[3] * x[3];                            \
                }                                                                                                      \
                for (; k < PIECE && j + LANES <= columns; k++, j += LANES) {                                           \
                    const Lanes *x = (const Lanes *)(row + j);                                                         \
                    a += x[0] * x[0];                                                                                  \
                }                                                                                                      \
                a = (a + b) + (c + d);                                                                                 \
                for (int l = 0; l < LANES; l++) total += (double)a[l];                                                 \
            }                                                                                                          \
            for (; j < columns; j++) total += (double)row[j] * (double)row[j];                                         \
            if (SINGLE && !(total >= (double)columns * 0x1p-100 && total <= 0x1p120)) {                                \
                total = 0;                                                                                             \
                for (j = 0; j < columns; j++) total += (double)row[j] * (double)row[j];                                \
            }                                                                                                          \
            out[i] = factors ? total * factors[i] : total;                                                             \
        }                                                                                                              \
    }

SQUARES(squares_f32, float, 1)
SQUARES(squares_f64, double, 0)

/* out = the rows, each multiplied by its weight; totals += the sum of these rows. A row with weight zero becomes
 * zeros even if it contains NaN or infinity. `out` may be `rows`. */
#define SCALED(NAME, T)                                                                                                \
    WIDE void NAME(const T *rows, int64_t n, int64_t columns, int64_t stride, const double *restrict weights, T *out,  \
                   double *restrict totals) {                                                                          \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            const T *row = rows + i * stride;                                                                          \
            T *to = out + i * columns;                                                                                 \
            const double weight = weights[i];                                                                          \
            if (weight == 0) {                                                                                         \
                for (int64_t j = 0; j < columns; j++) to[j] = 0;                                                       \
                continue;                                                                                              \
            }                                                                                                          \
            _Pragma("GCC ivdep") for (int64_t j = 0; j < columns; j++) {                                               \
                T value = (T)(weight * (double)row[j]);                                                                \
                to[j] = value;                                                                                         \
                totals[j] += (double)value;                                                                            \
            }                                                                                                          \
        }                                                                                                              \
    }

SCALED(scaled_f32, float)
SCALED(scaled_f64, double)

/* totals += the sum of the rows, each multiplied by its weight, in double precision. A row with weight zero is not
 * read. */
#define GATHERED(NAME, T)                                                                                              \
    INLINE void NAME##_tile(const T *restrict rows, int64_t n, int64_t width, int64_t stride,                          \
                            const double *restrict weights, double *restrict to) {                                     \
        for (int64_t i = 0; i < n;) {                                                                                  \
            const T *row[4];                                                                                           \
            double w[4];                                                                                               \
            int found = 0;                                                                                             \
            for (; i < n && found < 4; i++)                                                                            \
                if (weights[i] != 0) row[found] = rows + i * stride, w[found++] = weights[i];                          \
            if (found == 4) {                                                                                          \
                const T *restrict x0 = row[0], *restrict x1 = row[1], *restrict x2 = row[2], *restrict x3 = row[3];    \
                for (int64_t j = 0; j < width; j++)                                                                    \
                    to[j] += ((double)x0[j] * w[0] + (double)x1[j] * w[1]) +                                           \
                             ((double)x2[j] * w[2] + (double)x3[j] * w[3]);                                            \
            } else                                                                                                     \
                for (int k = 0; k < found; k++)                                                                        \
                    for (int64_t j = 0; j < width; j++) to[j] += (double)row[k][j] * w[k];                             \
        }                                                                                                              \
    }                                                                                                                  \
    WIDE void NAME(const T *restrict rows, int64_t n, int64_t columns, int64_t stride, const double *restrict weights, \
                   double *restrict totals) {                                                                          \
        for (int64_t left = 0; left < columns; left += GATHER)                                                         \
            NAME##_tile(rows + left, n, left + GATHER < columns ? GATHER : columns - left, stride, weights,            \
                        totals + left);                                                                                \
    }

enum { GATHER = 2048 }; /* number of columns that are summed at a time */
GATHERED(gathered_f32, float)
GATHERED(gathered_f64, double)

/* Row places[i] of the totals += weights[owners[i]] times row i, in double precision. A row with weight zero is not
 * read. */
#define SCATTERED(NAME, T)                                                                                             \
    WIDE void NAME(const T *restrict rows, int64_t n, int64_t columns, const int64_t *restrict places,                 \
                   const int64_t *restrict owners, const double *restrict weights, double *restrict totals) {          \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            const double weight = weights[owners[i]];                                                                  \
            const T *restrict row = rows + i * columns;                                                                \
            double *restrict to = totals + places[i] * columns;                                                        \
            if (weight != 0)                                                                                           \
                for (int64_t j = 0; j < columns; j++) to[j] += weight * (double)row[j];                                \
        }                                                                                                              \
    }

/* Sums the rows of each record that have the same place. rows: (records, positions, columns); at: the place of each
 * row in a table of `size` rows. For every record and every place of it, writes the sum to a row of `values`, the
 * place to `places` and the record's index to `owners`. Rows with place `skip` are omitted. last: memory for `size`
 * integers. Returns the number of sums, or -1 if a place is outside the table. */
WIDE int64_t merged_f32(const float *restrict rows, const int64_t *restrict at, const int64_t *restrict shape,
                        int64_t size, int64_t skip, int64_t *restrict last, float *restrict values,
                        int64_t *restrict places, int64_t *restrict owners) {
    const int64_t records = shape[0], positions = shape[1], columns = shape[2];
    int64_t count = 0;
    memset(last, -1, (size_t)size * sizeof *last);
    for (int64_t i = 0; i < records; i++) {
        const int64_t first = count;
        for (int64_t s = 0; s < positions; s++, rows += columns) {
            const int64_t place = *at++;
            if (place < 0 || place >= size) return -1;
            if (place == skip) continue;
            float *restrict to = values + last[place] * columns;
            if (last[place] >= first) {
                for (int64_t j = 0; j < columns; j++) to[j] += rows[j];
                continue;
            }
            memcpy(values + count * columns, rows, (size_t)columns * sizeof *rows);
            places[count] = place, owners[count] = i, last[place] = count++;
        }
    }
    return count;
}

/* Row k of the totals = the sum of weights[owners[i]] times row i over all i with places[i] = k, in increasing
 * order of i, computed in double precision and rounded once. A row with weight zero is not read. room: memory for
 * size + 1 + n integers; sums: memory for one row in double precision. */
WIDE void placed_f32(const float *restrict rows, int64_t n, int64_t columns, const int64_t *restrict places,
                     const int64_t *restrict owners, const double *restrict weights, int64_t size,
                     int64_t *restrict room, double *restrict sums, float *restrict totals) {
    int64_t *restrict first = room, *restrict order = room + size + 1;
    memset(first, 0, (size_t)(size + 1) * sizeof *first);
    for (int64_t i = 0; i < n; i++) first[places[i] + 1]++;
    for (int64_t k = 0; k < size; k++) first[k + 1] += first[k];
    for (int64_t i = 0; i < n; i++) order[first[places[i]]++] = i; /* now first[k] is the end of place k */
    for (int64_t k = 0, i = 0; k < size; k++) {
        float *restrict to = totals + k * columns;
        if (i == first[k]) {
            memset(to, 0, (size_t)columns * sizeof *to);
            continue;
        }
        memset(sums, 0, (size_t)columns * sizeof *sums);
        for (; i < first[k]; i++) {
            const double weight = weights[owners[order[i]]];
            const float *restrict row = rows + order[i] * columns;
            if (weight != 0)
                for (int64_t j = 0; j < columns; j++) sums[j] += weight * (double)row[j];
        }
        for (int64_t j = 0; j < columns; j++) to[j] = (float)sums[j];
    }
}

SCATTERED(scattered_f32, float)
SCATTERED(scattered_f64, double)

/* total (p, q) += the sum over blocks b of weights[b] times the sum over the block's rows k of the outer product of
 * left_k (p) and right_k (q). Block b consists of the rows bounds[b] <= k < bounds[b + 1]. Within a block, sums are
 * in single precision; for p > SLIM over at most DEEP rows at a time. They are added up in double precision, so that
 * the rounding error of a block does not depend on the other blocks. The loops go over tiles of the total that stay in
 * the cache. sizes: the number of blocks, p, q, the strides of left and right, and the number of rows of a block that
 * belong to one record: for p > SLIM these rows are summed first. room: memory for `blocked_room()` floats. If p > SLIM
 * the result may be `narrow` instead: the sum over all blocks, rounded once to single precision. */
enum { DOWN = 6, HIGH = 96, BROAD = 128, DEEP = 128 };

/* One tile: to (DOWN, two vectors), in lines of BROAD numbers, += weight times the sum over `depth` rows, in groups of
 * `each`, of left (DOWN columns) and right (two vectors of columns), which were laid out by `panels`. HALF and WIDER
 * are vectors of half as many numbers as VECTOR has, in single and in double precision. */
#define TILE(NAME, VECTOR, HALF, WIDER)                                                                                \
    INLINE void NAME(const float *restrict left, const float *restrict right, int64_t depth, int64_t each,             \
                     double weight, double *restrict to) {                                                             \
        enum { LANES = sizeof(VECTOR) / sizeof(float), HALVES = LANES / 2 };                                           \
        VECTOR sum[DOWN][2];                                                                                           \
        _Pragma("GCC unroll 6") for (int r = 0; r < DOWN; r++) sum[r][0] = sum[r][1] = (VECTOR){0};                    \
        for (int64_t k = 0; k < depth;) {                                                                              \
            const int64_t end = k + each < depth ? k + each : depth;                                                   \
            VECTOR part[DOWN][2], a = *(const VECTOR *)(right + k * 2 * LANES), b = *(const VECTOR *)(right + (k * 2 + 1) * LANES);\
            _Pragma("GCC unroll 6") for (int r = 0; r < DOWN; r++) {                                                   \
                part[r][0] = a * left[k * DOWN + r];                                                                   \
                part[r][1] = b * left[k * DOWN + r];                                                                   \
            }                                                                                                          \
            for (k++; k < end; k++) {                                                                                  \
                a = *(const VECTOR *)(right + k * 2 * LANES), b = *(const VECTOR *)(right + (k * 2 + 1) * LANES);      \
                _Pragma("GCC unroll 6") for (int r = 0; r < DOWN; r++) {                                               \
                    part[r][0] += a * left[k * DOWN + r];                                                              \
                    part[r][1] += b * left[k * DOWN + r];                                                              \
                }                                                                                                      \
            }                                                                                                          \
            _Pragma("GCC unroll 6") for (int r = 0; r < DOWN; r++) sum[r][0] += part[r][0], sum[r][1] += part[r][1];   \
        }                                                                                                              \
        _Pragma("GCC unroll 6") for (int r = 0; r < DOWN; r++)                                                         \
            _Pragma("GCC unroll 4") for (int part = 0; part < 4; part++) {                                             \
                HALF half;                                                                                             \
                memcpy(&half, (const float *)&sum[r][part / 2] + part % 2 * HALVES, sizeof half);                      \
                *(WIDER *)(to + r * BROAD + HALVES * part) += weight * __builtin_convertvector(half, WIDER);           \
            }                                                                                                          \
    }

TILE(tile_256, Eight, Four, Four64)
TILE(tile_512, Sixteen, Eight, Eight64)

/* One block if left has few columns (p <= SLIM). The rows of right are not copied: four rows at a time are read, in
 * strips of STRIP columns, so that the strip and the sums (p, STRIP) of the block stay in the first-level cache. For
 * one left column the strips have LONG columns: memory is read fastest where it is contiguous. */
enum { STRIP = 512, LONG = 4096, SLIM = 24 };

INLINE void strip(const float *restrict left, int64_t left_stride, const float *restrict right, int64_t right_stride,
                  int64_t depth, int64_t p, int64_t width, float *restrict sums) {
    static const float zeros[LONG];
    for (int64_t k = 0; k < depth; k += 4) {
        const float *restrict x[4], *from[4];
        for (int64_t r = 0; r < 4; r++) {
            x[r] = k + r < depth ? right + (k + r) * right_stride : zeros;
            from[r] = left + (k + r < depth ? k + r : k) * left_stride;
        }
        int64_t a = 0;
        for (; a + 2 <= p; a += 2) {
            const float v0 = from[0][a], v1 = from[1][a], v2 = from[2][a], v3 = from[3][a];
            const float w0 = from[0][a + 1], w1 = from[1][a + 1], w2 = from[2][a + 1], w3 = from[3][a + 1];
            float *restrict to = sums + a * STRIP, *restrict next = to + STRIP;
            _Pragma("GCC ivdep") for (int64_t j = 0; j < width; j++) {
                to[j] += (v0 * x[0][j] + v1 * x[1][j]) + (v2 * x[2][j] + v3 * x[3][j]);
                next[j] += (w0 * x[0][j] + w1 * x[1][j]) + (w2 * x[2][j] + w3 * x[3][j]);
            }
        }
        if (a < p) {
            const float v0 = from[0][a], v1 = from[1][a], v2 = from[2][a], v3 = from[3][a];
            float *restrict to = sums + a * STRIP;
            _Pragma("GCC ivdep") for (int64_t j = 0; j < width; j++)
                to[j] += (v0 * x[0][j] + v1 * x[1][j]) + (v2 * x[2][j] + v3 * x[3][j]);
        }
    }
}

/* total (p, width) += weights[b] times the sum of block b, for all blocks and the columns of one strip. */
INLINE void strips(const float *restrict left, const float *restrict right, const int64_t *restrict sizes,
                   const int64_t *restrict bounds, const double *restrict weights, float *restrict sums, int64_t x,
                   int64_t width, double *restrict total, int64_t stride) {
    const int64_t blocks = sizes[0], p = sizes[1], left_stride = sizes[3], right_stride = sizes[4];
    for (int64_t b = 0; b < blocks; b++) {
        if (weights[b] == 0 || bounds[b + 1] == bounds[b]) continue;
        memset(sums, 0, (size_t)(p == 1 ? width : p * STRIP) * sizeof *sums);
        strip(left + bounds[b] * left_stride, left_stride, right + bounds[b] * right_stride + x, right_stride,
              bounds[b + 1] - bounds[b], p, width, sums);
        for (int64_t a = 0; a < p; a++)
            for (int64_t j = 0; j < width; j++) total[a * stride + j] += weights[b] * (double)sums[a * STRIP + j];
    }
}

/* `block_sums_f32` for p > SLIM, with tiles of ACROSS columns. Left is laid out once, right once for BROAD columns. */
#define TILED(NAME, TARGET, TILE, ACROSS)                                                                              \
    TARGET static void NAME(const float *restrict left, const float *restrict right, const int64_t *restrict sizes,    \
                            const int64_t *restrict bounds, const double *restrict weights, float *restrict room,      \
                            double *restrict total, float *restrict narrow) {                                          \
        const int64_t blocks = sizes[0], p = sizes[1], q = sizes[2], each = sizes[5];                                  \
        const int64_t deep = each < DEEP ? DEEP / each * each : DEEP, lines = (p + DOWN - 1) / DOWN * DOWN;            \
        double *sums = (double *)room;                                                                                 \
        float *rights = (float *)(sums + HIGH * BROAD), *lefts = rights + BROAD * (bounds[blocks] - bounds[0]);        \
        for (int64_t x = 0; x < q; x += BROAD) {                                                                       \
            const int64_t broad = x + BROAD < q ? BROAD : q - x;                                                       \
            for (int64_t y = 0; y < p; y += HIGH) {                                                                    \
                const int64_t high = y + HIGH < p ? HIGH : p - y;                                                      \
                memset(sums, 0, HIGH * BROAD * sizeof *sums);                                                          \
                for (int64_t b = 0; b < blocks; b++)                                                                   \
                    for (int64_t k = bounds[b]; k < bounds[b + 1] && weights[b] != 0; k += deep) {                     \
                        const int64_t depth = k + deep < bounds[b + 1] ? deep : bounds[b + 1] - k;                     \
                        float *restrict here = lefts + (k - bounds[0]) * lines, *restrict there;                       \
                        there = rights + (k - bounds[0]) * BROAD;                                                      \
                        if (x == 0 && y == 0) panels(left + k * sizes[3], sizes[3], depth, p, DOWN, here);             \
                        if (y == 0) panels(right + k * sizes[4] + x, sizes[4], depth, broad, ACROSS, there);           \
                        for (int64_t j = 0; j < broad; j += ACROSS)                                                    \
                            for (int64_t i = 0; i < high; i += DOWN)                                                   \
                                TILE(here + (y + i) * depth, there + j * depth, depth, each, weights[b],               \
                                     sums + i * BROAD + j);                                                            \
                    }                                                                                                  \
                for (int64_t i = 0; i < high; i++)                                                                     \
                    for (int64_t j = 0; j < broad; j++)                                                                \
                        if (narrow) narrow[(y + i) * q + x + j] = (float)sums[i * BROAD + j];                          \
                        else total[(y + i) * q + x + j] += sums[i * BROAD + j];                                        \
            }                                                                                                          \
        }                                                                                                              \
    }

TILED(tiled_256, WIDE, tile_256, 16)
#if defined(WIDE_CLONES)
TILED(tiled_512, BITS_512, tile_512, 32)
#endif

WIDE static void stripped(const float *restrict left, const float *restrict right, const int64_t *restrict sizes,
                          const int64_t *restrict bounds, const double *restrict weights, float *restrict room,
                          double *restrict total) {
    const int64_t q = sizes[2], wide = sizes[1] == 1 ? LONG : STRIP;
    for (int64_t x = 0; x < q; x += wide)
        strips(left, right, sizes, bounds, weights, room, x, x + wide < q ? wide : q - x, total + x, q);
}

void block_sums_f32(const float *left, const float *right, const int64_t *sizes, const int64_t *bounds,
                    const double *weights, float *room, double *total, float *narrow) {
    if (sizes[1] <= SLIM) {
        stripped(left, right, sizes, bounds, weights, room, total);
        return;
    }
#if defined(WIDE_CLONES)
    if (has_512_bits()) {
        tiled_512(left, right, sizes, bounds, weights, room, total, narrow);
        return;
    }
#endif
    tiled_256(left, right, sizes, bounds, weights, room, total, narrow);
}

/* The floats that `block_sums_f32` needs as room, for this number of rows in all blocks. */
int64_t blocked_room(int64_t rows, int64_t p) {
    return p > SLIM ? 2 * HIGH * BROAD + rows * (BROAD + p + DOWN) : LONG > SLIM * STRIP ? LONG : SLIM * STRIP;
}

/* The largest magnitude of all elements; NaN if one is NaN. Without the sign bit, floats are ordered like their bits as
 * integers, and NaN comes last. */
#define LARGEST(NAME, T, BITS, MAGNITUDE)                                                                              \
    WIDE double NAME(const Part *parts, int64_t count) {                                                               \
        BITS most = 0;                                                                                                 \
        for (int64_t k = 0; k < count; k++) {                                                                          \
            const BITS *bits = (const BITS *)parts[k].at;                                                              \
            for (int64_t i = 0; i < parts[k].n; i++) {                                                                 \
                const BITS magnitude = bits[i] & MAGNITUDE;                                                            \
                most = magnitude > most ? magnitude : most;                                                            \
            }                                                                                                          \
        }                                                                                                              \
        T largest;                                                                                                     \
        memcpy(&largest, &most, sizeof largest);                                                                       \
        return largest;                                                                                                \
    }

LARGEST(largest_f32, float, int32_t, 0x7FFFFFFF)
LARGEST(largest_f64, double, int64_t, 0x7FFFFFFFFFFFFFFF)

/* out[place + ratio * p] += factors[p] times the sum over first <= k < end of weights[k] * values[p + shift - k], for
 * the points start <= p < stop of each group (start, stop, first, end, place). POINTS points at a time are handled for
 * all groups: they stay in the cache. The sums of LINE points stay in registers. sizes: the number of groups, the number
 * of points, ratio, shift. */
enum { POINTS = 512, LINE = 32 };

INLINE void line(const double *restrict values, const double *restrict weights, int64_t width, int64_t n,
                 double *restrict sums) {
    for (int64_t k = 0; k < width; k++, values--)
        for (int64_t j = 0; j < n; j++) sums[j] += weights[k] * values[j];
}

WIDE void grouped_f64(const double *restrict values, const double *restrict weights, const double *restrict factors,
                      const int64_t *restrict groups, const int64_t *restrict sizes, double *restrict out) {
    const int64_t ratio = sizes[2], shift = sizes[3];
    for (int64_t block = 0; block < sizes[1]; block += POINTS)
        for (const int64_t *g = groups; g < groups + 5 * sizes[0]; g += 5) {
            const int64_t stop = g[1] < block + POINTS ? g[1] : block + POINTS;
            for (int64_t p = g[0] > block ? g[0] : block; p < stop; p += LINE) {
                const int64_t n = stop - p < LINE ? stop - p : LINE;
                const double *from = values + p + shift - g[2];
                double sums[LINE] = {0}, *restrict to = out + g[4] + ratio * p;
                if (n == LINE) line(from, weights + g[2], g[3] - g[2], LINE, sums);
                else line(from, weights + g[2], g[3] - g[2], n, sums);
                if (ratio == 1) for (int64_t j = 0; j < n; j++) to[j] += factors[p + j] * sums[j];
                else for (int64_t j = 0; j < n; j++) to[ratio * j] += factors[p + j] * sums[j];
            }
        }
}

/* (n, C, H, W) -> (n, places, C * kh * kw): the patch under the kernel at each of its places. For common kernel
 * widths the length of the inner loop is a constant. */
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

/* The weight gradient of a depthwise convolution for each record: n records of `images` images each, a (n, images,
 * C, H, W), g (n, images, C, places), out (n, C, kernel). LANES channels at a time are transposed into `work`, so
 * that channels become the lanes of vectors; `work` needs memory for an image, an output gradient and a kernel of
 * LANES channels each. The places of a row are summed first, so the rounding error is that of sums of places_x and
 * of images * places_y terms. */
typedef struct {
    Shape shape;
    int64_t padding_y, padding_x, images;
} Depthwise;

/* The first place, and the end of the places, along one axis at which a tap of the kernel is inside the image.
 * `shift` is the tap's offset from the beginning of the image for the first place. */
INLINE int64_t first_place(int64_t shift, int64_t stride) { return shift < 0 ? (-shift + stride - 1) / stride : 0; }
INLINE int64_t end_of_places(int64_t shift, int64_t stride, int64_t size, int64_t places) {
    const int64_t end = size <= shift ? 0 : (size - shift - 1) / stride + 1;
    return end < places ? end : places;
}

#define DEPTHWISE(NAME, T)                                                                                             \
    enum { NAME##_lanes = 64 / sizeof(T) };                                                                            \
    typedef T NAME##_t __attribute__((vector_size(32), aligned(sizeof(T)), may_alias));                                \
    INLINE void NAME##_side_by_side(const T *restrict from, int64_t size, int64_t channels, T *restrict to) {          \
        enum { LANES = NAME##_lanes };                                                                                 \
        for (int64_t begin = 0; begin < size; begin += 64)                                                             \
            for (int64_t c = 0; c < LANES; c++)                                                                        \
                for (int64_t p = begin; p < (begin + 64 < size ? begin + 64 : size); p++)                              \
                    to[p * LANES + c] = c < channels ? from[c * size + p] : 0;                                         \
    }                                                                                                                  \
    INLINE void NAME##_image(const T *restrict a, const T *restrict g, T *restrict to, const Depthwise *all) {         \
        enum { LANES = NAME##_lanes };                                                                                 \
        const Shape s = all->shape;                                                                                    \
        for (int64_t r = 0; r < s.kernel_height; r++) {                                                                \
            const int64_t down = r * s.dilation_y - all->padding_y;                                                    \
            const int64_t bottom = end_of_places(down, s.stride_y, s.height, s.places_y);                              \
            for (int64_t y = first_place(down, s.stride_y); y < bottom; y++)                                           \
                for (int64_t j = 0; j < s.kernel_width; j++) {                                                         \
                    const int64_t across = j * s.dilation_x - all->padding_x;                                          \
                    const int64_t end = end_of_places(across, s.stride_x, s.width, s.places_x);                        \
                    const T *row = a + ((y * s.stride_y + down) * s.width + across) * LANES;                           \
                    const T *here = g + y * s.places_x * LANES;                                                        \
                    NAME##_t first = {0}, second = {0}, *sum = (NAME##_t *)(to + (r * s.kernel_width + j) * LANES);    \
                    for (int64_t x = first_place(across, s.stride_x); x < end; x++) {                                  \
                        const NAME##_t *left = (const NAME##_t *)(here + x * LANES);                                   \
                        const NAME##_t *right = (const NAME##_t *)(row + x * s.stride_x * LANES);                      \
                        first += left[0] * right[0], second += left[1] * right[1];                                     \
                    }                                                                                                  \
                    sum[0] += first, sum[1] += second;                                                                 \
                }                                                                                                      \
        }                                                                                                              \
    }                                                                                                                  \
    WIDE void NAME(const T *a, const T *g, T *out, int64_t n, const Depthwise *all, T *work) {                         \
        enum { LANES = NAME##_lanes };                                                                                 \
        const Shape s = all->shape;                                                                                    \
        const int64_t size = s.height * s.width, places = s.places_y * s.places_x;                                     \
        const int64_t taps = s.kernel_height * s.kernel_width;                                                         \
        T *image = work, *gradient = image + size * LANES, *sums = gradient + places * LANES;                          \
        for (int64_t i = 0; i < n; i++)                                                                                \
            for (int64_t c = 0; c < s.channels; c += LANES) {                                                          \
                const int64_t here = s.channels - c < LANES ? s.channels - c : LANES;                                  \
                for (int64_t k = 0; k < taps * LANES; k++) sums[k] = 0;                                                \
                for (int64_t k = i * all->images; k < (i + 1) * all->images; k++) {                                    \
                    NAME##_side_by_side(a + (k * s.channels + c) * size, size, here, image);                           \
                    NAME##_side_by_side(g + (k * s.channels + c) * places, places, here, gradient);                    \
                    NAME##_image(image, gradient, sums, all);                                                          \
                }                                                                                                      \
                for (int64_t k = 0; k < here; k++)                                                                     \
                    for (int64_t t = 0; t < taps; t++) out[((i * s.channels) + c + k) * taps + t] = sums[t * LANES + k]; \
            }                                                                                                          \
    }

DEPTHWISE(depthwise_f32, float)
DEPTHWISE(depthwise_f64, double)

/* out = x w^T + bias (null: no bias), and norm2[i] = the sum of squares of row i of x, for few outputs. Some rows at
 * a time are read from memory, once; everything that is computed from them then finds them in the cache. With one
 * output both sums are computed in one loop, row by row, in the order of memory; norm2 has the bits of `squares`. */
#define FEW_OUTPUTS(NAME, T, SQUARES)                                                                                  \
    typedef T NAME##_t __attribute__((vector_size(32), aligned(sizeof(T)), may_alias));                                \
    INLINE void NAME##_dots(const T *const *rows, const T *const *weights, int64_t columns, T (*dots)[2]) {            \
        enum { LANES = 32 / sizeof(T) };                                                                               \
        NAME##_t sums[4][2] = {{{0}}};                                                                                 \
        int64_t j = 0;                                                                                                 \
        for (; j + LANES <= columns; j += LANES) {                                                                     \
            const NAME##_t left = *(const NAME##_t *)(weights[0] + j), right = *(const NAME##_t *)(weights[1] + j);    \
            for (int r = 0; r < 4; r++) {                                                                              \
                const NAME##_t x = *(const NAME##_t *)(rows[r] + j);                                                   \
                sums[r][0] += x * left, sums[r][1] += x * right;                                                       \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < 4; r++)                                                                                    \
            for (int k = 0; k < 2; k++) {                                                                              \
                T total = 0;                                                                                           \
                for (int64_t i = j; i < columns; i++) total += rows[r][i] * weights[k][i];                             \
                for (int i = 0; i < LANES; i++) total += sums[r][k][i];                                                \
                dots[r][k] += total;                                                                                   \
            }                                                                                                          \
    }                                                                                                                  \
    INLINE T NAME##_one(const T *restrict row, const T *restrict w, int64_t columns, double *norm2) {                  \
        enum { LANES = 8, PIECE = 64 };                                                                                \
        typedef T Lanes __attribute__((vector_size(LANES * sizeof(T)), aligned(sizeof(T)), may_alias));                \
        double dot = 0, total = sizeof(T) == 4 ? 0 : (double)columns * DBL_MIN;                                        \
        int64_t j = 0;                                                                                                 \
        while (j + LANES <= columns) {                                                                                 \
            Lanes a = {0}, b = {0}, c = {0}, d = {0}, e = {0}, f = {0}, g = {0}, h = {0};                              \
            int k = 0;                                                                                                 \
            for (; k < PIECE && j + 4 * LANES <= columns; k++, j += 4 * LANES) {                                       \
                const Lanes *x = (const Lanes *)(row + j), *y = (const Lanes *)(w + j);                                \
                a += x[0] * x[0], b += x[1] * x[1], c += x[2] * x[2], d += x[3] * x[3];                                \
                e += x[0] * y[0], f += x[1] * y[1], g += x[2] * y[2], h += x[3] * y[3];                                \
            }                                                                                                          \
            for (; k < PIECE && j + LANES <= columns; k++, j += LANES) {                                               \
                const Lanes *x = (const Lanes *)(row + j), *y = (const Lanes *)(w + j);                                \
                a += x[0] * x[0], e += x[0] * y[0];                                                                    \
            }                                                                                                          \
            a = (a + b) + (c + d), e = (e + f) + (g + h);                                                              \
            for (int l = 0; l < LANES; l++) total += (double)a[l];                                                     \
            for (int l = 0; l < LANES; l++) dot += (double)e[l];                                                       \
        }                                                                                                              \
        for (; j < columns; j++) {                                                                                     \
            total += (double)row[j] * (double)row[j];                                                                  \
            dot += (double)row[j] * (double)w[j];                                                                      \
        }                                                                                                              \
        if (sizeof(T) == 4 && !(total >= (double)columns * 0x1p-100 && total <= 0x1p120))                              \
            SQUARES(row, 1, columns, columns, 0, &total);                                                              \
        *norm2 = total;                                                                                                \
        return (T)dot;                                                                                                 \
    }                                                                                                                  \
    WIDE void NAME(const T *x, int64_t n, int64_t columns, int64_t stride, const T *w, int64_t outputs, const T *bias, \
                   T *out, double *norm2) {                                                                            \
        enum { TILE = 4096 / sizeof(T) };                                                                              \
        if (outputs == 1) {                                                                                            \
            for (int64_t i = 0; i < n; i++)                                                                            \
                out[i] = NAME##_one(x + i * stride, w, columns, norm2 + i) + (bias ? *bias : 0);                       \
            return;                                                                                                    \
        }                                                                                                              \
        for (int64_t i = 0; i < n; i += 4) {                                                                           \
            const int64_t here = n - i < 4 ? n - i : 4;                                                                \
            for (int64_t k = 0; k < here * outputs; k++) out[i * outputs + k] = bias ? bias[k % outputs] : 0;          \
            for (int64_t left = 0; left < columns; left += TILE) {                                                     \
                const int64_t width = columns - left < TILE ? columns - left : TILE;                                   \
                const T *rows[4];                                                                                      \
                for (int64_t r = 0; r < 4; r++) rows[r] = x + (i + (r < here ? r : 0)) * stride + left;                \
                for (int64_t k = 0; k < outputs; k += 2) {                                                             \
                    const int64_t two = outputs - k < 2 ? 1 : 2;                                                       \
                    const T *const weights[2] = {w + k * columns + left, w + (k + two - 1) * columns + left};          \
                    T dots[4][2] = {{0}};                                                                              \
                    NAME##_dots(rows, weights, width, dots);                                                           \
                    for (int64_t r = 0; r < here; r++)                                                                 \
                        for (int64_t c = 0; c < two; c++) out[(i + r) * outputs + k + c] += dots[r][c];                \
                }                                                                                                      \
            }                                                                                                          \
            SQUARES(x + i * stride, here, columns, stride, 0, norm2 + i);                                              \
        }                                                                                                              \
    }

FEW_OUTPUTS(few_outputs_f32, float, squares_f32)
FEW_OUTPUTS(few_outputs_f64, double, squares_f64)
