// Attention in bfloat16 for CPUs with AVX512-BF16, compiled by `avx512_attention.py`.
//
// Legend: B batch, S tokens, N heads, D head size.
//
// Each thread computes blocks of QUERIES rows of one head: the scores of KEYS keys at a time, an
// update of the running softmax (Milakov and Gimelshein 2018, as in FlashAttention), and the sum of
// the values. Both products are computed in tiles of ROWS x COLUMNS float32 sums, which stay in
// registers. `vdpbf16ps` adds two products to each sum, so keys and values are packed in pairs:
//
//   keys    [tile of COLUMNS keys][pair of channels][key][2]
//   values  [tile of COLUMNS channels][pair of keys][channel][2]
//
// The result of a row does not depend on the other rows and heads of a call.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

namespace {

using bfloat16 = uint16_t;

constexpr int LANES = 16;              // float32 values of a register
constexpr int ROWS = 6, VECTORS = 4;   // 24 of 32 registers hold sums
constexpr int COLUMNS = LANES * VECTORS;
constexpr int QUERIES = 8 * ROWS;
constexpr int KEYS = 512;
constexpr int MAX_HEAD = 256;

struct Strides {  // of a tensor [B,S,N,D], whose channels are contiguous
  int64_t batch, token, head;
};

struct Workspace {  // of a thread
  alignas(64) bfloat16 queries[QUERIES * MAX_HEAD];
  alignas(64) float scores[QUERIES * KEYS];
  alignas(64) bfloat16 weights[QUERIES * KEYS];
  alignas(64) float sums[QUERIES * MAX_HEAD];
  float largest[QUERIES], total[QUERIES];  // of the scores, of the weights
};

int64_t divide_up(int64_t number, int64_t divisor) { return (number + divisor - 1) / divisor; }

// Computes c = a b, or c += a b; a [ROWS, 2 * pairs], b [pairs][COLUMNS][2], c [ROWS, COLUMNS].
template <bool ADD>
inline void multiply_tile(const bfloat16* a, int64_t a_stride, const bfloat16* b, int64_t pairs,
                          float* c, int64_t c_stride) {
  __m512 sum[ROWS][VECTORS];
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j)
      sum[i][j] = ADD ? _mm512_loadu_ps(c + i * c_stride + LANES * j) : _mm512_setzero_ps();
  for (int64_t pair = 0; pair < pairs; ++pair) {
    __m512bh column[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j)
      column[j] = (__m512bh)_mm512_loadu_si512(b + 2 * (pair * COLUMNS + LANES * j));
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i) {
      int32_t two_values;
      std::memcpy(&two_values, a + i * a_stride + 2 * pair, sizeof two_values);
      const __m512bh row = (__m512bh)_mm512_set1_epi32(two_values);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], row, column[j]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) _mm512_storeu_ps(c + i * c_stride + LANES * j, sum[i][j]);
}

// Computes 2^x for x <= 0 with a relative error of 2e-7; NaN stays NaN, which `max` would replace
// if it were its first argument.
inline __m512 compute_exp2(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-150.f), x);
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(1.5403530e-4f);  // ln(2)^k / k! for k = 6, ..., 0
  for (float coefficient : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f,
                            6.9314718e-1f, 1.f})
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(coefficient));
  return _mm512_scalef_ps(y, whole);
}

inline void store_bfloat16(bfloat16* out, __m512 x) {
  _mm256_storeu_si256((__m256i*)out, (__m256i)_mm512_cvtneps_pbh(x));
}

// Packs `count` of COLUMNS keys of a head, and zeros for the others.
void pack_keys(const bfloat16* k, int64_t stride, int64_t count, int64_t dim, bfloat16* out) {
  for (int64_t key = 0; key < COLUMNS; ++key)
    for (int64_t pair = 0; pair < dim / 2; ++pair) {
      bfloat16* two_values = out + 2 * (pair * COLUMNS + key);
      if (key < count)
        std::memcpy(two_values, k + key * stride + 2 * pair, 2 * sizeof(bfloat16));
      else
        two_values[0] = two_values[1] = 0;
    }
}

// Packs the values of COLUMNS keys, with zeros after `count` of them. pairs: of all keys; out: at
// the first pair of these keys.
void pack_values(const bfloat16* v, int64_t stride, int64_t count, int64_t dim, int64_t pairs,
                 bfloat16* out) {
  for (int64_t key = 0; key < COLUMNS; key += 2)
    for (int64_t channel = 0; channel < dim; ++channel) {
      const int64_t tile = channel / COLUMNS, column = channel % COLUMNS;
      bfloat16* two_values = out + 2 * ((tile * pairs + key / 2) * COLUMNS + column);
      two_values[0] = key < count ? v[key * stride + channel] : 0;
      two_values[1] = key + 1 < count ? v[(key + 1) * stride + channel] : 0;
    }
}

// Converts a row of scores to weights, relative to the largest score so far.
void update_softmax(Workspace& work, int64_t row, int64_t keys, int64_t width, int64_t dim,
                    float factor) {
  float* scores = work.scores + row * KEYS;
  std::fill(scores + keys, scores + width, -FLT_MAX);  // keys that pad the last tile
  __m512 largest = _mm512_loadu_ps(scores);
  for (int64_t i = LANES; i < width; i += LANES)
    largest = _mm512_max_ps(largest, _mm512_loadu_ps(scores + i));
  const float before = work.largest[row];
  const float now = std::max(before, _mm512_reduce_max_ps(largest) * factor);
  __m512 total = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += LANES) {
    const __m512 score = _mm512_loadu_ps(scores + i);
    const __m512 weight = compute_exp2(
        _mm512_fmadd_ps(score, _mm512_set1_ps(factor), _mm512_set1_ps(-now)));
    total = _mm512_add_ps(total, weight);
    store_bfloat16(work.weights + row * KEYS + i, weight);
  }
  const float rescale = std::exp2(before - now);
  work.total[row] = work.total[row] * rescale + _mm512_reduce_add_ps(total);
  work.largest[row] = now;
  if (rescale == 1.f) return;
  float* sums = work.sums + row * dim;
  for (int64_t i = 0; i < dim; i += LANES)
    _mm512_storeu_ps(sums + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), _mm512_set1_ps(rescale)));
}

