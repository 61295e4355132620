// What cpu_step.cpp asks of a CPU's vectors, in the words of AVX-512 and in those of AVX2 with FMA. GCC alone:
// LANES values are one of its vectors, or two, (F) and (I) read the bits of one as the other, and
// `where(test, x, y)` picks by lane.

#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <type_traits>
#include <utility>

#define ALWAYS __attribute__((always_inline))
#define INLINE inline ALWAYS

#ifdef __AVX512F__

#define UNROLLED  // as GCC does by itself
#define SHORT inline
const bool IN_PASSES = false;

const int LANES = 16;
typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef std::pair<F, F> Two;
const U LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Which values of a vector are meant: always the first ones
typedef __mmask16 Mask;
static inline Mask first_of(int count) { return count < LANES ? (1 << count) - 1 : -1; }
static inline int room_of(int count) { return count; }  // places in vectors that hold so many values
static inline F only(Mask mask, F x) { return (F)_mm512_maskz_mov_ps(mask, (__m512)x); }
#define where(test, x, y) ((test) ? (x) : (y))  // no function: GCC knows a maximum by this form alone

// ---- Memory ----

static inline F read_fp32(const void* from, int64_t at, Mask mask) {
    return (F)_mm512_maskz_loadu_ps(mask, (const float*)from + at);
}

static inline I read_int16(const void* from, int64_t at, Mask mask) {
    return (I)_mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(mask, (const int16_t*)from + at));
}

static inline F read_bf16(const void* from, int64_t at, Mask mask) {
    return (F)(read_int16(from, at, mask) << 16);
}

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

static inline I read_bytes(const void* from, int64_t at, Mask mask) {
    return (I)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, (const uint8_t*)from + at));
}

// What does not fit into 8 bits becomes the largest that does
static inline void write_bytes(void* to, int64_t at, Mask mask, I x) {
    _mm_mask_storeu_epi8((uint8_t*)to + at, mask, _mm512_cvtusepi32_epi8((__m512i)x));
}

// Numbers of 4 bits: two to a byte, the first above the second
static inline Mask bytes_of(Mask mask) { return first_of((__builtin_popcount(mask) + 1) / 2); }

static inline I read_halves(const void* from, int64_t at, Mask mask) {
    __m128i pairs = _mm_maskz_loadu_epi8(bytes_of(mask), (const uint8_t*)from + at / 2);
    __m128i wide = _mm_cvtepu8_epi16(pairs);
    __m128i apart = _mm_or_si128(_mm_srli_epi16(wide, 4), _mm_slli_epi16(wide, 8));
    return (I)_mm512_cvtepu8_epi32(apart) & 15;
}

static inline void write_halves(void* to, int64_t at, Mask mask, I x) {
    __m128i narrow = _mm512_cvtepi32_epi8(_mm512_min_epu32((__m512i)x, _mm512_set1_epi32(15)));
    __m128i pairs = _mm_or_si128(_mm_slli_epi16(narrow, 4), _mm_srli_epi16(narrow, 8));
    _mm_mask_storeu_epi8((uint8_t*)to + at / 2, bytes_of(mask), _mm_cvtepi16_epi8(pairs));
}

// ---- Arithmetic ----

static inline F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
static inline F fnma(F a, F b, F c) { return (F)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)c); }
static inline F nearest_root(F x) { return (F)_mm512_sqrt_ps((__m512)x); }
static inline bool any_nan(F x) { return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q); }
static inline F of_int(I x) { return __builtin_convertvector(x, F); }
static inline I towards_zero(F x) { return __builtin_convertvector(x, I); }
// b where one of them is NaN
static inline F larger(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
static inline F smaller(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
static inline float largest(F x) { return _mm512_reduce_max_ps((__m512)x); }
static inline float smallest(F x) { return _mm512_reduce_min_ps((__m512)x); }

// x, and one more where a < b, or where they are equal if that counts
static INLINE I one_more(I x, F a, F b, bool equal) {
    __mmask16 where = equal ? _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LE_OQ)
                            : _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ);
    return (I)_mm512_mask_add_epi32((__m512i)x, where, (__m512i)x, _mm512_set1_epi32(1));
}

