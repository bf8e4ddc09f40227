// Matrix products on CPUs with AMX, float32 and int8, compiled by `amx_linear.py`.
//
// AMX multiplies bfloat16 and adds in float32. A float32 value is exactly the sum of three
// bfloat16 values (high, middle, low), its parts. Six of the nine products of parts are added; the
// other three are below the rounding of float32. Sums of 512 input channels are added outside the
// tiles, which keeps rounding errors small. A row's result depends on no other row. Products of
// int8 values, which have one part, are exact in int32.

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,amx-int8")

namespace {

constexpr int64_t LANES = 16;            // 32-bit values of a vector, rows and sums of a tile
constexpr int64_t SIDE = 2 * LANES;      // rows and columns that are computed at once: 2x2 tiles
constexpr int64_t ROW = 64, TILE = LANES * ROW, PAIR = 2 * TILE;  // bytes
constexpr int64_t MAX_ROWS = 2048, MAX_COLUMNS = 256;  // packed at a time, columns by each thread
constexpr int64_t MAX_BYTES = 3072;                    // of a packed row or column

struct Float32 {
  using Value = float;
  using Sum = float;
  static constexpr int64_t PARTS = 3, STEP = 32;  // input channels of a tile
};

struct Int8 {
  using Value = int8_t;
  using Sum = int32_t;
  static constexpr int64_t PARTS = 1, STEP = 64;
};

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

// Splits the values of a step into their parts, the largest first.
inline void split(const float* x, __m512i parts[Float32::PARTS]) {
  __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + LANES);
  for (int64_t part = 0; part < Float32::PARTS; ++part) {
    parts[part] = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    first = _mm512_sub_ps(first, widen(_mm512_castsi512_si256(parts[part])));
    second = _mm512_sub_ps(second, widen(_mm512_extracti64x4_epi64(parts[part], 1)));
  }
}

inline void split(const int8_t* x, __m512i parts[Int8::PARTS]) { parts[0] = _mm512_loadu_si512(x); }

inline void transpose(__m512i x[16]) {  // of 32-bit groups of input channels
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

// Copies the parts of up to SIDE rows as [step, part, SIDE, ROW]; absent rows are zeros.
template <typename F>
void pack_rows(const typename F::Value* x, int64_t rows, int64_t inputs, int64_t stride,
               char* packed) {
  for (int64_t row = 0; row < SIDE; ++row) {
    char* out = packed + row * ROW;
    for (int64_t input = 0; input < inputs; input += F::STEP, out += F::PARTS * PAIR) {
      __m512i parts[F::PARTS] = {};
      if (row < rows) split(x + row * stride + input, parts);
      for (int64_t part = 0; part < F::PARTS; ++part)
        _mm512_store_si512(out + part * PAIR, parts[part]);
    }
  }
}

// Copies the parts of a block of the weight [columns, inputs] as [column / 32, step, part, 2, 16
// groups of inputs, 16 columns, 32 bits]; returns whether a value has more than one part.
template <typename F>
bool pack_weight(const typename F::Value* weight, int64_t columns, int64_t inputs, int64_t stride,
                 char* packed) {
  __m512i rest = _mm512_setzero_si512();
  const int64_t steps = inputs / F::STEP;
  for (int64_t column = 0; column < columns; column += LANES) {
    char* out = packed + column / SIDE * steps * F::PARTS * PAIR + column % SIDE * ROW;
    for (int64_t step = 0; step < steps; ++step, out += F::PARTS * PAIR) {
      __m512i tiles[F::PARTS][LANES];
      for (int64_t row = 0; row < LANES; ++row) {
        __m512i parts[F::PARTS];
        split(weight + (column + row) * stride + step * F::STEP, parts);
        for (int64_t part = 0; part < F::PARTS; ++part) tiles[part][row] = parts[part];
        if constexpr (F::PARTS > 1) rest = _mm512_or_si512(rest, parts[1]);
      }
      for (int64_t part = 0; part < F::PARTS; ++part) {
        transpose(tiles[part]);
        for (int64_t row = 0; row < LANES; ++row)
          _mm512_store_si512(out + part * PAIR + row * ROW, tiles[part][row]);
      }
    }
  }
  const __m512i magnitude = _mm512_set1_epi32(0x7fff7fff);  // -0 is no part
  return _mm512_test_epi32_mask(rest, magnitude) != 0;
}

inline void load_rows(const char* part) {
  _tile_loadd(4, part, ROW);
  _tile_loadd(5, part + TILE, ROW);
}

inline void load_columns(const char* part) {
  _tile_loadd(6, part, ROW);
  _tile_loadd(7, part + TILE, ROW);
}

template <typename F>
inline void multiply() {
  if constexpr (F::PARTS > 1) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  } else {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
}

// Adds the products of SIDE rows and SIDE columns to tiles 0 to 3, small ones first, and reads
// `lines` cache lines of the next rows ahead in each step.
template <typename F, bool HAS_REST>
void multiply_steps(const char* rows, const char* columns, int64_t steps, const char* next,
                    int64_t lines) {
  constexpr int64_t SIZE = F::PARTS * PAIR;
  for (int64_t step = 0; step < steps; ++step, rows += SIZE, columns += SIZE) {
    for (int64_t line = 0; line < lines; ++line, next += ROW) _mm_prefetch(next, _MM_HINT_T1);
    load_columns(columns);
    if constexpr (F::PARTS > 1) {
      load_rows(rows + 2 * PAIR);
      multiply<F>();
      load_rows(rows + PAIR);
      multiply<F>();
    }
    if constexpr (HAS_REST) {
      load_columns(columns + PAIR);
      multiply<F>();
    }
    load_rows(rows);
    if constexpr (HAS_REST) {
      multiply<F>();
      load_columns(columns + 2 * PAIR);
      multiply<F>();
      load_columns(columns);
    }
    multiply<F>();
  }
}

inline __m512 add(__m512i x, const float* y) {
  return _mm512_add_ps(_mm512_castsi512_ps(x), _mm512_loadu_ps(y));
}

inline __m512i add(__m512i x, const int32_t* y) {
  return _mm512_add_epi32(x, _mm512_loadu_si512(y));
}

// Adds the tiles to `out`, or to the bias, which may be null.
template <typename Sum>
void store_tiles(Sum* out, int64_t stride, int64_t rows, const Sum* bias, bool is_first) {
  alignas(64) Sum sums[4][LANES][LANES];
  _tile_stored(0, sums[0], ROW);
  _tile_stored(1, sums[1], ROW);
  _tile_stored(2, sums[2], ROW);
  _tile_stored(3, sums[3], ROW);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t half = 0; half < 2; ++half) {
      Sum* y = out + row * stride + half * LANES;
      __m512i sum = _mm512_load_si512(sums[row / LANES * 2 + half][row % LANES]);
      if (!is_first)
        sum = (__m512i)add(sum, y);
      else if (bias)
        sum = (__m512i)add(sum, bias + half * LANES);
      _mm512_storeu_si512(y, sum);
    }
  }
}

