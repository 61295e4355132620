// The step of AdamW, SGD and Lion, the average, and codes of moments on a CPU, each in one pass, with the bits
// of optimizers/rounded.py, rounding.py and formats.py. cpu_step.py compiles it and says what the fields hold;
// cpu_vectors.h says what a vector is.

#include <utility>
#include "cpu_vectors.h"

enum Kind { NONE, FP32, BF16, INT16, CODES };
enum Rule { ADAMW, SGD, LION };
enum Root { NEAREST, OF_MKL, CALLED };  // how a square root is taken, see cpu_step.root
// values of the largest block of codes, and of what a thread takes at once: whole blocks, which stay in its
// caches and are worth a call of MKL
const int BLOCK = 256, CHUNK = 4096;
const int AHEAD = 2048;  // bytes, by which memory is asked before they are needed
const F INFINITE = F{} + __builtin_inff();
const float SMALLEST = 0x1p-126f;  // normal number, see exact_step.vanishes

// The numbers of a step as they lie in a row, see numbers.py: those of the weight, then those of the optimiser
struct WeightNumbers { float decay, scale; };
struct AdamWNumbers { float one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, rate; };
struct SGDNumbers { float momentum, of_gradient, of_momentum, rate; };
struct LionNumbers { float one_minus_beta1, one_minus_beta2, rate; };

struct Moment {
    int32_t bits, has_sign;
    int32_t mantissa;    // bits of it, where codes are 8-bit floats: these need no table
    void* data;          // values, or codes; codes of 4 bits: two to a byte, the first above the second
    float* scales;       // one a block
    const float* table;  // [2^bits] what the codes stand for
    const float* chart;  // [80] the table's broken line, see cpu_step.chart
    const int32_t* key;  // [3] of the noise of the codes
};

// What sort of step it is. A loop that is compiled for one sort alone is spared a dozen branches a vector, so
// it gets this by value: of what lies in memory, a compiler must assume that each write changes it.
struct Sort {
    int32_t rule, weight, gradient, low, moments[2], stochastic, exact, root;
};

struct Step {
    Sort sort;
    int64_t count;        // tensors of weights, and of gradients; all else is one vector for all of them
    const int64_t* ends;  // where each of them ends in that vector
    void **weights, **gradients;
    int32_t average, average_stochastic, threads, floored;
    void *low, *shadow;
    const float *numbers, *average_share;
    const int32_t *key, *average_key;
    void (*called)(int32_t, const float*, float*, int64_t);  // MKL's root of many values
    Moment moments[2];
};

// The step of one tensor
struct TensorStep : Step {
    void *p, *g;        // as if they began where the vector does
    uint32_t key_words[2];  // of the noise, with the position of the first value
};

// ---- Memory -----------------------------------------------------------------------------------------------

static inline F read(int kind, const void* from, int64_t at, Mask mask) {
    if (kind == FP32) return read_fp32(from, at, mask);
    return (F)(read_int16(from, at, mask) << 16);
}

// Ask memory for what lies behind this place. The CPU does that by itself, but not past the end of a page.
// Inlined by force: GCC drops calls of a function that does nothing else.
static INLINE void fetch(int bits, const void* from, int64_t at) {
    _mm_prefetch((const char*)from + at * bits / 8 + AHEAD, _MM_HINT_T0);
}

static INLINE int bits_of(int kind) { return kind == FP32 ? 32 : 16; }

// Do work(i, mask) for each vector of n values
template <class Work> static INLINE void each(int n, Work work) {
    int i = 0;
    for (; (i + 1) * LANES <= n; i++) work(i, first_of(LANES));
    if (i * LANES < n) work(i, first_of(n - i * LANES));
}

// ---- Noise and rounding, as in rounding.py ----------------------------------------------------------------

static inline U mix(U h) {
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    return h ^ (h >> 16);
}

static inline U hash(U place, const int32_t* key) {
    return mix(mix(place + (uint32_t)key[2] + (uint32_t)key[0]) + (uint32_t)key[1]);
}

static inline U noise(const int32_t* key, int64_t at) { return hash(LANE + (uint32_t)at, key); }

static inline U further(U first) { return mix(first ^ 0x5BD1E995u); }

