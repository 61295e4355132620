// The step of AdamW, SGD and Lion, the average, and codes of moments on a CPU with AVX-512, each in one pass,
// with the bits of optimizers/rounded.py, rounding.py and formats.py. cpu_step.py compiles it and says what the
// fields hold. GCC alone: sixteen values are one of its vectors, (F) and (I) read the bits of one as the
// other, and `mask ? a : b` picks by lane.

#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <utility>

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));

#define ALWAYS __attribute__((always_inline))
#define INLINE inline ALWAYS

enum Kind { NONE, FP32, BF16, INT16, CODES };
enum Rule { ADAMW, SGD, LION };
enum Root { NEAREST, OF_MKL, CALLED };  // how a square root is taken, see cpu_step.root
// values of a vector, of the largest block of codes, and of what a thread takes at once: whole blocks, which
// stay in its caches and are worth a call of MKL
const int LANES = 16, BLOCK = 256, CHUNK = 4096;
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

// ---- Vectors in memory: those of sixteen values that a mask has -------------------------------------------

typedef __mmask16 Mask;

static inline Mask first_of(int count) { return count < LANES ? (1 << count) - 1 : -1; }

static inline I read_int16(const void* from, int64_t at, Mask mask) {
    return (I)_mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(mask, (const int16_t*)from + at));
}

static inline F read(int kind, const void* from, int64_t at, Mask mask) {
    if (kind == FP32) return (F)_mm512_maskz_loadu_ps(mask, (const float*)from + at);
    return (F)(read_int16(from, at, mask) << 16);
}

// Ask memory for what lies behind this place. The CPU does that by itself, but not past the end of a page.
// Inlined by force: GCC drops calls of a function that does nothing else.
static INLINE void fetch(int bits, const void* from, int64_t at) {
    _mm_prefetch((const char*)from + at * bits / 8 + AHEAD, _MM_HINT_T0);
}

static INLINE int bits_of(int kind) { return kind == FP32 ? 32 : 16; }

static inline void write_fp32(void* to, int64_t at, Mask mask, F x) {
    _mm512_mask_storeu_ps((float*)to + at, mask, (__m512)x);
}

// The upper halves
static inline void write_bf16(void* to, int64_t at, Mask mask, U x) {
    const __m512i upper = _mm512_set_epi16(31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31,
                                           31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    __m512i halves = _mm512_permutexvar_epi16(upper, (__m512i)x);
    _mm256_mask_storeu_epi16((int16_t*)to + at, mask, _mm512_castsi512_si256(halves));
}

static inline void write_int16(void* to, int64_t at, Mask mask, I x) {
    _mm256_mask_storeu_epi16((int16_t*)to + at, mask, _mm512_cvtepi32_epi16((__m512i)x));
}

// Do work(i, mask) for each vector of n values
template <class Work> static INLINE void each(int n, Work work) {
    int i = 0;
    for (; (i + 1) * LANES <= n; i++) work(i, first_of(LANES));
    if (i * LANES < n) work(i, first_of(n - i * LANES));
}

static inline F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
static inline F fnma(F a, F b, F c) { return (F)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)c); }

// ---- Noise and rounding, as in rounding.py ----------------------------------------------------------------

static inline U mix(U h) {
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    return h ^ (h >> 16);
}

const U LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static inline U hash(U place, const int32_t* key) {
    return mix(mix(place + (uint32_t)key[2] + (uint32_t)key[0]) + (uint32_t)key[1]);
}

static inline U noise(const int32_t* key, int64_t at) { return hash(LANE + (uint32_t)at, key); }

static inline U further(U first) { return mix(first ^ 0x5BD1E995u); }

static inline bool any_nan(F x) { return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q); }

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

// Move its sixteen values towards those that are held now
static INLINE void move_average(const TensorStep& s, int64_t at, Mask mask, F now) {
    F shadow = read(s.average, s.shadow, at, mask);
    shadow += (now - shadow) * *s.average_share;
    U own = s.average_stochastic ? noise(s.average_key, at) & 0xFFFF : U{};
    write(s.average, s.shadow, at, mask, shadow, any_nan(shadow), s.average_stochastic, own);
}

// ---- Codes: formats.stochastic_codes ----------------------------------------------------------------------

static inline int block_of(const Moment& m) { return m.bits == 8 ? 256 : 128; }

// The bytes that pairs of values fill
static inline Mask bytes_of(Mask mask) { return first_of((__builtin_popcount(mask) + 1) / 2); }

static inline F pick(F from, I places) { return (F)_mm512_permutexvar_ps((__m512i)places, (__m512)from); }

static inline F decoded(const Moment& m, int64_t at, Mask mask) {
    if (m.bits == 8) {
        I code = (I)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, (const uint8_t*)m.data + at));
        return (F)_mm512_i32gather_ps((__m512i)code, m.table, 4) * m.scales[at / block_of(m)];
    }
    __m128i pairs = _mm_maskz_loadu_epi8(bytes_of(mask), (const uint8_t*)m.data + at / 2);
    __m128i wide = _mm_cvtepu8_epi16(pairs);
    __m128i apart = _mm_or_si128(_mm_srli_epi16(wide, 4), _mm_slli_epi16(wide, 8));
    I code = (I)_mm512_cvtepu8_epi32(apart) & 15;
    return pick((F)_mm512_loadu_ps(m.table), code) * m.scales[at / block_of(m)];
}

