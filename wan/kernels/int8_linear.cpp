// Both ends of an int8 linear layer for CPUs with AVX-512, compiled by `int8_linear.py`.
//
// Tensors are contiguous but for `out`; bfloat16 is passed as 16-bit integers. All arithmetic is that of
// PyTorch's float32 operations, in the same order, so that bits are equal.

#include <immintrin.h>

#include <cmath>
#include <cstdint>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")

namespace {

constexpr int64_t LANES = 16;  // float32 values of a vector

inline __mmask16 make_mask(int64_t remaining) {
  return remaining < LANES ? (1 << remaining) - 1 : 0xffff;
}

inline __m512 load(const float* x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }

inline __m512 load(const uint16_t* x, __mmask16 mask) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

inline __m512i round_to_bfloat16(__m512 x) {  // half to even; the bits are the lower halves
  const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
  const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), is_odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_set1_epi32(rounded, is_nan, 0x7fc00000);
  return _mm512_srli_epi32(rounded, 16);
}

inline void store(float* out, __mmask16 mask, __m512 x, const uint16_t*) {
  _mm512_mask_storeu_ps(out, mask, x);
}

inline void store(uint16_t* out, __mmask16 mask, __m512 x, const uint16_t* table) {
  __m512i bits = round_to_bfloat16(x);
  if (table) bits = _mm512_i32gather_epi32(bits, table, sizeof(*table));  // and the next value
  _mm256_mask_storeu_epi16(out, mask, _mm512_cvtepi32_epi16(bits));
}

template <typename T>
void quantize(const T* x, int64_t rows, int64_t columns, int8_t* values, float* scales,
              int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    const T* inputs = x + row * columns;
    __m512 largest = _mm512_setzero_ps();
    bool has_nan = false;
    for (int64_t i = 0; i < columns; i += LANES) {
      const __m512 value = load(inputs + i, make_mask(columns - i));
      largest = _mm512_max_ps(_mm512_abs_ps(value), largest);
      has_nan |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q) != 0;
    }
    const float scale = has_nan ? NAN : _mm512_reduce_max_ps(largest) / 127;
    scales[row] = scale == 0 ? 1 : scale;
    const __m512 divisor = _mm512_set1_ps(scales[row]);
    for (int64_t i = 0; i < columns; i += LANES) {
      const __mmask16 mask = make_mask(columns - i);
      const __m512 quotient = _mm512_div_ps(load(inputs + i, mask), divisor);
      const __m512i rounded = _mm512_cvtps_epi32(quotient);  // half to even
      _mm512_mask_cvtepi32_storeu_epi8(values + row * columns + i, mask, rounded);
    }
  }
}

template <typename T>
void scale_sums(const int32_t* sums, const float* weight_scales, const float* token_scales,
                const float* bias, int64_t rows, int64_t columns, T* out, int64_t stride,
                const uint16_t* table, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    const __m512 token_scale = _mm512_set1_ps(token_scales[row]);
    for (int64_t i = 0; i < columns; i += LANES) {
      const __mmask16 mask = make_mask(columns - i);
      const __m512i sum = _mm512_maskz_loadu_epi32(mask, sums + row * columns + i);
      __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), load(weight_scales + i, mask));
      y = _mm512_mul_ps(y, token_scale);
      if (bias) y = _mm512_add_ps(y, load(bias + i, mask));
      store(out + row * stride + i, mask, y, table);
    }
  }
}

}  // namespace

extern "C" {

// Quantizes each row: scale = max|x| / 127, 1 for zeros, NaN with NaN; values = round(x / scale).
void quantize_rows(const void* x, int is_bfloat16, int64_t rows, int64_t columns, int8_t* values,
                   float* scales, int threads) {
  if (is_bfloat16)
    quantize((const uint16_t*)x, rows, columns, values, scales, threads);
  else
    quantize((const float*)x, rows, columns, values, scales, threads);
}

// Computes ((sum * weight scale) * token scale) + bias; the bias may be null. The rows of `out` lie
// `stride` values apart. `table` has a function of all bfloat16 values and one more value, or is
// null; the function is applied to results in bfloat16.
void scale_products(const int32_t* sums, const float* weight_scales, const float* token_scales,
                    const float* bias, int64_t rows, int64_t columns, void* out, int64_t stride,
                    const uint16_t* table, int is_bfloat16, int threads) {
  if (is_bfloat16)
    scale_sums(sums, weight_scales, token_scales, bias, rows, columns, (uint16_t*)out, stride,
               table, threads);
  else
    scale_sums(sums, weight_scales, token_scales, bias, rows, columns, (float*)out, stride, table,
               threads);
}
}
