// AdamW's step and the codes of its moments on a CPU with AVX-512, in one pass, with the bits of optim.py,
// rounding.py and formats.py. cpu_step.py compiles it and says what the fields hold. GCC alone: sixteen
// values are one of its vectors, (F) and (I) read the bits of one as the other, and `mask ? a : b` picks by
// lane.

#include <cstdint>
#include <immintrin.h>

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));

enum Kind { NONE, FP32, BF16, INT16, CODES };
// values of a vector, of the largest block of codes, and of what a thread takes at once: whole blocks, which
// stay in its caches and are worth a call of MKL
const int LANES = 16, BLOCK = 256, CHUNK = 4096;
const F INFINITE = F{} + __builtin_inff();
const float SMALLEST = 0x1p-126f;  // normal number, see exact_step.vanishes

struct Moment {
    int32_t kind, bits, has_sign;
    void* data;          // codes of 4 bits: two to a byte, the first above the second
    float* scales;       // one a block
    const float* table;  // [2^bits] what the codes stand for
    const float* chart;  // [80] the table's broken line, see cpu_step.chart
    const int32_t* key;  // [3] of the noise of the codes
};

struct Step {
    int64_t count;              // tensors of weights, and of gradients; all else is one vector for all of them
    const int64_t* ends;        // where each of them ends in that vector
    void **weights, **gradients;
    int32_t weight, gradient, low, stochastic, average, average_stochastic, threads, exact, floored;
    void *p, *g, *l, *shadow;  // p, g: of the tensor at hand, as if it began where the vector does
    const float *h, *average_h;
    const int32_t *key, *average_key;
    void (*root)(int32_t, const float*, float*, int64_t);  // of MKL; null for the nearest root
    Moment moments[2];
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

static inline void write_fp32(void* to, int64_t at, Mask mask, F x) {
    _mm512_mask_storeu_ps((float*)to + at, mask, (__m512)x);
}

static inline void write_int16(void* to, int64_t at, Mask mask, I x) {
    _mm256_mask_storeu_epi16((int16_t*)to + at, mask, _mm512_cvtepi32_epi16((__m512i)x));
}

// ---- Noise and rounding, as in rounding.py ----------------------------------------------------------------

static inline U mix(U h) {
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    return h ^ (h >> 16);
}

static inline U noise(const int32_t* key, int64_t at) {
    U place = (U)_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0) + (uint32_t)at;
    return mix(mix(place + (uint32_t)key[2] + (uint32_t)key[0]) + (uint32_t)key[1]);
}

static inline U further(U first) { return mix(first ^ 0x5BD1E995u); }

// fp32 whose low 16 bits are zero
static inline F stochastic_round(F x, U noise) {
    return x == x ? (F)((I)((U)x + (noise & 0xFFFF)) & -65536) : x;
}

static inline F nearest(F x) {
    U bits = (U)x;
    return x == x ? (F)((I)(bits + 0x7FFF + ((bits >> 16) & 1)) & -65536) : x;
}

// Write x, rounded if the kind is bf16; returns what was written
static inline F write(int kind, void* to, int64_t at, Mask mask, F x, bool stochastic, U noise) {
    if (kind == FP32) {
        write_fp32(to, at, mask, x);
        return x;
    }
    x = stochastic ? stochastic_round(x, noise) : nearest(x);
    write_int16(to, at, mask, x == x ? (I)((U)x >> 16) : I{} + 0x7FC0);
    return x;
}

// ---- Weights: rounding.exact_weight, write_weight and written ---------------------------------------------

static inline F held(const Step& s, int64_t at, Mask mask) {
    F p = read(s.weight, s.p, at, mask);
    I bits = (I)p;
    if (s.low == BF16) return p + read(BF16, s.l, at, mask);
    if (s.low == INT16) {
        I rest = read_int16(s.l, at, mask);
        return (F)(bits + (((bits & 0x7FFFFFFF) == 0) & (rest < 0) ? I{} : rest));
    }
    if (s.low == FP32) {
        F master = read(FP32, s.l, at, mask);
        I away = bits - (I)master + 0x8000;
        return (away >= 0) & (away <= 0x10000) ? master : p;
    }
    return p;
}

