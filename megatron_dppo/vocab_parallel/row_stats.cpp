// Row kernels of policy_stats for CPUs: one read of the logits forward, one read and one write backward.
//
// The compiler vectorises the loops for the machine that builds them. Rows are independent and are divided among torch's
// own threads. Sums over a block are float32, sums over blocks float64.

#include <ATen/Parallel.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int64_t BLOCK = 2048;  // floats; a block stays in the first-level cache
constexpr int64_t LINE = 64;     // bytes of a cache line
constexpr float LOG2E = 1.44269504088896341f;
constexpr float LN2_HIGH = 0.693359375f;
constexpr float LN2_LOW = -2.12194440e-4f;
constexpr float SMALLEST = -87.0f;  // exp of a smaller number is set to 0, because it is subnormal or nearly so

struct BFloat16 {
  uint16_t bits;
};

inline float load(float x) { return x; }
inline float load(BFloat16 x) {
  const uint32_t word = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

inline void store(float* to, float x) { *to = x; }
inline void store(BFloat16* to, float x) {  // round to nearest even
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  to->bits = static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

// Returns exp(d) for d <= 0 with a relative error below 1.2e-7; 0 below SMALLEST; NaN for NaN. With n = round(d / ln 2)
// and r = d - n ln 2, exp(d) = 2^n exp(r), and a polynomial approximates exp(r).
inline float exp_of_negative(float d) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: a float near it has integer steps, so its low bits are the integer n
  const float shifted = d * LOG2E + magic;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const float n = shifted - magic;
  const float r = (d - n * LN2_HIGH) - n * LN2_LOW;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t power_bits = (bits << 23) + 0x3f800000u;
  float power;
  std::memcpy(&power, &power_bits, sizeof power);
  return d < SMALLEST ? 0.0f : p * power;
}

// Copies a block to buffer as float32 and returns its maximum. The function is not inlined: forward_row writes one element
// of the buffer after this loop. Because of this write, g++ 12 would not vectorise inlined loops, which would take three
// times as long.
template <typename T>
__attribute__((noinline)) float load_block(const T* x, float* buffer, int64_t count) {
  float top = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : top)
  for (int64_t j = 0; j < count; ++j) {
    const float z = load(x[j]);
    buffer[j] = z;
    top = z > top ? z : top;
  }
  return top;
}

struct BlockSums {
  float sum, weighted, squared;  // of e^d, of d e^d and of e^2d, d = scale (x - top)
};

// The function is not inlined, for the reason at load_block. Without vector lanes, one float32 sum over a block would also
// have an error of 2e-6.
template <bool ENTROPY, bool SQUARES>
__attribute__((noinline)) BlockSums block_sums(const float* buffer, int64_t count, float top, float scale) {
  float sum = 0, weighted = 0, squared = 0;
#pragma omp simd reduction(+ : sum, weighted, squared)
  for (int64_t j = 0; j < count; ++j) {
    const float d = (buffer[j] - top) * scale;
    const float e = exp_of_negative(d);
    sum += e;
    if (ENTROPY) weighted += e * (d < SMALLEST ? SMALLEST : d);
    if (SQUARES) squared += e * e;
  }
  return {sum, weighted, squared};
}

// Computes the sums of a row without column left_out (-1: no column). The maximum that is subtracted includes the column.
template <typename T, bool ENTROPY, bool SQUARES>
void forward_row(const T* x, int64_t n, int64_t left_out, double scale, double* lse, double* plogp, double* squares) {
  const float factor_of_z = static_cast<float>(scale);
  float buffer[BLOCK];
  float top = -std::numeric_limits<float>::infinity();
  double sum = 0, weighted = 0, squared = 0;  // of e^d, of d e^d and of e^2d, d = scale (x - top)
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t count = n - start < BLOCK ? n - start : BLOCK;
    const float block_top = load_block(x + start, buffer, count);
    if (left_out >= start && left_out < start + count) buffer[left_out - start] = -std::numeric_limits<float>::infinity();
    if (block_top > top) {
      if (sum != 0) {
        const double drop = (static_cast<double>(top) - block_top) * scale, factor = std::exp(drop);
        weighted = (weighted + drop * sum) * factor;
        sum *= factor;
        squared *= factor * factor;
      }
      top = block_top;
    }
    if (top == -std::numeric_limits<float>::infinity()) {  // every element is -inf or NaN; the maximum ignores NaN
      for (int64_t j = 0; j < count; ++j) sum += std::isnan(buffer[j]) ? buffer[j] : 0.0f;
      continue;
    }
    // The exponentials below only read the buffer. Prefetch the next block (or the next row's first block) meanwhile.
    // Blocks of bfloat16, with half the bytes, arrive in time without prefetching.
    if (sizeof(T) == 4)
      for (int64_t j = 0; j < BLOCK; j += LINE / 4) __builtin_prefetch(x + start + BLOCK + j);
    const BlockSums block = block_sums<ENTROPY, SQUARES>(buffer, count, top, factor_of_z);
    sum += block.sum;
    weighted += block.weighted;
    squared += block.squared;
  }
  if (sum == 0) {
    *lse = -std::numeric_limits<double>::infinity();
    if (ENTROPY) *plogp = 0;
    if (SQUARES) *squares = 0;
    return;
  }
  *lse = std::log(sum) + static_cast<double>(top) * scale;
  if (ENTROPY) *plogp = weighted / sum - std::log(sum);
  if (SQUARES) *squares = squared / (sum * sum);
}

