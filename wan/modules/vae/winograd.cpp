// Convolutions in float32 for CPUs with AVX-512, compiled by `winograd.py`.
//
// Legend: C input channels, O output channels, T kernel size in time, F frames, H W rows/columns.
//
// Winograd's F(2x2, 3x3) (Lavin and Gray 2016) computes a tile of 2x2 outputs from 4x4 inputs with
// 4x4 products for a pair of channels instead of 36. After nearest-neighbor upsampling by two, the
// inputs of a tile are the 3x3 neighborhood of a pixel, one of the four differences is zero, and
// 3x3 products suffice. SIDE is 4 or 3.
//
// Each thread computes PANEL tiles of a frame at a time: it transforms their inputs, multiplies by
// the weights at each of the SIDE * SIDE positions, and transforms the sums. Sums over time and
// channels are sums of SUMMANDS products each, which halves rounding errors. Their order is the same
// everywhere, so that a result depends neither on the other tiles of a call nor on the threads.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>

#pragma GCC target("avx512f")

namespace {

using Vector = __m512;

constexpr int LANES = 16;             // float32 values of a vector
constexpr int ROWS = 8, VECTORS = 3;  // 24 of 32 registers hold sums
constexpr int PANEL = LANES * VECTORS;
constexpr int64_t SUMMANDS = 96;

struct Image {  // one channel of one frame; columns are contiguous
  float* data;
  int64_t stride, rows, columns;
};

struct Video {  // a pointer to each frame [channels, rows, columns], or null where it is zeros
  float* const* frames;
  int64_t channel_stride, stride, rows, columns;
  Image at(int64_t channel, int64_t frame) const {
    return {frames[frame] + channel * channel_stride, stride, rows, columns};
  }
};

struct Sizes {
  int64_t channels, out_channels, time, frames, tile_rows, tile_columns;
  int64_t num_tiles() const { return tile_rows * tile_columns; }
  int64_t depth() const { return time * channels; }  // summands
  int64_t rows() const { return (out_channels + ROWS - 1) / ROWS * ROWS; }  // of packed weights
};

// Loads the inputs of LANES tiles, which are numbered row by row; pixels outside are zeros.
template <int SIDE>
inline void load_inputs(const Image& x, const Sizes& sizes, int64_t first, Vector d[SIDE][SIDE]) {
  constexpr int STEP = SIDE - 2;  // distance of two tiles
  const int64_t top = STEP * (first / sizes.tile_columns), column = first % sizes.tile_columns;
  const int64_t left = STEP * column, right = left + STEP * LANES + 2;
  if (column + LANES <= sizes.tile_columns && top + SIDE <= x.rows && right <= x.columns) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int i = 0; i < SIDE; ++i) {
      const float* p = x.data + (top + i) * x.stride + left;
      for (int j = 0; j < SIDE; j += STEP) {
        const Vector a = _mm512_loadu_ps(p + j);
        if (STEP == 1) {
          d[i][j] = a;
        } else {
          const Vector b = _mm512_loadu_ps(p + j + LANES);
          d[i][j] = _mm512_permutex2var_ps(a, even, b);
          d[i][j + 1] = _mm512_permutex2var_ps(a, odd, b);
        }
      }
    }
    return;
  }
  alignas(64) float values[SIDE][SIDE][LANES] = {};
  const int64_t end = std::min<int64_t>(first + LANES, sizes.num_tiles());
  for (int64_t tile = first; tile < end; ++tile) {
    const int64_t h = STEP * (tile / sizes.tile_columns), w = STEP * (tile % sizes.tile_columns);
    for (int64_t i = 0; i < std::min<int64_t>(SIDE, x.rows - h); ++i)
      for (int64_t j = 0; j < std::min<int64_t>(SIDE, x.columns - w); ++j)
        values[i][j][tile - first] = x.data[(h + i) * x.stride + w + j];
  }
  for (int i = 0; i < SIDE; ++i)
    for (int j = 0; j < SIDE; ++j) d[i][j] = _mm512_load_ps(values[i][j]);
}