static inline F write_weight(const Step& s, int64_t at, Mask mask, F x, U first) {
    if (s.low == NONE) return write(s.weight, s.p, at, mask, x, s.stochastic, first);
    if (s.low == BF16) {
        F near = write(BF16, s.p, at, mask, x, true, U{} + 0x8000);
        return near + write(BF16, s.l, at, mask, x - near, s.stochastic, first);
    }
    if (s.low == INT16) {
        I bits = (I)x, high = (bits + 0x8000) & -65536;
        write(BF16, s.p, at, mask, x == x ? (F)high : x, false, first);
        write_int16(s.l, at, mask, x == x ? bits - high : I{});
    } else {
        write_fp32(s.l, at, mask, x);
        write(s.weight, s.p, at, mask, x, false, first);
    }
    return x;
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

// Write sixteen codes
static inline void write_codes(const Moment& m, int64_t at, Mask mask, I code) {
    __m128i narrow = _mm512_cvtepi32_epi8((__m512i)code);
    if (m.bits == 8) {
        _mm_mask_storeu_epi8((uint8_t*)m.data + at, mask, narrow);
    } else {
        __m128i pairs = _mm_or_si128(_mm_slli_epi16(narrow, 4), _mm_srli_epi16(narrow, 8));
        _mm_mask_storeu_epi8((uint8_t*)m.data + at / 2, bytes_of(mask), _mm_cvtepi16_epi8(pairs));
    }
}

static inline F finite(F x) { return (F)((I)x & 0x7FFFFFFF) < INFINITE ? x : F{}; }

static void encode(const Moment& m, const F* x, int64_t at, int n) {
    F low{}, high{};
    for (int k = 0; k < n; k += LANES) {  // lanes after the last value are zero
        F known = finite(x[k / LANES]);
        low = known < low ? known : low;
        high = known > high ? known : high;
    }
    float scale = 0;
    for (int lane = 0; lane < LANES; lane++) scale = high[lane] > scale ? high[lane] : scale;
    for (int lane = 0; lane < LANES && m.has_sign; lane++) {
        float other = low[lane] / m.table[0];
        scale = other > scale ? other : scale;
    }
    m.scales[at / block_of(m)] = scale;

    auto row = [&m](int i) { return (F)_mm512_loadu_ps(m.chart + i * LANES); };
    const F value = row(0), next = row(1), first = row(2), rise = row(3);
    const __m512i slots = (__m512i)row(4);
    F uniform[BLOCK / LANES];  // by itself, as in step_chunk
    for (int k = 0; k < n; k += LANES) {
        I bits = (I)(noise(m.key, at + k) & 0xFFFFFF);
        uniform[k / LANES] = __builtin_convertvector(bits, F) * 0x1p-24f;
    }
    for (int k = 0; k < n; k += LANES) {
        F y = scale == 0 ? F{} : x[k / LANES] / scale;
        y = finite(x[k / LANES]) == x[k / LANES] ? y : F{};
        F size = (F)((I)y & 0x7FFFFFFF);
        // which stretch: by the exponent, within which two more of them begin at most
        I exponent = ((I)size >> 23) - 96;
        exponent = exponent < 0 ? I{} : exponent;
        __m512i pair = _mm512_permutexvar_epi32(_mm512_srli_epi32((__m512i)exponent, 1), slots);
        I slot = (I)_mm512_srlv_epi32(pair, (__m512i)((exponent & 1) << 4)) & 0xFFFF;
        slot -= size >= pick(next, slot);  // true is -1
        slot -= size >= pick(next, slot);
        F exact = pick(first, slot) + (size - pick(value, slot)) * pick(rise, slot);

        I code = __builtin_convertvector(exact, I);
        code -= exact - __builtin_convertvector(code, F) > uniform[k / LANES];
        int last = (1 << m.bits) - 1, zero = last / 2;
        if (m.has_sign)
            code = y < 0 ? zero - code : zero + code;
        else
            code = (y > 0) & (code == 0) & (int)-(m.table[0] == 0) ? I{} + 1 : code;
        code = code < 0 ? I{} : code > last ? I{} + last : code;
        write_codes(m, at + k, first_of(n - k), code);
    }
}

// Write n values from `at` on, the first of a block, block by block
static void encode_blocks(const Moment& m, const F* x, int64_t at, int n) {
    for (int k = 0, block = block_of(m); k < n; k += block)
        encode(m, x + k / LANES, at + k, n - k < block ? n - k : block);
}

// ---- The step ---------------------------------------------------------------------------------------------

static const int64_t MODE = 0x140102;  // of MKL, as torch calls it: high accuracy, denormals kept, no errors

static inline F fma(float a, F b, F c) { return (F)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)c); }
static inline F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

