// A part of SGLang's tiled checksum of a tensor (engine_hash.py has the formula), on a CPU.
//
// One pass over the words, both lanes in it; the loop over a tile's words vectorises.

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t kTile = 8192;
constexpr uint32_t kPrime1 = 0x27D4EB2D, kSeed1 = 0x243F6A88;
constexpr uint32_t kPrime2 = 0x165667B1, kSeed2 = (kSeed1 * 0x9E3779B1u) ^ 0xDEADBEEFu;

inline uint32_t rotl(uint32_t x, int by) { return (x << by) | (x >> (32 - by)); }

inline uint32_t fmix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  return x ^ (x >> 16);
}

}  // namespace

// words: `count` little-endian words that begin at word `first` of a tensor of `total` words.
// Returns what the tiles that they cover add to the checksum. The inner sums of a tile that they
// share with other parts go to edges: two words for the first tile, two for the last.
extern "C" uint64_t tile_sums(const uint32_t* words, int64_t count, int64_t first, int64_t total,
                              uint32_t* edges) {
  const uint32_t size = static_cast<uint32_t>(4 * total);
  uint64_t closed = 0;
  for (int64_t at = 0; at < count;) {
    const int64_t inside = (first + at) % kTile, length = std::min(count - at, kTile - inside);
    const uint32_t start = static_cast<uint32_t>(first + at);
    uint32_t sum_1 = 0, sum_2 = 0;
#pragma omp simd reduction(+ : sum_1, sum_2)
    for (int32_t i = 0; i < static_cast<int32_t>(length); ++i) {
      const uint32_t index = start + static_cast<uint32_t>(i), word = words[at + i];
      sum_1 += fmix(word ^ (index * kPrime1 + kSeed1) ^ rotl(index, 15));
      sum_2 += fmix(word ^ (index * kPrime2 + kSeed2) ^ rotl(index, 13));
    }
    const bool whole = inside == 0 && (length == kTile || first + at + length == total);
    if (whole) {
      closed += (static_cast<uint64_t>(fmix(size ^ sum_1)) << 32) + fmix(size ^ sum_2);
    } else {
      uint32_t* edge = edges + (at == 0 ? 0 : 2);
      edge[0] = sum_1;
      edge[1] = sum_2;
    }
    at += length;
  }
  return closed;
}