// Write x, rounded if the kind is bf16, by noise of 16 bits or to nearest; returns what was written. nan: it
// may be one.
static INLINE F write(int kind, void* to, int64_t at, Mask mask, F x, bool nan, bool stochastic, U noise) {
    if (kind == FP32) {
        write_fp32(to, at, mask, x);
        return x;
    }
    U bits = (U)x + (stochastic ? noise : 0x7FFF + (((U)x >> 16) & 1));
    if (__builtin_expect(nan, false)) bits = x == x ? bits : U{} + 0x7FC00000;
    write_bf16(to, at, mask, bits);
    return (F)((I)bits & -65536);
}

// ---- Weights: rounding.exact_weight, write_weight and written ---------------------------------------------

static INLINE F held(const TensorStep& s, Sort sort, int64_t at, Mask mask) {
    F p = read(sort.weight, s.p, at, mask);
    I bits = (I)p;
    if (sort.low == BF16) return p + read(BF16, s.low, at, mask);
    if (sort.low == INT16) {
        I rest = read_int16(s.low, at, mask);
        return (F)(bits + (((bits & 0x7FFFFFFF) == 0) & (rest < 0) ? I{} : rest));
    }
    if (sort.low == FP32) {
        F master = read(FP32, s.low, at, mask);
        I away = bits - (I)master + 0x8000;
        return (away >= 0) & (away <= 0x10000) ? master : p;
    }
    return p;
}

static INLINE F write_weight(const TensorStep& s, Sort sort, int64_t at, Mask mask, F x, bool nan, U noise) {
    if (sort.low == NONE) return write(sort.weight, s.p, at, mask, x, nan, sort.stochastic, noise);
    if (sort.low == BF16) {
        F near = write(BF16, s.p, at, mask, x, nan, true, U{} + 0x8000);
        return near + write(BF16, s.low, at, mask, x - near, true, sort.stochastic, noise);
    }
    if (sort.low == INT16) {
        I bits = (I)x, high = (bits + 0x8000) & -65536;
        write(BF16, s.p, at, mask, x == x ? (F)high : x, nan, false, noise);
        write_int16(s.low, at, mask, x == x ? bits - high : I{});
    } else {
        write_fp32(s.low, at, mask, x);
        write(sort.weight, s.p, at, mask, x, nan, false, noise);
    }
    return x;
}

// ---- The average: rounding.ema_kernel ----------------------------------------------------------------------

// Move the values of a vector towards those that are held now
static INLINE void move_average(const TensorStep& s, int64_t at, Mask mask, F now) {
    F shadow = read(s.average, s.shadow, at, mask);
    shadow += (now - shadow) * *s.average_share;
    U own = s.average_stochastic ? noise(s.average_key, at) & 0xFFFF : U{};
    write(s.average, s.shadow, at, mask, shadow, any_nan(shadow), s.average_stochastic, own);
}

// ---- Codes in 8-bit floats: float8.py ---------------------------------------------------------------------

// e4m3 and e5m2, by the bits of their mantissa
template <int MANTISSA> struct Float8 {
    static const int least = MANTISSA == 3 ? -6 : -14;  // exponent of the smallest normal number
    static constexpr float top = MANTISSA == 3 ? 448 : 57344;
    static const int code_of_top = MANTISSA == 3 ? 0x7E : 0x7B;
};

template <int MANTISSA> static INLINE F of_float8(I code) {
    using Format = Float8<MANTISSA>;
    I size = code & 0x7F;
    F normal = (F)((size << (23 - MANTISSA)) + ((126 + Format::least) << 23));
    const I smallest = I{} + ((127 + Format::least - MANTISSA) << 23);  // its bits
    F value = size < (1 << MANTISSA) ? __builtin_convertvector(size, F) * (F)smallest : normal;
    value = normal > Format::top ? F{} + __builtin_nanf("") : value;
    return code > 0x7F ? -value : value;
}

static inline int block_of(const Moment& m) { return m.bits == 8 ? 256 : 128; }

// 0 to 1 for each of n values from `at` on. By itself: a hash is a long chain, and many of them at once hide
// that.
static INLINE void draw_uniform(F* uniform, const Moment& m, int64_t at, int n) {
    U place = LANE + (uint32_t)at;
    for (int k = 0; k < n; k += LANES) {
        I bits = (I)(hash(place, m.key) & 0xFFFFFF);
        place += LANES;
        uniform[k / LANES] = __builtin_convertvector(bits, F) * 0x1p-24f;
    }
}

