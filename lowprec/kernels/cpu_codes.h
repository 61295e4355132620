// Moments in codes of 8 and 4 bits, and the noise that they are written with, as in formats.py, float8.py and
// rounding.py. For cpu_step.cpp; cpu_vectors.h says what a vector is.

#include "cpu_vectors.h"

const int BLOCK = 256;  // values of the largest block that shares a scale
const F INFINITE = F{} + __builtin_inff();

struct Moment {
    int32_t bits, has_sign;
    int32_t mantissa;    // bits of it, where codes are 8-bit floats: these need no table
    void* data;          // values, or codes; codes of 4 bits: two to a byte, the first above the second
    float* scales;       // one a block
    const float* table;  // [2^bits] what the codes stand for
    const float* chart;  // [80] the table's broken line, see cpu_step.chart
    const int32_t* key;  // [3] of the noise of the codes
};

// Do work(i, mask) for each vector of n values
template <class Work> static INLINE void each(int n, Work work) {
    int i = 0;
    for (; (i + 1) * LANES <= n; i++) work(i, first_of(LANES));
    if (i * LANES < n) work(i, first_of(n - i * LANES));
}

// ---- Noise: rounding.noise_bits ---------------------------------------------------------------------------

static SHORT U mix(U h) {
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    return h ^ (h >> 16);
}

static inline U hash(U place, const int32_t* key) {
    return mix(mix(place + (uint32_t)key[2] + (uint32_t)key[0]) + (uint32_t)key[1]);
}

static inline U noise(const int32_t* key, int64_t at) { return hash(LANE + (uint32_t)at, key); }

static SHORT U further(U first) { return mix(first ^ 0x5BD1E995u); }

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
    F value = where(size < (1 << MANTISSA), of_int(size) * (F)smallest, normal);
    value = where(normal > Format::top, F{} + __builtin_nanf(""), value);
    return where(code > 0x7F, -value, value);
}

static inline int block_of(const Moment& m) { return m.bits == 8 ? 256 : 128; }

// 0 to 1 for each of n values from `at` on. By itself: a hash is a long chain, and many of them at once hide
// that.
static INLINE void draw_uniform(F* uniform, const Moment& m, int64_t at, int n) {
    U place = LANE + (uint32_t)at;
    for (int k = 0; k < n; k += LANES) {
        I bits = (I)(hash(place, m.key) & 0xFFFFFF);
        place += LANES;
        uniform[k / LANES] = of_int(bits) * 0x1p-24f;
    }
}

// Encode n values of one block, with zeros after the last one up to a whole vector
template <int MANTISSA, bool SIGN> static void encode_float8(const Moment& m, F* x, int64_t at, int n) {
    using Format = Float8<MANTISSA>;
    F most{}, uniform[BLOCK / LANES];
    for (int k = 0; k < n; k += LANES) {
        F size = (F)((I)x[k / LANES] & 0x7FFFFFFF);
        most = larger(where(size < INFINITE, size, F{}), most);
    }
    const float scale = largest(most) / Format::top;
    m.scales[at / block_of(m)] = scale;
    const float divisor = scale == 0 ? __builtin_inff() : scale;
    draw_uniform(uniform, m, at, n);
    each(n, [&](int i, Mask mask) ALWAYS {
        F y = x[i] / divisor - (x[i] - x[i]);  // NaN where x is not finite
        // above the smallest normal number; below it numbers lie as far apart as just above
        I exponent = (((I)y >> 23) & 0xFF) - (127 + Format::least);
        exponent = where(exponent < 0, I{}, exponent);
        F a_gap = (F)((127 + MANTISSA - Format::least - exponent) << 23);  // 1 / the gap between two numbers
        F exact = y * a_gap + uniform[i];
        I gaps = towards_zero(exact);
        gaps += (I)(of_int(gaps) > exact);  // down, where the conversion went up
        I code = (exponent << MANTISSA) + where(gaps < 0, -gaps, gaps);
        code = where(code > Format::code_of_top, I{} + Format::code_of_top, code);
        if (SIGN)
            code = where(gaps < 0, code | 0x80, code);
        else
            code = where(gaps > 0, code, where(x[i] > 0, I{} + 1, I{}));
        code = where(y == y, code, 0x7F | (((I)y >> 24) & 0x80));
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
            x[k / LANES] = where((F)((I)own & 0x7FFFFFFF) < INFINITE, own, F{});
        }
        return encode<BITS, SIGN>(m, x, at, n);
    }
    float most = largest(high), least = smallest(low);
    float scale = SIGN && least / m.table[0] > most ? least / m.table[0] : most;
    m.scales[at / block_of(m)] = scale;

    auto row = [&m](int i) { return sixteen(m.chart + i * 16); };
    const Sixteen value = row(0), next = row(1), first = row(2), rise = row(3);
    const Int16s slots = int16s(m.chart + 64);
    const float divisor = scale == 0 ? __builtin_inff() : scale;
    const int zero = (1 << BITS) / 2 - 1, least_above_zero = m.table[0] == 0;
    F uniform[BLOCK / LANES];
    draw_uniform(uniform, m, at, n);
    // which stretch: by the exponent, within which two more of them begin at most
    auto slot_of = [&](F y) ALWAYS {
        F size = (F)((I)y & 0x7FFFFFFF);
        I exponent = ((I)size >> 23) - 96;
        I slot = pick_int16(slots, where(exponent < 0, I{}, exponent));
        slot = one_more(slot, pick(next, slot), size, true);
        return one_more(slot, pick(next, slot), size, true);
    };
    I found[BLOCK / LANES];
    if (IN_PASSES)
        for (int k = 0; k < n; k += LANES) {
            x[k / LANES] = x[k / LANES] / divisor;
            found[k / LANES] = slot_of(x[k / LANES]);
        }
    each(n, [&](int i, Mask mask) ALWAYS {
        F y = IN_PASSES ? x[i] : x[i] / divisor;
        F size = (F)((I)y & 0x7FFFFFFF);
        I slot = IN_PASSES ? found[i] : slot_of(y);
        F exact = pick(first, slot) + (size - pick(value, slot)) * pick(rise, slot);

        I code = towards_zero(exact);
        code = one_more(code, uniform[i], exact - of_int(code), false);
        if (SIGN)
            code = where(y < 0, zero - code, zero + code);
        else
            code = where((y > 0) & (code == 0), I{} + least_above_zero, code);
        write_codes(m, BITS, at + i * LANES, mask, SIGN ? where(code < 0, I{}, code) : code);
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
