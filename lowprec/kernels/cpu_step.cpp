// The step of AdamW, SGD and Lion, the average, and codes of moments on a CPU, each in one pass, with the bits
// of optimizers/rounded.py, rounding.py and formats.py. cpu_step.py compiles it and says what the fields hold.

#include <iterator>
#include "cpu_codes.h"

enum Kind { NONE, FP32, BF16, INT16, CODES };
enum Rule { ADAMW, SGD, LION, GIVEN };
enum Root { ROOT_NEAREST, ROOT_OF_MKL, ROOT_CALLED };  // how a square root is taken, see cpu_step.torch_root
// values that a thread takes at once: whole blocks of codes, which stay in its caches and are worth a call of
// MKL
const int CHUNK = 4096;
const int AHEAD = 2048;  // bytes, by which memory is asked before they are needed
const float SMALLEST = 0x1p-126f;  // normal number, see exact_step.smallest_root_vanishes

// The numbers of a step as they lie in a row, see numbers.py: those of the weight, then those of the optimiser
struct WeightNumbers { float decay, scale; };
struct AdamWNumbers { float one_minus_beta1, beta2, one_minus_beta2, root_correction, eps, rate; };
struct SGDNumbers { float momentum, of_gradient, of_momentum, rate; };
struct LionNumbers { float one_minus_beta1, one_minus_beta2, rate; };

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

static SHORT F read(int kind, const void* from, int64_t at, Mask mask) {
    if (kind == FP32) return read_fp32(from, at, mask);
    return read_bf16(from, at, mask);
}

// Ask memory for what lies behind this place. The CPU does that by itself, but not past the end of a page.
// Inlined by force: GCC drops calls of a function that does nothing else.
static INLINE void fetch(int bits, const void* from, int64_t at) {
    _mm_prefetch((const char*)from + at * bits / 8 + AHEAD, _MM_HINT_T0);
}

static INLINE int bits_of(int kind) { return kind == FP32 ? 32 : 16; }

// ---- Noise and rounding, as in rounding.py ----------------------------------------------------------------

// Write x, rounded if the kind is bf16, by noise of 16 bits or to nearest; returns what was written. nan: it
// may be one.
static INLINE F write(int kind, void* to, int64_t at, Mask mask, F x, bool nan, bool stochastic, U noise) {
    if (kind == FP32) {
        write_fp32(to, at, mask, x);
        return x;
    }
    U bits = (U)x + (stochastic ? noise : 0x7FFF + (((U)x >> 16) & 1));
    if (__builtin_expect(nan, false)) bits = where(x == x, bits, U{} + 0x7FC00000);
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
        return (F)(bits + where(((bits & 0x7FFFFFFF) == 0) & (rest < 0), I{}, rest));
    }
    if (sort.low == FP32) {
        F master = read(FP32, s.low, at, mask);
        I away = bits - (I)master + 0x8000;
        return where((away >= 0) & (away <= 0x10000), master, p);
    }
    return p;
}

static INLINE void write_weight(const TensorStep& s, Sort sort, int64_t at, Mask mask, F x, bool nan, U noise) {
    if (sort.low == NONE) {
        write(sort.weight, s.p, at, mask, x, nan, sort.stochastic, noise);
    } else if (sort.low == BF16) {
        F near = write(BF16, s.p, at, mask, x, nan, true, U{} + 0x8000);
        write(BF16, s.low, at, mask, x - near, true, sort.stochastic, noise);
    } else if (sort.low == INT16) {
        I bits = (I)x, high = (bits + 0x8000) & -65536;
        write(BF16, s.p, at, mask, where(x == x, (F)high, x), nan, false, noise);
        write_int16(s.low, at, mask, where(x == x, bits - high, I{}));
    } else {
        write_fp32(s.low, at, mask, x);
        write(sort.weight, s.p, at, mask, x, nan, false, noise);
    }
}

// ---- The average: rounding.ema_kernel ----------------------------------------------------------------------