// Encode n values of one block, with zeros after the last one up to a whole vector
template <int MANTISSA, bool SIGN> static void encode_float8(const Moment& m, F* x, int64_t at, int n) {
    using Format = Float8<MANTISSA>;
    F most{}, uniform[BLOCK / LANES];
    for (int k = 0; k < n; k += LANES) {
        F size = (F)((I)x[k / LANES] & 0x7FFFFFFF);
        most = larger(size < INFINITE ? size : F{}, most);
    }
    const float scale = largest(most) / Format::top;
    m.scales[at / block_of(m)] = scale;
    const float divisor = scale == 0 ? __builtin_inff() : scale;
    draw_uniform(uniform, m, at, n);
    each(n, [&](int i, Mask mask) ALWAYS {
        F y = x[i] / divisor - (x[i] - x[i]);  // NaN where x is not finite
        // above the smallest normal number; below it numbers lie as far apart as just above
        I exponent = (((I)y >> 23) & 0xFF) - (127 + Format::least);
        exponent = exponent < 0 ? I{} : exponent;
        F a_gap = (F)((127 + MANTISSA - Format::least - exponent) << 23);  // 1 / the gap between two numbers
        F exact = y * a_gap + uniform[i];
        I gaps = __builtin_convertvector(exact, I);
        gaps += (I)(__builtin_convertvector(gaps, F) > exact);  // down, where the conversion went up
        I code = (exponent << MANTISSA) + (gaps < 0 ? -gaps : gaps);
        code = code > Format::code_of_top ? I{} + Format::code_of_top : code;
        if (SIGN)
            code = gaps < 0 ? code | 0x80 : code;
        else
            code = gaps > 0 ? code : x[i] > 0 ? I{} + 1 : I{};
        code = y == y ? code : 0x7F | (((I)y >> 24) & 0x80);
        write_bytes(m.data, at + i * LANES, mask, code);
    });
}

// ---- Codes in a table: formats.stochastic_codes ------------------------------------------------------------

static inline F decoded(const Moment& m, int64_t at, Mask mask) {
    const float scale = m.scales[at / block_of(m)];
    if (m.bits == 4) return pick(sixteen(m.table), read_halves(m.data, at, mask)) * scale;
    I code = read_bytes(m.data, at, mask);
    if (m.mantissa == 3) return of_float8<3>(code) * scale;
    if (m.mantissa == 2) return of_float8<2>(code) * scale;
    return look_up(m.table, code) * scale;
}

// Write codes; one above the last becomes the last
static INLINE void write_codes(const Moment& m, int bits, int64_t at, Mask mask, I code) {
    if (bits == 8)
        write_bytes(m.data, at, mask, code);
    else
        write_halves(m.data, at, mask, code);
}

// Encode n values of one block, with zeros after the last one up to a whole vector
template <int BITS, bool SIGN> static void encode(const Moment& m, F* x, int64_t at, int n) {
    F high{}, low{}, known{};
    for (int k = 0; k < n; k += LANES) {
        F own = x[k / LANES];
        high = larger(own, high);
        low = smaller(own, low);
        known = fma(own, F{}, known);
    }
    if (any_nan(known)) {  // what is not finite becomes zero
        for (int k = 0; k < n; k += LANES) {
            F own = x[k / LANES];
            x[k / LANES] = (F)((I)own & 0x7FFFFFFF) < INFINITE ? own : F{};
        }
        return encode<BITS, SIGN>(m, x, at, n);
    }
    float most = largest(high), least = smallest(low);
    float scale = SIGN && least / m.table[0] > most ? least / m.table[0] : most;
    m.scales[at / block_of(m)] = scale;

    auto row = [&m](int i) { return sixteen(m.chart + i * 16); };
    const Sixteen value = row(0), next = row(1), first = row(2), rise = row(3), slots = row(4);
    const float divisor = scale == 0 ? __builtin_inff() : scale;
    const int zero = (1 << BITS) / 2 - 1, least_above_zero = m.table[0] == 0;
    F uniform[BLOCK / LANES];
    draw_uniform(uniform, m, at, n);
    each(n, [&](int i, Mask mask) ALWAYS {
        F y = x[i] / divisor;
        F size = (F)((I)y & 0x7FFFFFFF);
        // which stretch: by the exponent, within which two more of them begin at most
        I exponent = ((I)size >> 23) - 96;
        I slot = pick_int16(slots, exponent < 0 ? I{} : exponent);
        slot = one_more(slot, pick(next, slot), size, true);
        slot = one_more(slot, pick(next, slot), size, true);
        F exact = pick(first, slot) + (size - pick(value, slot)) * pick(rise, slot);

        I code = __builtin_convertvector(exact, I);
        code = one_more(code, uniform[i], exact - __builtin_convertvector(code, F), false);
        if (SIGN)
            code = y < 0 ? zero - code : zero + code;
        else
            code = (y > 0) & (code == 0) ? I{} + least_above_zero : code;
        write_codes(m, BITS, at + i * LANES, mask, SIGN ? (code < 0 ? I{} : code) : code);
    });
}

