// What cpu_step.cpp asks of a CPU's vectors, in the words of AVX-512 and in those of AVX2 with FMA. GCC alone:
// LANES values are one of its vectors, (F) and (I) read the bits of one as the other, and `where ? a : b`
// picks by lane.

#include <cstdint>
#include <cstring>
#include <immintrin.h>

#define ALWAYS __attribute__((always_inline))
#define INLINE inline ALWAYS

#ifdef __AVX512F__

const int LANES = 16;
typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
const U LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Which values of a vector are meant: always the first ones
typedef __mmask16 Mask;
static inline Mask first_of(int count) { return count < LANES ? (1 << count) - 1 : -1; }
static inline F only(Mask mask, F x) { return (F)_mm512_maskz_mov_ps(mask, (__m512)x); }

// ---- Memory ----

static inline F read_fp32(const void* from, int64_t at, Mask mask) {
    return (F)_mm512_maskz_loadu_ps(mask, (const float*)from + at);
}

static inline I read_int16(const void* from, int64_t at, Mask mask) {
    return (I)_mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(mask, (const int16_t*)from + at));
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
static inline I pick_int16(Sixteen from, I at) {
    return (I)_mm512_maskz_permutexvar_epi16(0x55555555, (__m512i)at, (__m512i)from);
}

#else

const int LANES = 8;
typedef float F __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));
typedef uint32_t U __attribute__((vector_size(32)));
const U LANE = {0, 1, 2, 3, 4, 5, 6, 7};

// How many values of a vector are meant: the first ones
typedef int Mask;
static inline Mask first_of(int count) { return count < LANES ? count : LANES; }
static inline I lanes_of(Mask mask) { return (I)LANE < mask; }
static inline F only(Mask mask, F x) { return (F)((I)x & lanes_of(mask)); }

// ---- Memory ----

static inline F read_fp32(const void* from, int64_t at, Mask mask) {
    if (mask == LANES) return (F)_mm256_loadu_ps((const float*)from + at);
    return (F)_mm256_maskload_ps((const float*)from + at, (__m256i)lanes_of(mask));
}

static inline void write_fp32(void* to, int64_t at, Mask mask, F x) {
    if (mask == LANES) return _mm256_storeu_ps((float*)to + at, (__m256)x);
    _mm256_maskstore_ps((float*)to + at, (__m256i)lanes_of(mask), (__m256)x);
}

// The first bytes of memory, and zeros after them; and back
static INLINE __m128i read_some(const void* from, int bytes, int all) {
    __m128i found = _mm_setzero_si128();
    if (bytes == all)
        std::memcpy(&found, from, all);
    else
        std::memcpy(&found, from, bytes);
    return found;
}

static INLINE void write_some(void* to, int bytes, int all, __m128i x) {
    if (bytes == all)
        std::memcpy(to, &x, all);
    else
        std::memcpy(to, &x, bytes);
}

// Eight numbers that fit into 16 bits without a sign
static inline __m128i narrowed(U x) {
    return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
}

static inline I read_int16(const void* from, int64_t at, Mask mask) {
    return (I)_mm256_cvtepi16_epi32(read_some((const int16_t*)from + at, 2 * mask, 16));
}

static inline void write_bf16(void* to, int64_t at, Mask mask, U x) {
    write_some((int16_t*)to + at, 2 * mask, 16, narrowed(x >> 16));
}

static inline void write_int16(void* to, int64_t at, Mask mask, I x) {
    write_some((int16_t*)to + at, 2 * mask, 16, narrowed((U)x & 0xFFFF));
}

static inline I read_bytes(const void* from, int64_t at, Mask mask) {
    return (I)_mm256_cvtepu8_epi32(read_some((const uint8_t*)from + at, mask, 8));
}

// Eight bytes of numbers, the largest possible in place of larger ones
static inline __m128i bytes_up_to(I x, int most) {
    U near = (U)_mm256_min_epu32((__m256i)x, _mm256_set1_epi32(most));
    __m128i halves = narrowed(near);
    return _mm_packus_epi16(halves, halves);
}

static inline void write_bytes(void* to, int64_t at, Mask mask, I x) {
    write_some((uint8_t*)to + at, mask, 8, bytes_up_to(x, 255));
}

static inline Mask bytes_of(Mask mask) { return (mask + 1) / 2; }

static inline I read_halves(const void* from, int64_t at, Mask mask) {
    __m128i wide = _mm_cvtepu8_epi16(read_some((const uint8_t*)from + at / 2, bytes_of(mask), 4));
    __m128i apart = _mm_or_si128(_mm_srli_epi16(wide, 4), _mm_slli_epi16(wide, 8));
    return (I)_mm256_cvtepu8_epi32(apart) & 15;
}

static inline void write_halves(void* to, int64_t at, Mask mask, I x) {
    __m128i narrow = bytes_up_to(x, 15);
    __m128i pairs = _mm_or_si128(_mm_slli_epi16(narrow, 4), _mm_srli_epi16(narrow, 8));
    pairs = _mm_and_si128(pairs, _mm_set1_epi16(255));
    write_some((uint8_t*)to + at / 2, bytes_of(mask), 4, _mm_packus_epi16(pairs, pairs));
}

// ---- Arithmetic ----

static inline F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
static inline F nearest_root(F x) { return (F)_mm256_sqrt_ps((__m256)x); }
static inline F root_of_mkl(F x) { return nearest_root(x); }  // that of a CPU with AVX-512: not asked for here
static inline bool any_nan(F x) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q));
}

static inline F larger(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
static inline F smaller(F a, F b) { return (F)_mm256_min_ps((__m256)a, (__m256)b); }
static INLINE I one_more(I x, F a, F b, bool equal) { return x - (equal ? (I)(a <= b) : (I)(a < b)); }

static inline float largest(F x) {
    float found = x[0];
    for (int i = 1; i < LANES; i++) found = x[i] > found ? x[i] : found;
    return found;
}

static inline float smallest(F x) { return -largest(-x); }

// ---- Tables ----

static inline F look_up(const float* table, I at) { return (F)_mm256_i32gather_ps(table, (__m256i)at, 4); }

struct Sixteen { F low, high; };
static inline Sixteen sixteen(const float* from) {
    return {read_fp32(from, 0, LANES), read_fp32(from, LANES, LANES)};
}


static inline F pick(Sixteen from, I at) {
    F low = (F)_mm256_permutevar8x32_ps((__m256)from.low, (__m256i)at);
    F high = (F)_mm256_permutevar8x32_ps((__m256)from.high, (__m256i)at);
    return at < LANES ? low : high;
}

static inline I pick_int16(Sixteen from, I at) {
    return ((I)pick(from, at >> 1) >> ((at & 1) << 4)) & 0xFFFF;
}

#endif