// Move the values of a vector towards those that are held now
static INLINE void move_average(const TensorStep& s, int64_t at, Mask mask, F now) {
    F shadow = read(s.average, s.shadow, at, mask);
    shadow += (now - shadow) * *s.average_share;
    U own = s.average_stochastic ? noise(s.average_key, at) & 0xFFFF : U{};
    write(s.average, s.shadow, at, mask, shadow, any_nan(shadow), s.average_stochastic, own);
}

// ---- The step ---------------------------------------------------------------------------------------------

static const int64_t MODE = 0x140102;  // of MKL, as torch calls it: high accuracy, denormals kept, no errors

static inline F root_of(int kind, F x) {
    return kind == ROOT_OF_MKL ? root_of_mkl(x) : nearest_root(x);
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
    const int count = is_adamw ? 2 : sort.rule == GIVEN ? 0 : 1;  // of moments
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
        UNROLLED for (int j = 0; j < count; j++) {
            const Moment& m = s.moments[j];
            fetch(sort.moments[j] == CODES ? m.bits : bits_of(sort.moments[j]), m.data, at);
        }
    };
    // the new moments; where there is but one, the step that it asks for is the second
    auto moments = [&](int i, Mask mask) ALWAYS {
        int64_t at = start + i * LANES;
        F g = read(sort.gradient, s.g, at, mask) * scale, old[2];
        if (sort.rule == GIVEN) return Two{g, g};  // what stands there is the step already
        UNROLLED for (int j = 0; j < count; j++) {
            const Moment& from = s.moments[j];
            int kind = sort.moments[j];
            old[j] = kind == CODES ? IN_PASSES ? kept[j][i] : decoded(from, at, mask)
                                   : read(kind, from.data, at, mask);
        }
        if (sort.rule == SGD) {
            F m = old[0] * sgd.momentum + g;
            return Two{m, sgd.rate * (sgd.of_gradient * g + sgd.of_momentum * m)};
        }
        if (sort.rule == LION) {
            F mean = old[0] + lion.one_minus_beta1 * (g - old[0]);
            F sign = where(mean > 0, F{} + 1, where(mean < 0, F{} - 1, where(mean == 0, F{}, mean)));
            F step = lion.rate * sign;
            return Two{old[0] + lion.one_minus_beta2 * (g - old[0]), step};
        }
        F m = sort.exact ? fma(F{} + one_minus_beta1, g - old[0], old[0])
                         : (g - old[0]) * one_minus_beta1 + old[0];
        F v = sort.exact ? fma(one_minus_beta2 * g, g, old[1] * beta2)
                         : one_minus_beta2 * g * g + old[1] * beta2;
        return Two{m, v};
    };
    auto weight = [&](int i, Mask mask, F m, F root) ALWAYS {
        F update = (rate * m) / (root / root_correction + eps);
        return held(s, sort, start + i * LANES, mask) * decay + update;
    };
    auto write_moments = [&](int i, Mask mask, F m, F v, bool nan) ALWAYS {
        int64_t at = start + i * LANES;
        F now[2] = {m, v};
        U bits[2] = {first >> 16, sort.stochastic ? further(first) & 0xFFFF : U{}};
        UNROLLED for (int j = 0; j < count; j++) {
            int kind = sort.moments[j];
            if (sort.root == ROOT_CALLED || kind == CODES)  // with zeros beyond the last value, for a scale
                kept[j][i] = only(mask, now[j]);
            if (kind != CODES)
                write(kind, s.moments[j].data, at, mask, now[j], nan, sort.stochastic, bits[j]);
        }
    };
    auto write_new = [&](int i, Mask mask, F x, bool nan) ALWAYS {
        write_weight(s, sort, start + i * LANES, mask, x, nan, first & 0xFFFF);
    };

    for (int j = 0; IN_PASSES && j < count; j++)
        if (sort.moments[j] == CODES)
            each(n, [&](int i, Mask mask) ALWAYS {
                kept[j][i] = decoded(s.moments[j], start + i * LANES, mask);
            });
    if (sort.root == ROOT_CALLED) {
        each(n, [&](int i, Mask mask) ALWAYS {
            auto [m, v] = moments(i, mask);
            write_moments(i, mask, m, v, true);
            root[i] = s.floored ? where(v < SMALLEST, F{} + SMALLEST, v) : v;
        });
        s.called(room_of(n), (const float*)root, (float*)root, MODE);
        each(n, [&](int i, Mask mask) ALWAYS {
            F x = weight(i, mask, kept[0][i], root[i]);
            write_new(i, mask, x, any_nan(x));
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
            write_new(i, mask, x, nan);
        });
    }
    for (int j = 0; j < count; j++)
        if (sort.moments[j] == CODES) encode_blocks(s.moments[j], kept[j], start, n);
}