// Encode n values from `at` on, the first of a block
static void encode_blocks(const Moment& m, F* x, int64_t at, int n) {
    auto encode_one = m.bits == 4 ? m.has_sign ? encode<4, true> : encode<4, false>
                                  : m.has_sign ? encode<8, true> : encode<8, false>;
    if (m.mantissa == 3) encode_one = m.has_sign ? encode_float8<3, true> : encode_float8<3, false>;
    if (m.mantissa == 2) encode_one = m.has_sign ? encode_float8<2, true> : encode_float8<2, false>;
    for (int k = 0, block = block_of(m); k < n; k += block)
        encode_one(m, x + k / LANES, at + k, n - k < block ? n - k : block);
}

// ---- The step ---------------------------------------------------------------------------------------------

static const int64_t MODE = 0x140102;  // of MKL, as torch calls it: high accuracy, denormals kept, no errors

static inline F root_of(int kind, F x) {
    return kind == OF_MKL ? root_of_mkl(x) : nearest_root(x);
}

// What follows WeightNumbers in the row, if it is of this kind. By value, as a Sort.
template <class Numbers> static INLINE Numbers own_numbers(const TensorStep& s, bool of_this_kind) {
    Numbers found{};
    if (of_this_kind) std::memcpy(&found, (const WeightNumbers*)s.numbers + 1, sizeof found);
    return found;
}