// Writes the 2x2 outputs of LANES tiles.
inline void store_outputs(const Image& out, const Sizes& sizes, int64_t first, Vector y[2][2]) {
  const int64_t top = 2 * (first / sizes.tile_columns), column = first % sizes.tile_columns;
  const int64_t right = 2 * (column + LANES);
  if (column + LANES <= sizes.tile_columns && top + 2 <= out.rows && right <= out.columns) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int i = 0; i < 2; ++i) {
      float* p = out.data + (top + i) * out.stride + 2 * column;
      _mm512_storeu_ps(p, _mm512_permutex2var_ps(y[i][0], low, y[i][1]));
      _mm512_storeu_ps(p + LANES, _mm512_permutex2var_ps(y[i][0], high, y[i][1]));
    }
    return;
  }
  alignas(64) float values[2][2][LANES];
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) _mm512_store_ps(values[i][j], y[i][j]);
  const int64_t end = std::min<int64_t>(first + LANES, sizes.num_tiles());
  for (int64_t tile = first; tile < end; ++tile) {
    const int64_t h = 2 * (tile / sizes.tile_columns), w = 2 * (tile % sizes.tile_columns);
    for (int64_t i = 0; i < std::min<int64_t>(2, out.rows - h); ++i)
      for (int64_t j = 0; j < std::min<int64_t>(2, out.columns - w); ++j)
        out.data[(h + i) * out.stride + w + j] = values[i][j][tile - first];
  }
}

// Transforms one axis of inputs: the differences of Winograd, or those after upsampling.
template <int SIDE>
inline void transform_inputs(const Vector* d, int step, Vector u[SIDE]) {
  const Vector first = d[0], second = d[step], third = d[2 * step];
  if (SIDE == 4) {
    u[0] = _mm512_sub_ps(first, third);
    u[1] = _mm512_add_ps(second, third);
    u[2] = _mm512_sub_ps(third, second);
    u[3] = _mm512_sub_ps(second, d[3 * step]);
  } else {
    u[0] = _mm512_sub_ps(first, second);
    u[1] = second;
    u[2] = _mm512_sub_ps(second, third);
  }
}

// Transforms one axis of sums to two outputs.
template <int SIDE>
inline void transform_sums(const Vector* m, int step, Vector y[2]) {
  const Vector first = m[0], second = m[step], last = m[(SIDE - 1) * step];
  y[0] = _mm512_add_ps(first, second);
  y[1] = _mm512_sub_ps(second, last);
  if (SIDE == 4) {
    y[0] = _mm512_add_ps(y[0], m[2 * step]);
    y[1] = _mm512_sub_ps(y[1], m[2 * step]);
  }
}

// Transforms one axis of the three weights of ROWS output channels.
template <int SIDE>
inline void transform_weights(const __m256* g, int step, __m256 u[SIDE]) {
  const __m256 first = g[0], second = g[step], last = g[2 * step];
  const __m256 outer = _mm256_add_ps(first, last), half = _mm256_set1_ps(0.5f);
  u[0] = first, u[SIDE - 1] = last;
  u[1] = _mm256_add_ps(outer, second);
  if (SIDE == 4) {
    u[1] = _mm256_mul_ps(u[1], half);
    u[2] = _mm256_mul_ps(_mm256_sub_ps(outer, second), half);
  }
}