// Write sixteen codes; one above the last becomes the last
static INLINE void write_codes(const Moment& m, int bits, int64_t at, Mask mask, I code) {
    if (bits == 8) {
        _mm_mask_storeu_epi8((uint8_t*)m.data + at, mask, _mm512_cvtusepi32_epi8((__m512i)code));
    } else {
        __m128i narrow = _mm512_cvtepi32_epi8(_mm512_min_epu32((__m512i)code, _mm512_set1_epi32(15)));
        __m128i pairs = _mm_or_si128(_mm_slli_epi16(narrow, 4), _mm_srli_epi16(narrow, 8));
        _mm_mask_storeu_epi8((uint8_t*)m.data + at / 2, bytes_of(mask), _mm_cvtepi16_epi8(pairs));
    }
}

// x, and one more where a < b, or where they are equal if that counts
static INLINE I one_more(I x, F a, F b, bool equal) {
    Mask where = equal ? _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LE_OQ)
                       : _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ);
    return (I)_mm512_mask_add_epi32((__m512i)x, where, (__m512i)x, _mm512_set1_epi32(1));
}

// Encode n values of one block, with zeros after the last one up to a whole vector
template <int BITS, bool SIGN> static void encode(const Moment& m, F* x, int64_t at, int n) {
    F high{}, low{}, known{};
    for (int k = 0; k < n; k += LANES) {
        __m512 own = (__m512)x[k / LANES];
        high = (F)_mm512_max_ps(own, (__m512)high);
        low = (F)_mm512_min_ps(own, (__m512)low);
        known = fma((F)own, F{}, known);
    }
    if (any_nan(known)) {  // what is not finite becomes zero
        for (int k = 0; k < n; k += LANES) {
            F own = x[k / LANES];
            x[k / LANES] = (F)((I)own & 0x7FFFFFFF) < INFINITE ? own : F{};
        }
        return encode<BITS, SIGN>(m, x, at, n);
    }
    float most = _mm512_reduce_max_ps((__m512)high), least = _mm512_reduce_min_ps((__m512)low);
    float scale = SIGN && least / m.table[0] > most ? least / m.table[0] : most;
    m.scales[at / block_of(m)] = scale;

    auto row = [&m](int i) { return (F)_mm512_loadu_ps(m.chart + i * LANES); };
    const F value = row(0), next = row(1), first = row(2), rise = row(3);
    const __m512i slots = (__m512i)row(4);
    const float divisor = scale == 0 ? __builtin_inff() : scale;
    const int zero = (1 << BITS) / 2 - 1, least_above_zero = m.table[0] == 0;
    F uniform[BLOCK / LANES];  // by itself: a hash is a long chain, and many of them at once hide that
    U place = LANE + (uint32_t)at;
    for (int k = 0; k < n; k += LANES) {
        I bits = (I)(hash(place, m.key) & 0xFFFFFF);
        place += LANES;
        uniform[k / LANES] = __builtin_convertvector(bits, F) * 0x1p-24f;
    }
    each(n, [&](int i, Mask mask) ALWAYS {
        F y = x[i] / divisor;
        F size = (F)((I)y & 0x7FFFFFFF);
        // which stretch: by the exponent, within which two more of them begin at most
        __m512i exponent = _mm512_subs_epu16((__m512i)((I)size >> 23), _mm512_set1_epi32(96));  // 0 at least
        I slot = (I)_mm512_maskz_permutexvar_epi16(0x55555555, exponent, slots);
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
    auto encode_one = m.bits == 8 ? m.has_sign ? encode<8, true> : encode<8, false>
                                  : m.has_sign ? encode<4, true> : encode<4, false>;
    for (int k = 0, block = block_of(m); k < n; k += block)
        encode_one(m, x + k / LANES, at + k, n - k < block ? n - k : block);
}

// ---- The step ---------------------------------------------------------------------------------------------

static const int64_t MODE = 0x140102;  // of MKL, as torch calls it: high accuracy, denormals kept, no errors

// The root as MKL takes it on an Intel CPU with AVX-512: an estimate of 1 / sqrt(x), good to 14 bits, and one
// step of Newton's. Small values are moved by an even power of two first.
static inline F root_of_mkl(F x) {
    const __m512 up = _mm512_set1_ps(0x1p126f), down = _mm512_set1_ps(0x1p-63f);
    Mask small = _mm512_cmplt_ps_mask((__m512)x, _mm512_set1_ps(0x1p-60f));
    F moved = (F)_mm512_mask_mul_ps((__m512)x, small, (__m512)x, up);
    F inverse = (F)_mm512_rsqrt14_ps((__m512)moved);
    F near = moved * inverse;
    F root = fma(fnma(near, near, moved), 0.5f * inverse, near);
    root = (F)_mm512_mask_mul_ps((__m512)root, small, (__m512)root, down);
    return (x == 0) | (x == INFINITE) ? x : root;
}

static inline F root_of(int kind, F x) {
    return kind == OF_MKL ? root_of_mkl(x) : (F)_mm512_sqrt_ps((__m512)x);
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
                kept[j][i] = (F)_mm512_maskz_mov_ps(mask, (__m512)now[j]);
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
    if (done({ADAMW, BF16, BF16, NONE, {BF16, BF16}, true, false, NEAREST}, s, start, n)) return;
    if (done({ADAMW, BF16, BF16, BF16, {BF16, BF16}, false, false, NEAREST}, s, start, n)) return;
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