static void step_chunk(const Step& s, int64_t start, int n) {
    F kept[2][CHUNK / LANES], root[CHUNK / LANES];
    U first[CHUNK / LANES], second[CHUNK / LANES];
    const float rate = s.h[7], corrected = s.h[5], eps = s.h[6], decay = s.h[0];

    auto weight = [&](int i, F m, F root, U first) {
        int64_t at = start + i * LANES;
        Mask mask = first_of(n - i * LANES);
        F x = held(s, at, mask) * decay + (rate * m) / (root / corrected + eps);
        F now = write_weight(s, at, mask, x, first);
        if (s.average == NONE) return;
        F shadow = read(s.average, s.shadow, at, mask);
        shadow += (now - shadow) * s.average_h[0];
        U own = s.average_stochastic ? noise(s.average_key, at) : U{};
        write(s.average, s.shadow, at, mask, shadow, s.average_stochastic, own);
    };

    if (s.stochastic) {  // by itself: a hash is a long chain, and many of them at once hide that
        for (int i = 0; i * LANES < n; i++) first[i] = noise(s.key, start + i * LANES);
        for (int i = 0; i * LANES < n; i++) second[i] = further(first[i]);
    }
    const float *h = s.h, scale = h[1];
    for (int i = 0, k = 0; k < n; i++, k += LANES) {
        int64_t at = start + k;
        Mask mask = first_of(n - k);
        F g = read(s.gradient, s.g, at, mask) * scale, old[2];
        for (int j = 0; j < 2; j++) {
            const Moment& m = s.moments[j];
            old[j] = m.kind == CODES ? decoded(m, at, mask) : read(m.kind, m.data, at, mask);
        }
        F m = s.exact ? fma(h[2], g - old[0], old[0]) : (g - old[0]) * h[2] + old[0];
        F v = s.exact ? fma(h[4] * g, g, old[1] * h[3]) : h[4] * g * g + old[1] * h[3];
        F now[2] = {m, v};
        U low = s.stochastic ? first[i] : U{}, bits[2] = {low >> 16, s.stochastic ? second[i] : U{}};
        for (int j = 0; j < 2; j++) {
            const Moment& to = s.moments[j];
            if (s.root || to.kind == CODES)  // with zeros beyond the last value, for a scale
                kept[j][i] = (F)_mm512_maskz_mov_ps(mask, (__m512)now[j]);
            if (to.kind != CODES)
                write(to.kind, to.data, at, mask, now[j], s.stochastic, bits[j]);
        }
        if (s.root)
            root[i] = s.floored ? (v < SMALLEST ? F{} + SMALLEST : v) : v;
        else
            weight(i, m, (F)_mm512_sqrt_ps((__m512)v), low);
    }
    if (s.root) {
        s.root(n, (const float*)root, (float*)root, MODE);
        for (int i = 0; i * LANES < n; i++) weight(i, kept[0][i], root[i], s.stochastic ? first[i] : U{});
    }
    for (int j = 0; j < 2; j++)
        if (s.moments[j].kind == CODES) encode_blocks(s.moments[j], kept[j], start, n);
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

extern "C" void adamw(const Step* s) {
    in_chunks(s->count, s->ends, s->threads, [s](int i, int64_t start, int n) {
        int64_t before = i ? s->ends[i - 1] : 0;
        Step own = *s;
        own.p = (char*)s->weights[i] - before * (s->weight == FP32 ? 4 : 2);
        own.g = (char*)s->gradients[i] - before * (s->gradient == FP32 ? 4 : 2);
        step_chunk(own, start, n);
    });
}

extern "C" void encode_all(const float* x, int64_t n, const Moment* m, int threads) {
    in_chunks(1, &n, threads, [=](int, int64_t start, int n) {
        F values[CHUNK / LANES];
        for (int k = 0; k < n; k += LANES)
            values[k / LANES] = read(FP32, x, start + k, first_of(n - k));
        encode_blocks(*m, values, start, n);
    });
}