// Computes sums[ROWS][PANEL] = weights[depth][ROWS]^T inputs[depth][PANEL], or adds to them.
inline void multiply(const float* weights, const float* inputs, int64_t depth, bool add,
                     float* sums) {
  Vector sum[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 3
    for (int j = 0; j < VECTORS; ++j) sum[i][j] = _mm512_setzero_ps();
  for (int64_t k = 0; k < depth; ++k, weights += ROWS, inputs += PANEL) {
    Vector x[VECTORS];
#pragma GCC unroll 3
    for (int j = 0; j < VECTORS; ++j) x[j] = _mm512_loadu_ps(inputs + LANES * j);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const Vector weight = _mm512_set1_ps(weights[i]);
#pragma GCC unroll 3
      for (int j = 0; j < VECTORS; ++j) sum[i][j] = _mm512_fmadd_ps(weight, x[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 3
    for (int j = 0; j < VECTORS; ++j) {
      float* p = sums + i * PANEL + LANES * j;
      _mm512_storeu_ps(p, add ? _mm512_add_ps(_mm512_loadu_ps(p), sum[i][j]) : sum[i][j]);
    }
}

template <int SIDE>
void convolve_panel(const Video& x, const float* weights, const float* bias, const Video& out,
                    const Sizes& sizes, int64_t frame, int64_t first, float* workspace) {
  constexpr int POSITIONS = SIDE * SIDE;
  const int64_t depth = sizes.depth(), input_step = depth * PANEL;
  const int64_t sum_step = sizes.rows() * PANEL;
  float* sums = workspace + POSITIONS * input_step;
  int64_t start = 0;  // frames before the first one are zeros
  while (!x.frames[frame + start / sizes.channels]) start += sizes.channels;
  for (int64_t k = start; k < depth; ++k) {
    const Image image = x.at(k % sizes.channels, frame + k / sizes.channels);
    for (int lane = 0; lane < PANEL; lane += LANES) {
      Vector d[SIDE][SIDE], rows[SIDE][SIDE], u[SIDE];
      load_inputs<SIDE>(image, sizes, first + lane, d);
      for (int j = 0; j < SIDE; ++j) {
        transform_inputs<SIDE>(&d[0][j], SIDE, u);
        for (int i = 0; i < SIDE; ++i) rows[i][j] = u[i];
      }
      for (int i = 0; i < SIDE; ++i) {
        transform_inputs<SIDE>(rows[i], 1, u);
        for (int j = 0; j < SIDE; ++j)
          _mm512_storeu_ps(workspace + (i * SIDE + j) * input_step + k * PANEL + lane, u[j]);
      }
    }
  }
  for (int position = 0; position < POSITIONS; ++position)
    for (int64_t k = start; k < depth; k += SUMMANDS)
      for (int64_t row = 0; row < sizes.out_channels; row += ROWS)
        multiply(weights + (position * sizes.rows() + row) * depth + k * ROWS,
                 workspace + position * input_step + k * PANEL, std::min(SUMMANDS, depth - k),
                 k > start, sums + position * sum_step + row * PANEL);
  for (int64_t o = 0; o < sizes.out_channels; ++o)
    for (int lane = 0; lane < PANEL; lane += LANES) {
      Vector m[SIDE][SIDE], rows[2][SIDE], y[2];
      for (int i = 0; i < POSITIONS; ++i)
        m[i / SIDE][i % SIDE] = _mm512_loadu_ps(sums + i * sum_step + o * PANEL + lane);
      for (int j = 0; j < SIDE; ++j) {
        transform_sums<SIDE>(&m[0][j], SIDE, y);
        rows[0][j] = y[0], rows[1][j] = y[1];
      }
      Vector outputs[2][2];
      for (int i = 0; i < 2; ++i) {
        transform_sums<SIDE>(rows[i], 1, y);
        for (int j = 0; j < 2; ++j) outputs[i][j] = _mm512_add_ps(y[j], _mm512_set1_ps(bias[o]));
      }
      store_outputs(out.at(o, frame), sizes, first + lane, outputs);
    }
}

template <int SIDE>
void convolve_frames(const Video& x, const float* weights, const float* bias, const Video& out,
                     const Sizes& sizes, float* workspaces, int64_t floats, int threads) {
  const int64_t panels = (sizes.num_tiles() + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t item = 0; item < sizes.frames * panels; ++item)
    convolve_panel<SIDE>(x, weights, bias, out, sizes, item / panels, item % panels * PANEL,
                         workspaces + omp_get_thread_num() * floats);
}

template <int SIDE>
void pack(const float* weights, const Sizes& sizes, float* packed, int threads) {
  const int64_t depth = sizes.depth();
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < sizes.out_channels; row += ROWS)
    for (int64_t k = 0; k < depth; ++k) {
      const int64_t first = (k % sizes.channels) * sizes.time + k / sizes.channels;
      alignas(32) float values[9][ROWS] = {};
      for (int o = 0; o < ROWS && row + o < sizes.out_channels; ++o)
        for (int i = 0; i < 9; ++i) values[i][o] = weights[((row + o) * depth + first) * 9 + i];
      __m256 g[9], rows[SIDE][3], u[SIDE];
      for (int i = 0; i < 9; ++i) g[i] = _mm256_load_ps(values[i]);
      for (int j = 0; j < 3; ++j) {
        transform_weights<SIDE>(g + j, 3, u);
        for (int i = 0; i < SIDE; ++i) rows[i][j] = u[i];
      }
      for (int i = 0; i < SIDE; ++i) {
        transform_weights<SIDE>(rows[i], 1, u);
        for (int j = 0; j < SIDE; ++j)
          _mm256_storeu_ps(
              packed + ((i * SIDE + j) * sizes.rows() + row) * depth + k * ROWS, u[j]);
      }
    }
}

// Returns e^x with a relative error below 2e-7; x is at most 0.
inline Vector exponentiate(Vector x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87));
  const Vector n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  Vector r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);  // ln 2 in two parts
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  Vector sum = _mm512_set1_ps(1.f / 5040);
  for (const float coefficient : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f})
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(coefficient));
  return _mm512_scalef_ps(sum, n);
}