// The root as MKL takes it on an Intel CPU with AVX-512: an estimate of 1 / sqrt(x), good to 14 bits, and one
// step of Newton's. Small values are moved by an even power of two first.
static inline F root_of_mkl(F x) {
    const __m512 up = _mm512_set1_ps(0x1p126f), down = _mm512_set1_ps(0x1p-63f);
    __mmask16 small = _mm512_cmplt_ps_mask((__m512)x, _mm512_set1_ps(0x1p-60f));
    F moved = (F)_mm512_mask_mul_ps((__m512)x, small, (__m512)x, up);
    F inverse = (F)_mm512_rsqrt14_ps((__m512)moved);
    F near = moved * inverse;
    F root = fma(fnma(near, near, moved), 0.5f * inverse, near);
    root = (F)_mm512_mask_mul_ps((__m512)root, small, (__m512)root, down);
    return (x == 0) | (x == __builtin_inff()) ? x : root;
}

// ---- Tables ----

static inline F look_up(const float* table, I at) { return (F)_mm512_i32gather_ps((__m512i)at, table, 4); }

// Sixteen values, of which each lane may take one
typedef F Sixteen;
static inline Sixteen sixteen(const float* from) { return (F)_mm512_loadu_ps(from); }
static inline F pick(Sixteen from, I at) { return (F)_mm512_permutexvar_ps((__m512i)at, (__m512)from); }

// Of 32 numbers of 16 bits
typedef Sixteen Int16s;
static inline Int16s int16s(const float* from) { return sixteen(from); }
static inline I pick_int16(Int16s from, I at) {
    return (I)_mm512_maskz_permutexvar_epi16(0x55555555, (__m512i)at, (__m512i)from);
}

#else

#define UNROLLED _Pragma("GCC unroll 2")
#define SHORT INLINE  // by force: a call would pass vectors through memory
// Whether a loop with a long chain of operations is two, of which the second reads what the first has found:
// more of these chains fit into what a CPU looks ahead. Not measured on AVX-512.
const bool IN_PASSES = true;

const int LANES = 16;
typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));

// Two vectors as one of sixteen values: two chains of operations side by side, and half as many reads and
// writes. The first holds values 0 to 3 and 8 to 11, the second the others, as 16-bit numbers unpack.
template <class V> struct Pair {
    V a, b;
    template <class W> explicit operator Pair<W>() const { return {(W)a, (W)b}; }  // the same bits
    Pair operator-() const { return {-a, -b}; }
    template <class T> Pair& operator+=(T x) { return *this = *this + x; }
};
typedef Pair<F8> F;
typedef Pair<I8> I;
typedef Pair<U8> U;
typedef Pair<F> Two;  // a std::pair would be made by a call

template <class V> using Lane = std::decay_t<decltype(V()[0])>;
template <class T> using IfNumber = std::enable_if_t<std::is_arithmetic_v<T>>;

// x op y for vectors, and where one of them is a number
#define LIFTED(op)                                                                                      \
    template <class V> static INLINE auto operator op(Pair<V> x, Pair<V> y) {                           \
        return Pair<decltype(x.a op y.a)>{x.a op y.a, x.b op y.b};                                      \
    }                                                                                                   \
    template <class V, class T, class = IfNumber<T>> static INLINE auto operator op(Pair<V> x, T y) {   \
        return Pair<decltype(x.a op x.a)>{x.a op (Lane<V>)y, x.b op (Lane<V>)y};                        \
    }                                                                                                   \
    template <class V, class T, class = IfNumber<T>> static INLINE auto operator op(T x, Pair<V> y) {   \
        return Pair<decltype(y.a op y.a)>{(Lane<V>)x op y.a, (Lane<V>)x op y.b};                        \
    }