// Sorts that have a loop of their own
static constexpr Sort SORTS[] = {
    {ADAMW, FP32, FP32, NONE, {FP32, FP32}, false, true, ROOT_OF_MKL},
    {ADAMW, BF16, BF16, INT16, {FP32, FP32}, false, true, ROOT_OF_MKL},
    {ADAMW, FP32, FP32, NONE, {FP32, FP32}, false, true, ROOT_CALLED},
    {ADAMW, BF16, BF16, INT16, {FP32, FP32}, false, true, ROOT_CALLED},
    {ADAMW, BF16, BF16, NONE, {BF16, BF16}, true, false, ROOT_NEAREST},
    {ADAMW, BF16, BF16, NONE, {BF16, BF16}, false, false, ROOT_NEAREST},
    {ADAMW, BF16, BF16, NONE, {FP32, FP32}, true, false, ROOT_NEAREST},
    {ADAMW, BF16, BF16, BF16, {BF16, BF16}, false, false, ROOT_NEAREST},
    {ADAMW, BF16, BF16, BF16, {BF16, BF16}, true, false, ROOT_NEAREST},
    {ADAMW, BF16, BF16, NONE, {CODES, CODES}, true, false, ROOT_NEAREST},
    {SGD, BF16, BF16, NONE, {BF16, NONE}, true, false, ROOT_NEAREST},
    {LION, BF16, BF16, NONE, {BF16, NONE}, true, false, ROOT_NEAREST},
    {GIVEN, BF16, FP32, NONE, {NONE, NONE}, true, false, ROOT_NEAREST},
};

// A function each: of one function with all loops GCC made some that took three times as long
template <int I> __attribute__((noinline)) static void step_of_sort(const TensorStep& s, int64_t start, int n) {
    step_chunk(s, SORTS[I], start, n);
}

// Do the step if it is of sort I
template <int I> static bool done(const TensorStep& s, int64_t start, int n) {
    if (std::memcmp(&SORTS[I], &s.sort, sizeof(Sort))) return false;
    step_of_sort<I>(s, start, n);
    return true;
}

template <int... I>
static void step(const TensorStep& s, int64_t start, int n, std::integer_sequence<int, I...>) {
    if (!(done<I>(s, start, n) || ...)) step_chunk(s, s.sort, start, n);
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
        step(own, start, n, std::make_integer_sequence<int, std::size(SORTS)>());
    });
}

// Values alone, to bf16 by the noise of a key
extern "C" void write_all(const float* x, int64_t n, void* to, const int32_t* key, int threads) {
    in_chunks(1, &n, threads, [=](int, int64_t start, int n) {
        each(n, [&](int i, Mask mask) ALWAYS {
            int64_t at = start + i * LANES;
            F value = read(FP32, x, at, mask);
            write(BF16, to, at, mask, value, any_nan(value), true, noise(key, at) & 0xFFFF);
        });
    });
}

extern "C" void roots(int kind, decltype(Step::called) called, const float* x, float* roots, int64_t n) {
    if (kind == ROOT_CALLED) return called(n, x, roots, MODE);
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