// Returns x / (1 + e^-x).
inline Vector apply_silu(Vector x) {
  const Vector one = _mm512_set1_ps(1);
  const Vector e = exponentiate(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
  const __mmask16 is_negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const Vector numerator = _mm512_mask_blend_ps(is_negative, one, e);
  return _mm512_div_ps(_mm512_mul_ps(x, numerator), _mm512_add_ps(one, e));
}

}  // namespace

extern "C" {

// Applies the RMS norm over the channels and SiLU to a frame x [C, H, W], and writes it to
// out [C, H + 2, W + 2]; the border's columns are zeros, its rows are not written.
void normalize(const float* x, const float* gamma, float* out, int64_t channels, int64_t rows,
               int64_t columns, int64_t channel_stride, int threads) {
  const int64_t out_stride = columns + 2, out_channel_stride = (rows + 2) * out_stride;
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    const float* inputs = x + row * columns;
    float* outputs = out + (row + 1) * out_stride + 1;
    for (int64_t w = 0; w < columns; w += LANES) {
      const __mmask16 mask = columns - w < LANES ? (1 << (columns - w)) - 1 : 0xffff;
      Vector sum = _mm512_setzero_ps();
      for (int64_t c = 0; c < channels; ++c) {
        const Vector value = _mm512_maskz_loadu_ps(mask, inputs + c * channel_stride + w);
        sum = _mm512_fmadd_ps(value, value, sum);
      }
      const Vector length = _mm512_max_ps(_mm512_set1_ps(1e-12f), _mm512_sqrt_ps(sum));  // NaN stays
      const Vector factor = _mm512_div_ps(_mm512_sqrt_ps(_mm512_set1_ps(channels)), length);
      for (int64_t c = 0; c < channels; ++c) {
        const Vector value = _mm512_maskz_loadu_ps(mask, inputs + c * channel_stride + w);
        const Vector y = _mm512_mul_ps(_mm512_mul_ps(value, factor), _mm512_set1_ps(gamma[c]));
        _mm512_mask_storeu_ps(outputs + c * out_channel_stride + w, mask, apply_silu(y));
      }
    }
    for (int64_t c = 0; c < channels; ++c)
      outputs[c * out_channel_stride - 1] = outputs[c * out_channel_stride + columns] = 0;
  }
}

// Transforms weights [O,C,T,3,3] to [SIDE * SIDE][O / ROWS][T * C][ROWS]; O is padded with zeros.
void pack_weights(const float* weights, int64_t out_channels, int64_t channels, int64_t time,
                  int64_t side, float* packed, int threads) {
  const Sizes sizes{channels, out_channels, time, 0, 0, 0};
  side == 4 ? pack<4>(weights, sizes, packed, threads) : pack<3>(weights, sizes, packed, threads);
}

// Number of float32 values that a thread needs.
int64_t count_workspace_floats(int64_t side, int64_t depth, int64_t out_channels) {
  return side * side * (depth + out_channels + ROWS) * PANEL;
}

// Convolves x, T + F - 1 frames [C, rows, columns] with a border of one pixel, to out, F frames
// [O, out_rows, out_columns], whose channels are strided and the rest is contiguous.
void convolve(float* const* x, const float* weights, const float* bias, float* const* out,
              int64_t channels, int64_t out_channels, int64_t time, int64_t frames, int64_t rows,
              int64_t columns, int64_t channel_stride, int64_t out_channel_stride, int64_t side,
              float* workspaces, int threads) {
  const int64_t factor = side == 4 ? 1 : 2;
  const int64_t out_rows = factor * (rows - 2), out_columns = factor * (columns - 2);
  const Video input{x, channel_stride, columns, rows, columns};
  const Video output{out, out_channel_stride, out_columns, out_rows, out_columns};
  const Sizes sizes{channels, out_channels, time, frames, (out_rows + 1) / 2,
                    (out_columns + 1) / 2};
  const int64_t floats = count_workspace_floats(side, sizes.depth(), out_channels);
  side == 4 ? convolve_frames<4>(input, weights, bias, output, sizes, workspaces, floats, threads)
            : convolve_frames<3>(input, weights, bias, output, sizes, workspaces, floats, threads);
}
}
