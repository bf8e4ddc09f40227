// A float32 linear layer on CPUs with AMX, compiled by `amx_linear.py`.
//
// AMX multiplies bfloat16 and adds in float32. A float32 value is exactly the sum of three
// bfloat16 values (high, middle, low), its parts. Six of the nine products of parts are added; the
// other three are below the rounding of float32. Sums of 512 input channels are added outside the
// tiles, which keeps rounding errors small. A row's result depends on no other row.

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")

namespace {

using Bfloat16 = uint16_t;

constexpr int64_t PARTS = 3;
constexpr int64_t TILE_ROWS = 16, TILE_VALUES = 512;  // 16 rows of 32 bfloat16 or 16 float32 values
constexpr int64_t STEP = 32;                          // input channels of a tile
constexpr int64_t SIDE = 32;         // rows and columns that are computed at once: 2x2 tiles
constexpr int64_t PAIR = 2 * TILE_VALUES;  // one part of SIDE rows or columns and a step
constexpr int64_t MAX_ROWS = 2048, MAX_INPUTS = 512;  // whose parts are in memory
constexpr int64_t MAX_COLUMNS = 256;  // whose parts are in the cache of a core

struct __attribute__((packed)) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct TileScope {
  TileScope() {
    const TileShapes shapes;
    _tile_loadconfig(&shapes);
  }
  ~TileScope() { _tile_release(); }
};

inline __m512 widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

// Splits 32 values into their parts, the largest first.
inline void split(const float* x, __m512i parts[PARTS]) {
  __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + 16);
  for (int64_t part = 0; part < PARTS; ++part) {
    parts[part] = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    first = _mm512_sub_ps(first, widen(_mm512_castsi512_si256(parts[part])));
    second = _mm512_sub_ps(second, widen(_mm512_extracti64x4_epi64(parts[part], 1)));
  }
}

inline void transpose(__m512i x[16]) {  // of 32-bit values: pairs of input channels stay together
  __m512i y[16];
  for (int i = 0; i < 8; ++i) {
    y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    x[4 * i] = _mm512_unpacklo_epi64(y[4 * i], y[4 * i + 2]);
    x[4 * i + 1] = _mm512_unpackhi_epi64(y[4 * i], y[4 * i + 2]);
    x[4 * i + 2] = _mm512_unpacklo_epi64(y[4 * i + 1], y[4 * i + 3]);
    x[4 * i + 3] = _mm512_unpackhi_epi64(y[4 * i + 1], y[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88);
    y[4 + i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
    y[8 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
    y[12 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0x88);
    x[8 + i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0xdd);
  }
}

// Copies the parts of up to SIDE rows as [step, part, 2, 16, 32]; absent rows are zeros.
void pack_rows(const float* x, int64_t rows, int64_t inputs, int64_t stride, Bfloat16* packed) {
  for (int64_t row = 0; row < SIDE; ++row) {
    Bfloat16* out = packed + row * STEP;
    for (int64_t input = 0; input < inputs; input += STEP, out += PARTS * PAIR) {
      __m512i parts[PARTS] = {};
      if (row < rows) split(x + row * stride + input, parts);
      for (int64_t part = 0; part < PARTS; ++part)
        _mm512_store_si512(out + part * PAIR, parts[part]);
    }
  }
}

// Copies the parts of a block of the weight [columns, inputs] as [column / 32, step, part, 2, 16
// pairs of inputs, 16 columns, 2]; returns whether a value has more than one part.
bool pack_weight(const float* weight, int64_t columns, int64_t inputs, int64_t stride,
                 Bfloat16* packed) {
  __m512i rest = _mm512_setzero_si512();
  const int64_t steps = inputs / STEP;
  for (int64_t column = 0; column < columns; column += TILE_ROWS) {
    Bfloat16* out = packed + column / SIDE * steps * PARTS * PAIR + column % SIDE * STEP;
    for (int64_t step = 0; step < steps; ++step, out += PARTS * PAIR) {
      __m512i tiles[PARTS][TILE_ROWS];
      for (int64_t row = 0; row < TILE_ROWS; ++row) {
        __m512i parts[PARTS];
        split(weight + (column + row) * stride + step * STEP, parts);
        for (int64_t part = 0; part < PARTS; ++part) tiles[part][row] = parts[part];
        rest = _mm512_or_si512(rest, parts[1]);
      }
      for (int64_t part = 0; part < PARTS; ++part) {
        transpose(tiles[part]);
        for (int64_t row = 0; row < TILE_ROWS; ++row)
          _mm512_store_si512(out + part * PAIR + row * STEP, tiles[part][row]);
      }
    }
  }
  const __m512i magnitude = _mm512_set1_epi32(0x7fff7fff);  // -0 is no part
  return _mm512_test_epi32_mask(rest, magnitude) != 0;
}

inline void load_rows(const Bfloat16* part) {
  _tile_loadd(4, part, 64);
  _tile_loadd(5, part + TILE_VALUES, 64);
}

inline void load_columns(const Bfloat16* part) {
  _tile_loadd(6, part, 64);
  _tile_loadd(7, part + TILE_VALUES, 64);
}

inline void multiply() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Adds the products of SIDE rows and SIDE columns to tiles 0 to 3, small ones first, and reads
// `lines` cache lines of the next rows ahead in each step.
template <bool HAS_REST>
void multiply_steps(const Bfloat16* rows, const Bfloat16* columns, int64_t steps,
                    const char* next, int64_t lines) {
  for (int64_t step = 0; step < steps; ++step, rows += PARTS * PAIR, columns += PARTS * PAIR) {
    for (int64_t line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    load_rows(rows + 2 * PAIR);
    load_columns(columns);
    multiply();
    load_rows(rows + PAIR);
    multiply();
    if constexpr (HAS_REST) {
      load_columns(columns + PAIR);
      multiply();
      load_rows(rows);
      multiply();
      load_columns(columns + 2 * PAIR);
      multiply();
      load_columns(columns);
    } else {
      load_rows(rows);
    }
    multiply();
  }
}

// Adds the tiles to `out`, or to the bias, which may be null.
void store_tiles(float* out, int64_t stride, int64_t rows, const float* bias, bool is_first) {
  alignas(64) float sums[4][TILE_ROWS][TILE_ROWS];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t half = 0; half < 2; ++half) {
      float* y = out + row * stride + half * TILE_ROWS;
      __m512 sum = _mm512_load_ps(sums[row / TILE_ROWS * 2 + half][row % TILE_ROWS]);
      if (!is_first)
        sum = _mm512_add_ps(sum, _mm512_loadu_ps(y));
      else if (bias)
        sum = _mm512_add_ps(sum, _mm512_loadu_ps(bias + half * TILE_ROWS));
      _mm512_storeu_ps(y, sum);
    }
  }
}

// Multiplies packed rows by a block of the weight [columns, inputs].
void multiply_block(const Bfloat16* rows_block, int64_t rows, const float* weight, int64_t columns,
                    int64_t inputs, int64_t stride, const float* bias, bool is_first, float* out,
                    int64_t out_stride, Bfloat16* columns_block) {
  const bool has_rest = pack_weight(weight, columns, inputs, stride, columns_block);
  const int64_t panels = columns / SIDE, steps = inputs / STEP, size = steps * PARTS * PAIR;
  for (int64_t row = 0; row < rows; row += SIDE, rows_block += size) {
    const int64_t lines = row + SIDE < rows ? (PARTS * SIDE + panels - 1) / panels : 0;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const Bfloat16* panel_columns = columns_block + panel * size;
      const char* next = (const char*)(rows_block + size) + panel * steps * lines * 64;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      if (has_rest)
        multiply_steps<true>(rows_block, panel_columns, steps, next, lines);
      else
        multiply_steps<false>(rows_block, panel_columns, steps, next, lines);
      store_tiles(out + row * out_stride + panel * SIDE, out_stride, std::min(SIDE, rows - row),
                  bias ? bias + panel * SIDE : nullptr, is_first);
    }
  }
}

// The columns that a thread multiplies at a time; all threads have as many, if possible.
int64_t choose_group(int64_t columns, int64_t threads) {
  const int64_t rounds = (columns + threads * MAX_COLUMNS - 1) / (threads * MAX_COLUMNS);
  const int64_t group = (columns + rounds * threads - 1) / (rounds * threads);
  return (group + SIDE - 1) / SIDE * SIDE;
}

}  // namespace