static INLINE void step_chunk(const TensorStep& s, Sort sort, int64_t start, int n) {
    F kept[2][CHUNK / LANES], root[CHUNK / LANES];
    const bool is_adamw = sort.rule == ADAMW;
    const int count = is_adamw ? 2 : 1;  // of moments
    const WeightNumbers of_weight = *(const WeightNumbers*)s.numbers;
    const AdamWNumbers adamw = own_numbers<AdamWNumbers>(s, is_adamw);
    // as numbers of their own, which stay in registers through the loop; read from a struct they cost a tenth
    const float decay = of_weight.decay, scale = of_weight.scale;
    const float one_minus_beta1 = adamw.one_minus_beta1, one_minus_beta2 = adamw.one_minus_beta2;
    const float beta2 = adamw.beta2, root_correction = adamw.root_correction, eps = adamw.eps, rate = adamw.rate;
    const SGDNumbers sgd = own_numbers<SGDNumbers>(s, sort.rule == SGD);
    const LionNumbers lion = own_numbers<LionNumbers>(s, sort.rule == LION);

    // the noise of vector i, then of i + 1, ...: a hash is a long chain, of which each turn does one link for
    // each of the next three
    U place = LANE + (uint32_t)start + s.key_words[0], half{}, next{}, first{};
    auto draw = [&]() ALWAYS {
        first = next;
        next = mix(half + s.key_words[1]);
        half = mix(place);
        place += LANES;
    };
    if (sort.stochastic) draw(), draw();

    auto fetch_all = [&](int i) ALWAYS {
        int64_t at = start + i * LANES;
        fetch(bits_of(sort.weight), s.p, at);
        fetch(bits_of(sort.gradient), s.g, at);
        if (sort.low != NONE) fetch(bits_of(sort.low), s.low, at);
        if (s.average != NONE) fetch(bits_of(s.average), s.shadow, at);
        for (int j = 0; j < count; j++) {
            const Moment& m = s.moments[j];
            fetch(sort.moments[j] == CODES ? m.bits : bits_of(sort.moments[j]), m.data, at);
        }
    };
    // the new moments; where there is but one, the step that it asks for is the second
    auto moments = [&](int i, Mask mask) ALWAYS {
        int64_t at = start + i * LANES;
        F g = read(sort.gradient, s.g, at, mask) * scale, old[2];
        for (int j = 0; j < count; j++) {
            const Moment& from = s.moments[j];
            int kind = sort.moments[j];
            old[j] = kind == CODES ? decoded(from, at, mask) : read(kind, from.data, at, mask);
        }
        if (sort.rule == SGD) {
            F m = old[0] * sgd.momentum + g;
            return std::pair(m, sgd.rate * (sgd.of_gradient * g + sgd.of_momentum * m));
        }
        if (sort.rule == LION) {
            F mean = old[0] + lion.one_minus_beta1 * (g - old[0]);
            F sign = mean > 0 ? F{} + 1 : mean < 0 ? F{} - 1 : mean == 0 ? F{} : mean;
            return std::pair(old[0] + lion.one_minus_beta2 * (g - old[0]), lion.rate * sign);
        }
        F m = sort.exact ? fma(F{} + one_minus_beta1, g - old[0], old[0])
                         : (g - old[0]) * one_minus_beta1 + old[0];
        F v = sort.exact ? fma(one_minus_beta2 * g, g, old[1] * beta2)
                         : one_minus_beta2 * g * g + old[1] * beta2;
        return std::pair(m, v);
    };
    auto weight = [&](int i, Mask mask, F m, F root) ALWAYS {
        F update = (rate * m) / (root / root_correction + eps);
        return held(s, sort, start + i * LANES, mask) * decay + update;
    };
    auto write_moments = [&](int i, Mask mask, F m, F v, bool nan) ALWAYS {
        int64_t at = start + i * LANES;
        F now[2] = {m, v};
        U bits[2] = {first >> 16, sort.stochastic ? further(first) & 0xFFFF : U{}};
        for (int j = 0; j < count; j++) {
            int kind = sort.moments[j];
            if (sort.root == CALLED || kind == CODES)  // with zeros beyond the last value, for a scale
                kept[j][i] = only(mask, now[j]);
            if (kind != CODES)
                write(kind, s.moments[j].data, at, mask, now[j], nan, sort.stochastic, bits[j]);
        }
    };
    auto write_rest = [&](int i, Mask mask, F x, bool nan) ALWAYS {
        int64_t at = start + i * LANES;
        F now = write_weight(s, sort, at, mask, x, nan, first & 0xFFFF);
        if (s.average != NONE) move_average(s, at, mask, now);
    };

    if (sort.root == CALLED) {
        each(n, [&](int i, Mask mask) ALWAYS {
            auto [m, v] = moments(i, mask);
            write_moments(i, mask, m, v, true);
            root[i] = s.floored ? (v < SMALLEST ? F{} + SMALLEST : v) : v;
        });
        s.called(n, (const float*)root, (float*)root, MODE);
        each(n, [&](int i, Mask mask) ALWAYS {
            F x = weight(i, mask, kept[0][i], root[i]);
            write_rest(i, mask, x, any_nan(x));
        });
    } else {
        each(n, [&](int i, Mask mask) ALWAYS {
            if (sort.stochastic) draw();
            fetch_all(i);
            auto [m, v] = moments(i, mask);
            F x = is_adamw ? weight(i, mask, m, root_of(sort.root, v))
                           : held(s, sort, start + i * LANES, mask) * decay + v;
            bool nan = any_nan(x);  // as it is where m or v is
            write_moments(i, mask, m, v, nan);
            write_rest(i, mask, x, nan);
        });
    }
    for (int j = 0; j < count; j++)
        if (sort.moments[j] == CODES) encode_blocks(s.moments[j], kept[j], start, n);
}

// Do the step if it is of this sort, with a loop of its own
static INLINE bool done(Sort own, const TensorStep& s, int64_t start, int n) {
    if (std::memcmp(&own, &s.sort, sizeof own)) return false;
    step_chunk(s, own, start, n);
    return true;
}

