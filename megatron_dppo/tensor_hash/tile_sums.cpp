// Tile sums of parts of tensors on a CPU, for SGLang's tiled checksum (tensor_hash/__init__.py has the formula).
//
// One pass over the words computes both lanes. The compiler vectorises the loop over a run of words.

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t kTile = 8192;
constexpr uint32_t kPrime1 = 0x27D4EB2D, kSeed1 = 0x243F6A88;
constexpr uint32_t kPrime2 = 0x165667B1, kSeed2 = (kSeed1 * 0x9E3779B1u) ^ 0xDEADBEEFu;

// A part of a tensor of `total` words: `words` little-endian words, from word `first` of the tensor on, in rows of `row`
// words that are `stride` words apart.
struct Part {
  const uint32_t* data;
  int64_t words, row, stride, first, total;
};

inline uint32_t rotl(uint32_t x, int by) { return (x << by) | (x >> (32 - by)); }

inline uint32_t fmix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  return x ^ (x >> 16);
}

inline void add(const uint32_t* words, int32_t count, uint32_t start, uint32_t* sums) {
  uint32_t sum_1 = 0, sum_2 = 0;
#pragma omp simd reduction(+ : sum_1, sum_2)
  for (int32_t i = 0; i < count; ++i) {
    const uint32_t index = start + static_cast<uint32_t>(i), word = words[i];
    sum_1 += fmix(word ^ (index * kPrime1 + kSeed1) ^ rotl(index, 15));
    sum_2 += fmix(word ^ (index * kPrime2 + kSeed2) ^ rotl(index, 13));
  }
  sums[0] += sum_1;
  sums[1] += sum_2;
}

// Adds the inner sums of `count` words of the part, from its word `at` on. The words lie in one tile.
inline void add_rows(const Part& part, int64_t at, int64_t count, uint32_t* sums) {
  for (int64_t done = 0; done < count;) {
    const int64_t row = (at + done) / part.row, column = (at + done) % part.row;
    const int64_t length = std::min(count - done, part.row - column);
    add(part.data + row * part.stride + column, static_cast<int32_t>(length),
        static_cast<uint32_t>(part.first + at + done), sums);
    done += length;
  }
}

// Returns the sum of the hashes of all tiles that the part covers whole. If the part shares its first or its last tile
// with other parts, the inner sums of this tile are written to edges: two words for the first tile, two for the last.
uint64_t sum_part(const Part& part, uint32_t* edges) {
  const uint32_t size = static_cast<uint32_t>(4 * part.total);
  uint64_t closed = 0;
  for (int64_t at = 0; at < part.words;) {
    const int64_t inside = (part.first + at) % kTile, length = std::min(part.words - at, kTile - inside);
    uint32_t sums[2] = {0, 0};
    add_rows(part, at, length, sums);
    if (inside == 0 && (length == kTile || part.first + at + length == part.total)) {
      closed += (static_cast<uint64_t>(fmix(size ^ sums[0])) << 32) + fmix(size ^ sums[1]);
    } else {
      uint32_t* edge = edges + (at == 0 ? 0 : 2);
      edge[0] = sums[0];
      edge[1] = sums[1];
    }
    at += length;
  }
  return closed;
}

}  // namespace

// shapes: the six numbers of Part, for each of `count` parts. Results for each part: one sum in closed, four words in
// edges.
extern "C" void tile_sums(int64_t count, const int64_t* shapes, uint64_t* closed, uint32_t* edges) {
  for (int64_t i = 0; i < count; ++i, shapes += 6) {
    const Part part = {reinterpret_cast<const uint32_t*>(shapes[0]), shapes[1], shapes[2], shapes[3], shapes[4],
                       shapes[5]};
    closed[i] = sum_part(part, edges + 4 * i);
  }
}
