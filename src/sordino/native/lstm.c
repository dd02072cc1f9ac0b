/* The recurrence of an LSTM over all steps, LINES records at a time: their states stay in the cache. */

#include "tiles.h"

/* e^x for x in [-87, 80]: 2^n e^r with |r| <= ln(2)/2 and the Taylor series of e^r. The caller keeps x in this
 * range; x must not be NaN. */
INLINE float exponential(float x) {
    const float turned = x * 1.44269504088896341f + 12582912.0f; /* its last bits are the integer n */
    const float whole = turned - 12582912.0f;
    const float r = (x - whole * 0.693145751953125f) - whole * 1.42860682030941723e-6f;
    const float series =
        1.f + r * (1.f + r * (1.f / 2 + r * (1.f / 6 + r * (1.f / 24 + r * (1.f / 120 + r * (1.f / 720))))));
    return as_float(as_int(series) + (int32_t)((uint32_t)as_int(turned) << 23));
}

/* 1/(1 + e^-x); NaN for NaN. */
INLINE float sigmoid(float x) {
    const float held = x > 80.f ? 80.f : x < -80.f ? -80.f : x == x ? x : 0.f;
    return x == x ? 1.f / (1.f + exponential(-held)) : x;
}

/* tanh x = 1 - 2/(e^2x + 1); for |x| < 0.4, where this would cancel, x times a series in x^2. NaN for NaN. */
INLINE float tanh_of(float x) {
    const float held = x > 10.f ? 10.f : x < -10.f ? -10.f : x == x ? x : 0.f;
    const float far = 1.f - 2.f / (exponential(2.f * held) + 1.f), z = held * held;
    const float near = held + held * z * (-1.f / 3 + z * (2.f / 15 + z * (-17.f / 315 + z * (62.f / 2835 +
                       z * (-1382.f / 155925 + z * (21844.f / 6081075))))));
    return x == x ? (z < 0.16f ? near : far) : x;
}

/* One step of n records with `hidden` units. gates (n, 4, hidden): the inputs of the activations of i, f, g, o, which are
 * overwritten with their outputs. before, cells (n, hidden): the cells before and after the step. squashed: the tanh of
 * the cells. out: the output. */
INLINE void step(float *restrict gates, const float *restrict before, float *restrict cells, float *restrict squashed,
                 float *restrict out, int64_t n, int64_t hidden) {
    for (int64_t k = 0; k < n; k++, gates += 4 * hidden, before += hidden, cells += hidden, squashed += hidden, out += hidden) {
        float *restrict i = gates, *restrict f = gates + hidden, *restrict g = f + hidden, *restrict o = g + hidden;
        _Pragma("GCC ivdep") for (int64_t j = 0; j < hidden; j++) {
            const float in = sigmoid(i[j]), kept = sigmoid(f[j]), new = tanh_of(g[j]), shown = sigmoid(o[j]);
            const float cell = kept * before[j] + in * new, flat = tanh_of(cell);
            i[j] = in, f[j] = kept, g[j] = new, o[j] = shown;
            cells[j] = cell, squashed[j] = flat, out[j] = shown * flat;
        }
    }
}

/* The backward pass of this step. dh, dc: the gradients of the output and of the cells after the step. delta: receives
 * the gradient of the gates' inputs. dc is overwritten with the gradient of the cells before the step. */
INLINE void back(const float *restrict gates, const float *restrict before, const float *restrict squashed,
                 const float *restrict dh, float *restrict dc, float *restrict delta, int64_t n, int64_t hidden) {
    for (int64_t k = 0; k < n; k++) {
        const float *restrict i = gates + 4 * k * hidden, *restrict f = i + hidden, *restrict g = f + hidden;
        const float *restrict o = g + hidden, *restrict c = before + k * hidden, *restrict s = squashed + k * hidden;
        const float *restrict up = dh + k * hidden;
        float *restrict cell = dc + k * hidden, *restrict di = delta + 4 * k * hidden, *restrict df = di + hidden;
        float *restrict dg = df + hidden, *restrict d_o = dg + hidden;
        _Pragma("GCC ivdep") for (int64_t j = 0; j < hidden; j++) {
            const float total = cell[j] + up[j] * (o[j] - o[j] * s[j] * s[j]);
            di[j] = total * g[j] * (i[j] - i[j] * i[j]);
            df[j] = total * c[j] * (f[j] - f[j] * f[j]);
            dg[j] = total * i[j] * (1.f - g[j] * g[j]);
            d_o[j] = up[j] * s[j] * (o[j] - o[j] * o[j]);
            cell[j] = total * f[j];
        }
    }
}