LIFTED(+) LIFTED(-) LIFTED(*) LIFTED(/) LIFTED(&) LIFTED(|) LIFTED(^) LIFTED(<<) LIFTED(>>)
LIFTED(<) LIFTED(<=) LIFTED(>) LIFTED(>=) LIFTED(==)

template <class V> static INLINE Pair<V> where(I test, Pair<V> x, Pair<V> y) {
    return {test.a ? x.a : y.a, test.b ? x.b : y.b};
}

const U LANE = {{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}};

// How many values of a vector are meant: the first ones
typedef int Mask;
static inline Mask first_of(int count) { return count < LANES ? count : LANES; }
static inline int room_of(int count) { return (count + LANES - 1) / LANES * LANES; }  // they lie in any place
static inline F only(Mask mask, F x) { return (F)((I)x & ((I)LANE < mask)); }

// ---- Memory ----

// The first bytes of memory, and zeros after them; and back
template <class V> static INLINE V read_some(const void* from, int bytes) {
    V found{};
    if (bytes == sizeof found)
        std::memcpy(&found, from, sizeof found);
    else
        std::memcpy(&found, from, bytes);
    return found;
}

template <class V> static INLINE void write_some(void* to, int bytes, V x) {
    if (bytes == sizeof x)
        std::memcpy(to, &x, sizeof x);
    else
        std::memcpy(to, &x, bytes);
}

static INLINE F read_fp32(const void* from, int64_t at, Mask mask) {
    const float* place = (const float*)from + at;
    F8 first = read_some<F8>(place, mask < 8 ? 4 * mask : 32), last{};
    if (mask > 8) last = read_some<F8>(place + 8, 4 * mask - 32);
    return {_mm256_permute2f128_ps(first, last, 0x20), _mm256_permute2f128_ps(first, last, 0x31)};
}

static INLINE void write_fp32(void* to, int64_t at, Mask mask, F x) {
    float* place = (float*)to + at;
    write_some(place, mask < 8 ? 4 * mask : 32, (F8)_mm256_permute2f128_ps(x.a, x.b, 0x20));
    if (mask > 8) write_some(place + 8, 4 * mask - 32, (F8)_mm256_permute2f128_ps(x.a, x.b, 0x31));
}

// Sixteen numbers of 16 bits in order, and as the upper halves of others
static INLINE __m256i read_words(const void* from, int64_t at, Mask mask) {
    return read_some<__m256i>((const int16_t*)from + at, 2 * mask);
}

static INLINE U upper_halves(__m256i words) {
    __m256i zero = _mm256_setzero_si256();
    return {(U8)_mm256_unpacklo_epi16(zero, words), (U8)_mm256_unpackhi_epi16(zero, words)};
}

static INLINE __m256i words_of(U x) { return _mm256_packus_epi32((__m256i)x.a, (__m256i)x.b); }  // below 2^16

static INLINE F read_bf16(const void* from, int64_t at, Mask mask) {
    return (F)upper_halves(read_words(from, at, mask));
}

static INLINE I read_int16(const void* from, int64_t at, Mask mask) {
    return (I)upper_halves(read_words(from, at, mask)) >> 16;
}

static INLINE void write_bf16(void* to, int64_t at, Mask mask, U x) {
    write_some((int16_t*)to + at, 2 * mask, words_of(x >> 16));
}

static INLINE void write_int16(void* to, int64_t at, Mask mask, I x) {
    write_some((int16_t*)to + at, 2 * mask, words_of((U)x & 0xFFFF));
}

static INLINE I of_bytes(__m128i x) { return (I)(upper_halves(_mm256_cvtepu8_epi16(x)) >> 16); }