// Multiplies packed rows by a block of the weight [columns, inputs].
template <typename F>
void multiply_block(const char* rows_block, int64_t rows, const typename F::Value* weight,
                    int64_t columns, int64_t inputs, int64_t stride, const typename F::Sum* bias,
                    bool is_first, typename F::Sum* out, int64_t out_stride, char* columns_block) {
  const bool has_rest = pack_weight<F>(weight, columns, inputs, stride, columns_block);
  const int64_t panels = columns / SIDE, steps = inputs / F::STEP, size = steps * F::PARTS * PAIR;
  for (int64_t row = 0; row < rows; row += SIDE, rows_block += size) {
    const int64_t lines = row + SIDE < rows ? (F::PARTS * SIDE + panels - 1) / panels : 0;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const char* panel_columns = columns_block + panel * size;
      const char* next = rows_block + size + panel * steps * lines * ROW;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      if (F::PARTS > 1 && has_rest)
        multiply_steps<F, true>(rows_block, panel_columns, steps, next, lines);
      else
        multiply_steps<F, false>(rows_block, panel_columns, steps, next, lines);
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

template <typename F>
void multiply_all(const typename F::Value* x, const typename F::Value* weight,
                  const typename F::Sum* bias, typename F::Sum* out, int64_t rows, int64_t inputs,
                  int64_t columns, char* workspace, int threads) {
  const int64_t group = choose_group(columns, threads);
  const int64_t max_inputs = MAX_BYTES / (ROW * F::PARTS) * F::STEP;
#pragma omp parallel num_threads(threads)
  {
    const TileScope tiles;
    char* columns_block = workspace + (MAX_ROWS + omp_get_thread_num() * MAX_COLUMNS) * MAX_BYTES;
    for (int64_t first = 0; first < rows; first += MAX_ROWS) {
      const int64_t count = std::min(MAX_ROWS, rows - first);
      for (int64_t input = 0; input < inputs; input += max_inputs) {
        const int64_t block = std::min(max_inputs, inputs - input);
#pragma omp for
        for (int64_t row = 0; row < count; row += SIDE)
          pack_rows<F>(x + (first + row) * inputs + input, count - row, block, inputs,
                       workspace + row * block / F::STEP * F::PARTS * ROW);
#pragma omp for schedule(dynamic)
        for (int64_t column = 0; column < columns; column += group)
          multiply_block<F>(workspace, count, weight + column * inputs + input,
                            std::min(group, columns - column), block, inputs,
                            bias ? bias + column : nullptr, input == 0,
                            out + first * columns + column, columns, columns_block);
      }
    }
  }
}

}  // namespace

extern "C" {

// Asks Linux for the use of tiles in this process (ARCH_REQ_XCOMP_PERM); 0: they may be used.
int request_tiles() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}

int64_t count_workspace_bytes(int threads) {
  return (MAX_ROWS + threads * MAX_COLUMNS) * MAX_BYTES;
}

// Computes x weight^T + bias: x [rows, inputs], weight [columns, inputs], bias [columns] or null,
// out [rows, columns]. Inputs and columns are multiples of 32; the workspace's address is one of
// 64.
void multiply_float32(const float* x, const float* weight, const float* bias, float* out,
                      int64_t rows, int64_t inputs, int64_t columns, char* workspace,
                      int threads) {
  multiply_all<Float32>(x, weight, bias, out, rows, inputs, columns, workspace, threads);
}

// Computes x weight^T like `multiply_float32`; inputs are multiples of 64.
void multiply_int8(const int8_t* x, const int8_t* weight, int32_t* out, int64_t rows,
                   int64_t inputs, int64_t columns, char* workspace, int threads) {
  multiply_all<Int8>(x, weight, nullptr, out, rows, inputs, columns, workspace, threads);
}
}