static void step(const TensorStep& s, int64_t start, int n) {
    if (done({ADAMW, FP32, FP32, NONE, {FP32, FP32}, false, true, OF_MKL}, s, start, n)) return;
    if (done({ADAMW, BF16, BF16, INT16, {FP32, FP32}, false, true, OF_MKL}, s, start, n)) return;
    if (done({ADAMW, FP32, FP32, NONE, {FP32, FP32}, false, true, CALLED}, s, start, n)) return;
    if (done({ADAMW, BF16, BF16, INT16, {FP32, FP32}, false, true, CALLED}, s, start, n)) return;
    if (done({ADAMW, BF16, BF16, NONE, {BF16, BF16}, true, false, NEAREST}, s, start, n)) return;
    if (done({ADAMW, BF16, BF16, NONE, {BF16, BF16}, false, false, NEAREST}, s, start, n)) return;
    if (done({ADAMW, BF16, BF16, NONE, {FP32, FP32}, true, false, NEAREST}, s, start, n)) return;
    if (done({ADAMW, BF16, BF16, BF16, {BF16, BF16}, false, false, NEAREST}, s, start, n)) return;
    if (done({ADAMW, BF16, BF16, BF16, {BF16, BF16}, true, false, NEAREST}, s, start, n)) return;
    if (done({ADAMW, BF16, BF16, NONE, {CODES, CODES}, true, false, NEAREST}, s, start, n)) return;
    if (done({SGD, BF16, BF16, NONE, {BF16, NONE}, true, false, NEAREST}, s, start, n)) return;
    if (done({LION, BF16, BF16, NONE, {BF16, NONE}, true, false, NEAREST}, s, start, n)) return;
    step_chunk(s, s.sort, start, n);
}

// Do work(tensor, start, n) for each chunk of each tensor, of which number i ends at ends[i]
template <class Work> static void in_chunks(int count, const int64_t* ends, int threads, Work work) {
    auto begin = [ends](int i) { return i ? ends[i - 1] : 0; };
    auto chunks = [&](int i) { return (ends[i] - begin(i) + CHUNK - 1) / CHUNK; };
    int64_t all = 0;
    for (int i = 0; i < count; i++) all += chunks(i);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t c = 0; c < all; c++) {
        int i = 0;
        int64_t left = c;
        while (left >= chunks(i)) left -= chunks(i++);
        int64_t start = begin(i) + left * CHUNK;
        work(i, start, (int)(ends[i] - start < CHUNK ? ends[i] - start : CHUNK));
    }
}

static TensorStep of_tensor(const Step* s, int i) {
    int64_t before = i ? s->ends[i - 1] : 0;
    TensorStep own{*s};
    own.p = (char*)s->weights[i] - before * (s->sort.weight == FP32 ? 4 : 2);
    return own;
}

// The average alone
extern "C" void ema(const Step* s) {
    in_chunks(s->count, s->ends, s->threads, [s](int i, int64_t start, int n) {
        TensorStep own = of_tensor(s, i);
        each(n, [&](int i, Mask mask) ALWAYS {
            int64_t at = start + i * LANES;
            move_average(own, at, mask, held(own, own.sort, at, mask));
        });
    });
}

extern "C" void update(const Step* s) {
    in_chunks(s->count, s->ends, s->threads, [s](int i, int64_t start, int n) {
        int64_t before = i ? s->ends[i - 1] : 0;
        TensorStep own = of_tensor(s, i);
        own.g = (char*)s->gradients[i] - before * (s->sort.gradient == FP32 ? 4 : 2);
        if (s->sort.stochastic) {
            own.key_words[0] = s->key[0] + s->key[2];
            own.key_words[1] = s->key[1];
        }
        step(own, start, n);
    });
}

extern "C" void roots(int kind, decltype(Step::called) called, const float* x, float* roots, int64_t n) {
    if (kind == CALLED) return called(n, x, roots, MODE);
    for (int64_t at = 0; at < n; at += LANES) {
        Mask mask = first_of(n - at < LANES ? n - at : LANES);
        write_fp32(roots, at, mask, root_of(kind, read(FP32, x, at, mask)));
    }
}

extern "C" void encode_all(const float* x, int64_t n, const Moment* m, int threads) {
    in_chunks(1, &n, threads, [=](int, int64_t start, int n) {
        F values[CHUNK / LANES];
        for (int k = 0; k < n; k += LANES)
            values[k / LANES] = read(FP32, x, start + k, first_of(n - k));
        encode_blocks(*m, values, start, n);
    });
}