extern "C" {

// Asks Linux for the use of tiles in this process (ARCH_REQ_XCOMP_PERM); 0: they may be used.
int request_tiles() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}

int64_t count_workspace_bytes(int threads) {
  return (MAX_ROWS + threads * MAX_COLUMNS) * MAX_INPUTS * PARTS * sizeof(Bfloat16);
}

// Computes x weight^T + bias: x [rows, inputs], weight [columns, inputs], bias [columns] or null,
// out [rows, columns]. Inputs and columns are multiples of 32; the workspace's address is one of
// 64.
void multiply_float32(const float* x, const float* weight, const float* bias, float* out,
                      int64_t rows, int64_t inputs, int64_t columns, void* workspace,
                      int threads) {
  const int64_t group = choose_group(columns, threads);
  Bfloat16* rows_block = (Bfloat16*)workspace;
#pragma omp parallel num_threads(threads)
  {
    const TileScope tiles;
    Bfloat16* columns_block =
        rows_block + (MAX_ROWS + omp_get_thread_num() * MAX_COLUMNS) * MAX_INPUTS * PARTS;
    for (int64_t first = 0; first < rows; first += MAX_ROWS) {
      const int64_t count = std::min(MAX_ROWS, rows - first);
      for (int64_t input = 0; input < inputs; input += MAX_INPUTS) {
        const int64_t block = std::min(MAX_INPUTS, inputs - input);
#pragma omp for
        for (int64_t row = 0; row < count; row += SIDE)
          pack_rows(x + (first + row) * inputs + input, count - row, block, inputs,
                    rows_block + row * block * PARTS);
#pragma omp for schedule(dynamic)
        for (int64_t column = 0; column < columns; column += group)
          multiply_block(rows_block, count, weight + column * inputs + input,
                         std::min(group, columns - column), block, inputs,
                         bias ? bias + column : nullptr, input == 0,
                         out + first * columns + column, columns, columns_block);
      }
    }
  }
}
}