/* to (lines, columns) = from (lines, columns) + states (LINES, depth) times the matrix whose panels these are. Lines lie
 * to_line and from_line numbers apart; from may be 0. */
#define MAPPED(NAME, TILE, VECTOR, VECTORS)                                                                            \
    INLINE void NAME(const float *states, int64_t depth, const float *panels_of, const float *from, int64_t from_line, \
                     float *to, int64_t to_line, int64_t lines, int64_t columns) {                                     \
        enum { ACROSS = VECTORS * sizeof(VECTOR) / sizeof(float) };                                                    \
        for (int64_t x = 0; x < columns; x += ACROSS) {                                                                \
            VECTOR sum[LINES][VECTORS];                                                                                \
            _Pragma("GCC unroll 8") for (int r = 0; r < LINES; r++)                                                    \
                _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; v++) sum[r][v] = (VECTOR){0};                     \
            TILE(states, depth, 1, panels_of + x * depth, depth, sum);                                                 \
            const int64_t wide = x + ACROSS < columns ? ACROSS : columns - x;                                          \
            for (int64_t r = 0; r < lines; r++) {                                                                      \
                const float *restrict found = (const float *)sum[r], *restrict add = from ? from + r * from_line + x : 0; \
                float *restrict place = to + r * to_line + x;                                                          \
                if (add) for (int64_t j = 0; j < wide; j++) place[j] = add[j] + found[j];                              \
                else for (int64_t j = 0; j < wide; j++) place[j] = found[j];                                           \
            }                                                                                                          \
        }                                                                                                              \
    }

/* All steps, in this order or in the reverse one. sizes: steps, n, hidden, whether the order is reversed, the strides of
 * `given` between steps and between records, the first of the n records and the end of those that are computed, and
 * whether to use vectors of 256 bits in any case. given: the gates' inputs without the part of the hidden states, (steps,
 * n, 4 * hidden). weight (hidden, 4 * hidden): multiplies the states. h0, c0 (n, hidden).
 * gates (steps, n, 4 * hidden), squashed and out (steps, n, hidden), cells (steps + 1, n, hidden): what `step` writes,
 * for time t at place t; the cells after time t are at place t + 1 (reversed: at place t, and c0 at place `steps`). */