// Computes `rows` queries of a head. factor: of the scores, as exponents of two.
void attend_rows(Workspace& work, const bfloat16* q, int64_t q_stride, int64_t rows,
                 const bfloat16* keys, const bfloat16* values, int64_t k_len, int64_t dim,
                 float factor, bfloat16* out, int64_t out_stride, float* lse) {
  const int64_t tiles = divide_up(rows, ROWS), pairs = divide_up(k_len, COLUMNS) * COLUMNS / 2;
  std::memset(work.queries, 0, tiles * ROWS * dim * sizeof(bfloat16));
  for (int64_t i = 0; i < rows; ++i)
    std::memcpy(work.queries + i * dim, q + i * q_stride, dim * sizeof(bfloat16));
  std::fill_n(work.sums, tiles * ROWS * dim, 0.f);
  std::fill_n(work.largest, QUERIES, -FLT_MAX);
  std::fill_n(work.total, QUERIES, 0.f);
  for (int64_t first = 0; first < k_len; first += KEYS) {
    const int64_t count = std::min<int64_t>(KEYS, k_len - first);
    const int64_t width = divide_up(count, COLUMNS) * COLUMNS;
    for (int64_t key = 0; key < width; key += COLUMNS)
      for (int64_t row = 0; row < tiles * ROWS; row += ROWS)
        multiply_tile<false>(work.queries + row * dim, dim, keys + (first + key) * dim, dim / 2,
                             work.scores + row * KEYS + key, KEYS);
    for (int64_t row = 0; row < rows; ++row)
      update_softmax(work, row, count, width, dim, factor);
    for (int64_t channel = 0; channel < dim; channel += COLUMNS)
      for (int64_t row = 0; row < tiles * ROWS; row += ROWS)
        multiply_tile<true>(work.weights + row * KEYS, KEYS,
                            values + 2 * (channel * pairs + first / 2 * COLUMNS), width / 2,
                            work.sums + row * dim + channel, dim);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const __m512 scale = _mm512_set1_ps(1.f / work.total[i]);
    for (int64_t channel = 0; channel < dim; channel += LANES)
      store_bfloat16(out + i * out_stride + channel,
                     _mm512_mul_ps(_mm512_loadu_ps(work.sums + i * dim + channel), scale));
    lse[i] = (work.largest[i] + std::log2(work.total[i])) * 0.69314718f;
  }
}

}  // namespace

extern "C" int64_t count_workspace_bytes() { return sizeof(Workspace); }

// Computes softmax(q k^T * scale) v and the log-sum-exp of the scaled scores.
//
// q, k, v, out: [B,S,N,D], D a multiple of COLUMNS up to MAX_HEAD. lse: [B,N,S]. strides: of these
// four. packed: for the keys and values of `group` heads, which are computed between two barriers
// of the threads, each of a multiple of COLUMNS tokens. workspaces: one per thread. Both begin at
// multiples of 64 bytes.
extern "C" void attend(const bfloat16* q, const bfloat16* k, const bfloat16* v, bfloat16* out,
                       float* lse, const Strides* strides, bfloat16* packed, Workspace* workspaces,
                       int64_t batch, int64_t q_len, int64_t k_len, int64_t heads, int64_t dim,
                       int64_t group, float scale, int threads) {
  const Strides &of_q = strides[0], &of_k = strides[1], &of_v = strides[2], &of_out = strides[3];
  const int64_t tiles = divide_up(k_len, COLUMNS), size = tiles * COLUMNS * dim;
  const auto offset = [heads](const Strides& stride, int64_t index) {
    return index / heads * stride.batch + index % heads * stride.head;
  };
#pragma omp parallel num_threads(threads)
  for (int64_t begin = 0; begin < batch * heads; begin += group) {
    const int64_t end = std::min(batch * heads, begin + group);
#pragma omp for collapse(2) schedule(static)
    for (int64_t index = begin; index < end; ++index)
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = tile * COLUMNS, count = std::min<int64_t>(COLUMNS, k_len - first);
        bfloat16 *keys = packed + 2 * (index - begin) * size, *values = keys + size;
        pack_keys(k + offset(of_k, index) + first * of_k.token, of_k.token, count, dim,
                  keys + first * dim);
        pack_values(v + offset(of_v, index) + first * of_v.token, of_v.token, count, dim,
                    tiles * COLUMNS / 2, values + first * COLUMNS);
      }
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t index = begin; index < end; ++index)
      for (int64_t first = 0; first < q_len; first += QUERIES) {
        const bfloat16 *keys = packed + 2 * (index - begin) * size, *values = keys + size;
        attend_rows(workspaces[omp_get_thread_num()],
                    q + offset(of_q, index) + first * of_q.token, of_q.token,
                    std::min<int64_t>(QUERIES, q_len - first), keys, values, k_len, dim,
                    scale * 1.44269504f, out + offset(of_out, index) + first * of_out.token,
                    of_out.token, lse + index * q_len + first);
      }
  }
}