// Sixteen bytes of numbers from -2^15 to 2^15 - 1: the nearest that fit
static INLINE __m128i bytes_near(__m256i words) {
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

static inline I read_bytes(const void* from, int64_t at, Mask mask) {
    return of_bytes(read_some<__m128i>((const uint8_t*)from + at, mask));
}

static inline void write_bytes(void* to, int64_t at, Mask mask, I x) {
    write_some((uint8_t*)to + at, mask, bytes_near(words_of((U)x)));
}

static inline I read_halves(const void* from, int64_t at, Mask mask) {
    int64_t pairs = read_some<int64_t>((const uint8_t*)from + at / 2, (mask + 1) / 2);
    __m128i wide = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(pairs));
    __m128i apart = _mm_or_si128(_mm_srli_epi16(wide, 4), _mm_slli_epi16(wide, 8));
    return of_bytes(_mm_and_si128(apart, _mm_set1_epi8(15)));
}

static inline void write_halves(void* to, int64_t at, Mask mask, I x) {
    __m128i bytes = bytes_near(_mm256_min_epu16(words_of((U)x), _mm256_set1_epi16(15)));
    __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x0110));  // 16 times the first, and the second
    int64_t whole = _mm_cvtsi128_si64(_mm_packus_epi16(pairs, pairs));
    write_some((uint8_t*)to + at / 2, (mask + 1) / 2, whole);
}

// ---- Arithmetic ----

static inline F fma(F a, F b, F c) {
    return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)};
}
static inline F nearest_root(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
static inline F root_of_mkl(F x) { return nearest_root(x); }  // that of a CPU with AVX-512: not asked for here
static inline bool any_nan(F x) { return _mm256_movemask_ps(_mm256_cmp_ps(x.a, x.b, _CMP_UNORD_Q)); }
static inline F of_int(I x) { return {_mm256_cvtepi32_ps((__m256i)x.a), _mm256_cvtepi32_ps((__m256i)x.b)}; }
static inline I towards_zero(F x) { return {(I8)_mm256_cvttps_epi32(x.a), (I8)_mm256_cvttps_epi32(x.b)}; }
static inline F larger(F a, F b) { return {_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)}; }
static inline F smaller(F a, F b) { return {_mm256_min_ps(a.a, b.a), _mm256_min_ps(a.b, b.b)}; }
static INLINE I one_more(I x, F a, F b, bool equal) { return x - (equal ? a <= b : a < b); }

static inline float largest(F x) {
    F8 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

static inline float smallest(F x) { return -largest(-x); }

// ---- Tables ----

static inline F look_up(const float* table, I at) {
    return {_mm256_i32gather_ps(table, (__m256i)at.a, 4), _mm256_i32gather_ps(table, (__m256i)at.b, 4)};
}

struct Sixteen { F8 low, high; };
static inline Sixteen sixteen(const float* from) {
    return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}

static INLINE F8 pick(Sixteen from, I8 at) {
    F8 low = _mm256_permutevar8x32_ps(from.low, (__m256i)at);
    F8 high = _mm256_permutevar8x32_ps(from.high, (__m256i)at);
    return _mm256_blendv_ps(low, high, (F8)(at << 28));  // by the bit of 8
}
static inline F pick(Sixteen from, I at) { return {pick(from, at.a), pick(from, at.b)}; }

// Of 32 numbers of 16 bits that fit into 8
struct Int16s { __m256i low, high; };
static inline Int16s int16s(const float* from) {
    auto bytes = [&](const float* from) { return bytes_near(_mm256_loadu_si256((const __m256i*)from)); };
    return {_mm256_broadcastsi128_si256(bytes(from)), _mm256_broadcastsi128_si256(bytes(from + 8))};
}

static INLINE I8 pick_int16(Int16s from, I8 at) {  // a place with its upper bit set gives zero
    __m256i low = _mm256_shuffle_epi8(from.low, (__m256i)(at + (int)0x80808070));
    __m256i high = _mm256_shuffle_epi8(from.high, (__m256i)(at + (int)0x808080F0));
    return (I8)_mm256_or_si256(low, high);
}
static inline I pick_int16(Int16s from, I at) { return {pick_int16(from, at.a), pick_int16(from, at.b)}; }

#endif