#define FORWARD(NAME, TARGET, MAP)                                                                                     \
    TARGET static void NAME(const float *given, const float *h0, const float *c0, const float *weight,                 \
                            const int64_t *sizes, float *room, float *gates, float *cells, float *squashed, float *out) { \
        const int64_t steps = sizes[0], n = sizes[1], hidden = sizes[2], wide = 4 * hidden, reversed = sizes[3];       \
        float *states = room, *matrix = states + LINES * hidden;                                                       \
        panels(weight, wide, hidden, wide, MAP##_ACROSS, matrix);                                                      \
        for (int64_t i = sizes[6]; i < sizes[7]; i += LINES) {                                                         \
            const int64_t lines = i + LINES < sizes[7] ? LINES : sizes[7] - i;                                         \
            memcpy(cells + ((reversed ? steps : 0) * n + i) * hidden, c0 + i * hidden, lines * hidden * sizeof(float)); \
            memset(states, 0, LINES * hidden * sizeof(float));                                                         \
            memcpy(states, h0 + i * hidden, lines * hidden * sizeof(float));                                           \
            for (int64_t k = 0; k < steps; k++) {                                                                      \
                const int64_t t = reversed ? steps - 1 - k : k, at = t * n + i, before = reversed ? t + 1 : t;         \
                MAP(states, hidden, matrix, given + t * sizes[4] + i * sizes[5], sizes[5], gates + at * wide, wide,    \
                    lines, wide);                                                                                      \
                step(gates + at * wide, cells + (before * n + i) * hidden,                                             \
                     cells + ((reversed ? t : t + 1) * n + i) * hidden, squashed + at * hidden, out + at * hidden,     \
                     lines, hidden);                                                                                   \
                memcpy(states, out + at * hidden, lines * hidden * sizeof(float));                                     \
            }                                                                                                          \
        }                                                                                                              \
    }

/* The backward pass. upper: the gradient of out, with the strides sizes[4], sizes[5]. weight (4 * hidden, hidden). dh, dc
 * (n, hidden): the gradients of the last state and of the last cells, which are overwritten with those of h0 and c0.
 * delta (steps, n, 4 * hidden): receives the gradient of the gates' inputs. */
#define BACKWARD(NAME, TARGET, MAP)                                                                                    \
    TARGET static void NAME(const float *gates, const float *cells, const float *squashed, const float *upper,         \
                            const float *weight, const int64_t *sizes, float *room, float *dh, float *dc, float *delta) { \
        const int64_t steps = sizes[0], n = sizes[1], hidden = sizes[2], wide = 4 * hidden, reversed = sizes[3];       \
        float *deltas = room, *matrix = deltas + LINES * wide;                                                         \
        panels(weight, hidden, wide, hidden, MAP##_ACROSS, matrix);                                                    \
        for (int64_t i = sizes[6]; i < sizes[7]; i += LINES) {                                                         \
            const int64_t lines = i + LINES < sizes[7] ? LINES : sizes[7] - i;                                         \
            float *restrict up = dh + i * hidden;                                                                      \
            memset(deltas, 0, LINES * wide * sizeof(float));                                                           \
            for (int64_t k = steps - 1; k >= 0; k--) {                                                                 \
                const int64_t t = reversed ? steps - 1 - k : k, at = t * n + i, before = reversed ? t + 1 : t;         \
                const float *more = upper + t * sizes[4] + i * sizes[5];                                               \
                for (int64_t r = 0; r < lines; r++)                                                                    \
                    for (int64_t j = 0; j < hidden; j++) up[r * hidden + j] += more[r * sizes[5] + j];                 \
                back(gates + at * wide, cells + (before * n + i) * hidden, squashed + at * hidden, up,                 \
                     dc + i * hidden, delta + at * wide, lines, hidden);                                               \
                memcpy(deltas, delta + at * wide, lines * wide * sizeof(float));                                       \
                MAP(deltas, wide, matrix, 0, 0, up, hidden, lines, hidden);                                            \
            }                                                                                                          \
        }                                                                                                              \
    }

enum { mapped_256_ACROSS = 8, mapped_512_ACROSS = 32 };
MAPPED(mapped_256, panel_256, Eight, 1)
FORWARD(forward_256, WIDE, mapped_256)
BACKWARD(backward_256, WIDE, mapped_256)
#if defined(WIDE_CLONES)
MAPPED(mapped_512, panel_512, Sixteen, 2)
FORWARD(forward_512, BITS_512, mapped_512)
BACKWARD(backward_512, BITS_512, mapped_512)
#endif

void lstm_forward_f32(const float *given, const float *h0, const float *c0, const float *weight, const int64_t *sizes,
                      float *room, float *gates, float *cells, float *squashed, float *out) {
#if defined(WIDE_CLONES)
    if (!sizes[8] && has_512_bits()) {
        forward_512(given, h0, c0, weight, sizes, room, gates, cells, squashed, out);
        return;
    }
#endif
    forward_256(given, h0, c0, weight, sizes, room, gates, cells, squashed, out);
}

void lstm_backward_f32(const float *gates, const float *cells, const float *squashed, const float *upper,
                       const float *weight, const int64_t *sizes, float *room, float *dh, float *dc, float *delta) {
#if defined(WIDE_CLONES)
    if (!sizes[8] && has_512_bits()) {
        backward_512(gates, cells, squashed, upper, weight, sizes, room, dh, dc, delta);
        return;
    }
#endif
    backward_256(gates, cells, squashed, upper, weight, sizes, room, dh, dc, delta);
}

/* The floats that both need as room. */
int64_t lstm_room(int64_t hidden) { return 4 * hidden * (LINES + hidden + 32); }