// Writes dL/dx_j = p_j (a + b log p_j) to out, which may be x. The caller adds the sampled token's part.
// log p = scale (x - shift) + rest: shift is lse in units of the logits, rounded, and rest is its rounding error.
template <typename T, bool ENTROPY>
void backward_row(const T* x, T* out, int64_t n, double scale, double lse, float a, float b) {
  const float shift = static_cast<float>(lse / scale);
  const float rest = static_cast<float>(static_cast<double>(shift) * scale - lse);
  const float correction = std::exp(rest), factor_of_z = static_cast<float>(scale);
  const float scaled_a = (a + b * rest) * correction, scaled_b = b * correction;
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const float d = (load(x[j]) - shift) * factor_of_z;
    const float e = exp_of_negative(d);
    float factor = scaled_a;
    if (ENTROPY) factor += scaled_b * (d < SMALLEST ? SMALLEST : d);
    store(out + j, e * factor);
  }
}

template <typename T>
void forward(const T* x, int64_t rows, int64_t columns, int64_t real, double scale, const int64_t* wanted,
             int64_t wanted_per_row, double* lse, double* plogp, double* squares, float* values) {
  const auto row_of = squares == nullptr
                          ? (plogp == nullptr ? forward_row<T, false, false> : forward_row<T, true, false>)
                          : (plogp == nullptr ? forward_row<T, false, true> : forward_row<T, true, true>);
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t left_out = wanted_per_row > 0 ? wanted[i * wanted_per_row] : -1;
      row_of(x + i * columns, real, left_out, scale, lse + i, plogp == nullptr ? nullptr : plogp + i,
             squares == nullptr ? nullptr : squares + i);
      for (int64_t k = i * wanted_per_row; k < (i + 1) * wanted_per_row; ++k)  // the row is still in the cache
        values[k] = wanted[k] < 0 ? 0.0f : load(x[i * columns + wanted[k]]);
    }
  });
}

template <typename T>
void backward(const T* x, T* out, int64_t rows, int64_t columns, int64_t real, double scale, const double* lse,
              const int64_t* targets, const float* log_prob, const float* entropy, const double* entropy_value) {
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* row = out + i * columns;
      const float g = static_cast<float>(log_prob[i] * scale);
      const float h = entropy != nullptr ? static_cast<float>(entropy[i] * scale) : 0.0f;
      if (g == 0 && h == 0) {
        std::memset(static_cast<void*>(row), 0, columns * sizeof(T));
        continue;
      }
      const int64_t target = targets[i];
      const float sampled = target >= 0 ? load(x[i * columns + target]) : 0.0f;
      const float a = -(g + (h != 0 ? h * static_cast<float>(entropy_value[i]) : 0.0f));
      if (h != 0)
        backward_row<T, true>(x + i * columns, row, real, scale, lse[i], a, -h);
      else
        backward_row<T, false>(x + i * columns, row, real, scale, lse[i], a, 0.0f);
      if (target >= 0) {  // in double, because g + p a cancels where p is near 1
        const double log_p = static_cast<double>(sampled) * scale - lse[i], p = std::exp(log_p);
        double value = p * a - (h != 0 && p > 0 ? p * h * log_p : 0.0);
        value += g;
        store(row + target, static_cast<float>(value));
      }
      std::memset(static_cast<void*>(row + real), 0, (columns - real) * sizeof(T));
    }
  });
}

}  // namespace

extern "C" {

void row_stats_forward(int bfloat16, const void* x, int64_t rows, int64_t columns, int64_t real, double scale,
                       const int64_t* wanted, int64_t wanted_per_row, double* lse, double* plogp, double* squares,
                       float* values) {
  if (bfloat16)
    forward(static_cast<const BFloat16*>(x), rows, columns, real, scale, wanted, wanted_per_row, lse, plogp, squares,
            values);
  else
    forward(static_cast<const float*>(x), rows, columns, real, scale, wanted, wanted_per_row, lse, plogp, squares, values);
}

void row_stats_backward(int bfloat16, const void* x, void* out, int64_t rows, int64_t columns, int64_t real, double scale,
                        const double* lse, const int64_t* targets, const float* log_prob, const float* entropy,
                        const double* entropy_value) {
  if (bfloat16)
    backward(static_cast<const BFloat16*>(x), static_cast<BFloat16*>(out), rows, columns, real, scale, lse, targets,
             log_prob, entropy, entropy_value);
  else
    backward(static_cast<const float*>(x), static_cast<float*>(out), rows, columns, real, scale, lse, targets, log_prob,
             entropy, entropy_value);
}
}
