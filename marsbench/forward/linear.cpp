// Products of a few positions with weights that lie in the order in which they are read. What one position gives is
// summed over the inputs in their order, in fp32, and rounded once: it does not depend on how many others stand beside
// it. The weights of sixteen outputs lie beside each other, input after input, so that a thread reads straight on.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "lanes.h"

namespace {

using at::Tensor;

constexpr int kBlock = 16;               // outputs of packed weights that lie beside each other
constexpr int kParts = kBlock / kLanes;  // registers that hold a block
constexpr int kMost = kSums / kParts < 9 ? kSums / kParts : 9;  // positions that are summed at once
constexpr int64_t kAhead = 32;           // words of weights that are fetched before they are wanted
constexpr int64_t kBytes = 1 << 16;      // of weights that one thread reads before another is asked
constexpr int64_t kTile = 16;            // positions, and words of weights, of a tile of AMX
constexpr int64_t kHeld = 1 << 19;       // bytes of weights that all positions are done with by tiles, likewise

// How far from the k-th word of a block lies what is fetched then: in the block, or in the one that is read after it.
inline int64_t ahead(int64_t k, int64_t words, int64_t blocks) {
  return (k + kAhead + (k + kAhead < words ? 0 : (blocks - 1) * words)) * kBlock;
}

// Blocks of outputs that M positions are multiplied by at once.
template <int M>
constexpr int kBlocks = std::clamp(kSums / (M * kParts), 1, M <= kMost / 2 ? 4 : 3);
constexpr int64_t kStretch = kBlocks<kMost>;  // blocks that all positions are done with, while a cache holds them

// A word of weights is a float, or two bf16 of inputs that follow each other, the first in the lower half. What it is
// multiplied by: floats, or a word too where the CPU multiplies and adds two bf16 by itself.
template <typename T>
#ifdef __AVX512BF16__
constexpr bool kPairs = std::is_same_v<T, at::BFloat16>;
#else
constexpr bool kPairs = false;
#endif
// With AMX tiles of bf16 are multiplied, whatever the number of positions: they do not add as the other instructions do.
template <typename T>
#ifdef __AMX_BF16__
constexpr bool kTiles = kPairs<T>;
#else
constexpr bool kTiles = false;
#endif
template <typename T>
using Value = std::conditional_t<kPairs<T>, uint32_t, float>;
template <typename T>
constexpr int kEach = kPairs<T> ? 1 : 4 / sizeof(T);  // values that belong to a word

// The weights of the i-th of the values that belong to a word.
template <typename T>
inline Floats unpacked(Words weights, int i) {
  if (kEach<T> == 1) return (Floats)weights;
  return (Floats)(i == 0 ? weights << 16 : weights & 0xffff0000u);
}

inline Floats add(Floats sum, Floats weights, float value) { return sum + weights * value; }
#ifdef __AVX512BF16__
inline Floats add(Floats sum, Floats weights, uint32_t pair) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)(Words{} + pair));
}
#endif

template <typename T>
struct Part {  // values [M, words * kEach], a row every `stride`, and weights [blocks, words, 16]
  const Value<T>* values;
  const uint32_t* weights;
  int64_t words, stride;
};

#ifdef __AMX_BF16__
// The CPU's tiles while this is there: 0 to 3 hold sums, 4 values, or 4 and 5 those of 32 positions, the others weights.
struct Tiles {
  explicit Tiles(int64_t positions) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, none[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    std::fill_n(shapes.rows, 5, std::min(positions, kTile));
    asm volatile("" ::: "memory");  // intrinsics do not tell what they read
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
};

// Add a tile of values by tiles of four blocks; or two tiles, the other one `second` values behind, by two blocks.
template <bool kTwo>
inline void add_tiles(const uint32_t* values, int64_t stride, int64_t second, const uint32_t* const* weights) {
  _tile_loadd(4, values, stride * 4);
  _tile_loadd(6, weights[0], 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, weights[1], 64);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTwo) {
    _tile_loadd(5, values + second, stride * 4);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  } else {
    _tile_loadd(5, weights[2], 64);
    _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(6, weights[3], 64);
    _tile_dpbf16ps(3, 4, 6);
  }
}
#endif

template <typename T>
struct Product {
  Part<T> parts[2];  // the layers' weights; an adapter's columns behind them
  int count;
  const T* bias;
  T* out;  // [M, blocks * 16], a row every `outputs` values
  int64_t blocks, outputs;

  // M positions by B blocks of outputs.
  template <int M, int B>
  void tile(int64_t block, int64_t position) const {
    constexpr int kOf = B * kParts;
    Floats sum[M][kOf] = {};
    for (int p = 0; p < count; ++p) {
      const int64_t words = parts[p].words, stride = parts[p].stride;
      const Value<T>* values = parts[p].values + position * stride;
      const uint32_t* weights = parts[p].weights + block * words * kBlock;
      for (int64_t k = 0; k < words; ++k) {
        const int64_t next = ahead(k, words, B);
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) __builtin_prefetch(weights + b * words * kBlock + next);
#pragma GCC unroll 2
        for (int i = 0; i < kEach<T>; ++i) {
          Floats of[kOf];
#pragma GCC unroll 16
          for (int j = 0; j < kOf; ++j)
            of[j] = unpacked<T>(load(weights + (j / kParts * words + k) * kBlock + j % kParts * kLanes), i);
#pragma GCC unroll 9
          for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
            for (int j = 0; j < kOf; ++j) sum[m][j] = add(sum[m][j], of[j], values[m * stride + k * kEach<T> + i]);
        }
      }
    }
    for (int m = 0; m < M; ++m)
      for (int j = 0; j < kOf; ++j) {
        const int64_t at = block * kBlock + j * kLanes;
        store(out + (position + m) * outputs + at, bias == nullptr ? sum[m][j] : sum[m][j] + load(bias + at));
      }
  }

#ifdef __AMX_BF16__
  // Up to 16 positions by four blocks from the first on; or 17 to 32, their first and their last 16, by two. Behind the
  // last block it is itself that is multiplied again.
  template <bool kTwo>
  void tiles(int64_t first, int64_t last, int64_t position, int64_t positions) const {
    constexpr int kOf = kTwo ? 2 : 4;
    const int64_t rows = std::min(positions, kTile), second = positions - rows;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int p = 0; p < count; ++p) {
      const int64_t words = parts[p].words;
      int64_t stride = parts[p].stride;
      const uint32_t *values = parts[p].values + position * stride, *weights[kOf];
      for (int b = 0; b < kOf; ++b) weights[b] = parts[p].weights + std::min(first + b, last) * words * kBlock;
      for (int64_t k = 0; k < words; k += kTile) {
        uint32_t some_values[2 * kTile][kTile], some_weights[kOf][kTile][kBlock];  // too few words: zeros behind them
        if (const int64_t left = words - k; left < kTile) {
          std::memset(some_values, 0, sizeof some_values), std::memset(some_weights, 0, sizeof some_weights);
          for (int64_t m = 0; m < positions; ++m) std::copy_n(values + m * stride, left, some_values[m]);
          for (int b = 0; b < kOf; ++b) std::copy_n(weights[b], left * kBlock, some_weights[b][0]);
          for (int b = 0; b < kOf; ++b) weights[b] = some_weights[b][0];
          values = some_values[0], stride = kTile;
          asm volatile("" ::: "memory");
        } else {
          for (int64_t i = 0, next = ahead(k, words, kOf) - k * kBlock; i < kTile; ++i)
            for (int b = 0; b < kOf; ++b) __builtin_prefetch(weights[b] + next + i * kBlock);
        }
        add_tiles<kTwo>(values, stride, second * stride, weights);
        values += kTile;
        for (int b = 0; b < kOf; ++b) weights[b] += kTile * kBlock;
      }
    }
    float sums[4][kTile][kBlock];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int i = 0; i < 4; i += kOf)
      for (int64_t m = 0; m < rows; ++m)
        for (int b = 0; b < kOf; ++b) {
          const int64_t at = std::min(first + b, last) * kBlock;
          const Floats sum = load(sums[i + b][m]);
          store(out + (position + i / kOf * second + m) * outputs + at, bias == nullptr ? sum : sum + load(bias + at));
        }
  }
#endif

  template <int M = kMost>
  void run(int64_t begin, int64_t end, int64_t position, int64_t positions) const {
#ifdef __AMX_BF16__
    if constexpr (kTiles<T>) {
      for (; begin < end && positions <= kTile; begin += 4) tiles<false>(begin, end - 1, position, positions);
      for (; begin < end; begin += 2) tiles<true>(begin, end - 1, position, positions);
      return;
    }
#endif
    if constexpr (M > 1)
      if (positions < M) return run<M - 1>(begin, end, position, positions);
    for (; begin + kBlocks<M> <= end; begin += kBlocks<M>) tile<M, kBlocks<M>>(begin, position);
    for (; begin < end; ++begin) tile<M, 1>(begin, position);
  }
};

// Values [M, n] as products read them: bf16 as floats, unless the CPU multiplies pairs.
template <typename T>
struct Values {
  const T* from;
  int64_t rows, size;
  std::vector<float> wide;

  explicit Values(const Tensor& of) : from(of.const_data_ptr<T>()), rows(of.size(0)), size(of.size(1)) {
    if constexpr (!std::is_same_v<T, float> && !kPairs<T>) wide.resize(rows * size);
    read(0, size);
  }

  // Take over what columns [begin, end) hold now.
  void read(int64_t begin, int64_t end) {
    if (!wide.empty())
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = row * size + begin; i < row * size + end; ++i) wide[i] = from[i];
  }

  Part<T> by(const Tensor& weights, int64_t first = 0) const {  // the words from `first` on
    const void* values = wide.empty() ? static_cast<const void*>(from) : wide.data();
    return {static_cast<const Value<T>*>(values) + first * kEach<T>, static_cast<const uint32_t*>(weights.const_data_ptr()),
            weights.size(1), kPairs<T> ? size / 2 : size};
  }
};

// Layers that lie below each other in packed weights, by the same values.
template <typename T>
struct Layers {
  c10::SmallVector<Product<T>, 4> each;
  int64_t blocks, positions, grain;

  // values [M, in] by packed weights [out / 16, words, 16 words], plus a bias [out], into out [M, out]; and plus inner
  // [M, R] by the layers' packed `columns`, of which each reads its own part of R.
  Layers(const Values<T>& values, const Tensor& packed, const std::optional<Tensor>& bias, Tensor& out,
         const Values<T>* inner = nullptr, at::TensorList columns = {})
      : blocks(packed.size(0)), positions(values.rows) {
    grain = std::max<int64_t>(1, kBytes / (packed.size(1) * kBlock * 4));
    const T* added = bias ? bias->const_data_ptr<T>() : nullptr;
    const Product<T> all{{values.by(packed)}, 1, added, out.mutable_data_ptr<T>(), blocks, blocks * kBlock};
    int64_t first = 0, before = 0;  // blocks of the layers above, and words of theirs in `inner`
    for (const Tensor& of : columns) {
      Product<T>& layer = each.emplace_back(all);
      layer.parts[0].weights += first * packed.size(1) * kBlock;
      if (of.size(1) > 0) layer.parts[layer.count++] = inner->by(of, before);
      if (added != nullptr) layer.bias += first * kBlock;
      layer.out += first * kBlock;
      layer.blocks = of.size(0);
      first += of.size(0), before += of.size(1);
    }
    if (each.empty()) each.push_back(all);
  }

  void run(int64_t begin, int64_t end) const {
#ifdef __AMX_BF16__
    std::optional<Tiles> tiles;
    if constexpr (kTiles<T>) tiles.emplace(positions);
#endif
    const int64_t most = kTiles<T> ? 2 * kTile : kMost, turns = (positions + most - 1) / most;
    const int64_t held = kTiles<T> ? std::max<int64_t>(kHeld / (each[0].parts[0].words * kBlock * 8), 1) * 2 : kStretch;
    const int64_t stretch = turns == 1 ? blocks : held;
    for (const Product<T>& of : each) {
      const int64_t last = std::min(end, of.blocks);
      for (int64_t block = std::max<int64_t>(begin, 0); block < last; block += stretch)
        for (int64_t turn = 0; turn < turns; ++turn) {
          const int64_t position = turn * positions / turns, beyond = (turn + 1) * positions / turns;
          of.run(block, std::min(block + stretch, last), position, beyond - position);
        }
      begin -= of.blocks, end -= of.blocks;
    }
  }

  // What one of several threads does, by the blocks.
  template <typename Run>
  void share(int64_t thread, int64_t threads, const Run& run) const {
    const int64_t most = std::min(threads, (blocks + grain - 1) / grain), each_one = (blocks + most - 1) / most;
    if (thread * each_one < blocks) run(thread * each_one, std::min(blocks, (thread + 1) * each_one));
  }
};

Tensor product(const Tensor& given, const Tensor& packed, const std::optional<Tensor>& bias) {
  const Tensor values = given.contiguous();
  Tensor out = at::empty({values.size(0), packed.size(0) * kBlock}, values.options());
  const auto run = [&]<typename T>(T) {
    const Values<T> read(values);
    const Layers<T> layers(read, packed, bias, out);
    at::parallel_for(0, layers.blocks, layers.grain, [&](int64_t begin, int64_t end) { layers.run(begin, end); });
  };
  if (values.size(0) > 0) values.scalar_type() == at::kFloat ? run(float()) : run(at::BFloat16());
  return out;
}

// The same with an adapter's maps: `down` [R / 16, words, 16 words] takes values to inner ones, which `gate` [M, 1], of
// ones and zeros, keeps or drops, and the layers' packed `columns` take them to the outputs. All in one go: starting
// threads twice takes as long as the maps do.
Tensor adapted(const Tensor& given, const Tensor& packed, const std::optional<Tensor>& bias, const Tensor& down,
               at::TensorList columns, const Tensor& gate) {
  const Tensor values = given.contiguous();
  const int64_t positions = values.size(0), rank = down.size(0) * kBlock;
  Tensor inner = at::empty({positions, rank}, values.options());
  Tensor out = at::empty({positions, packed.size(0) * kBlock}, values.options());
  const auto run = [&]<typename T>(T) {
    const Values<T> read(values);
    Values<T> mapped(inner);
    const Layers<T> first(read, down, std::nullopt, inner), second(read, packed, bias, out, &mapped, columns);
    const T* kept = gate.const_data_ptr<T>();
    T* found = inner.mutable_data_ptr<T>();
    const auto make_inner = [&](int64_t begin, int64_t end) {
      first.run(begin, end);
      for (int64_t m = 0; m < positions; ++m)
        if (kept[m] == T(0)) std::fill(found + m * rank + begin * kBlock, found + m * rank + end * kBlock, T(0));
      mapped.read(begin * kBlock, end * kBlock);
    };
#ifdef _OPENMP
    if (!at::in_parallel_region() && at::get_num_threads() > 1) {
#pragma omp parallel
      {
        first.share(omp_get_thread_num(), omp_get_num_threads(), make_inner);
#pragma omp barrier
        second.share(omp_get_thread_num(), omp_get_num_threads(), [&](int64_t b, int64_t e) { second.run(b, e); });
      }
      return;
    }
#endif
    make_inner(0, first.blocks);
    at::parallel_for(0, second.blocks, second.grain, [&](int64_t begin, int64_t end) { second.run(begin, end); });
  };
  if (positions > 0) values.scalar_type() == at::kFloat ? run(float()) : run(at::BFloat16());
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(marsbench, library) {
  library.def("product(Tensor values, Tensor packed, Tensor? bias) -> Tensor",
              torch::dispatch(at::kCPU, TORCH_FN(product)));
  library.def(
      "adapted(Tensor values, Tensor packed, Tensor? bias, Tensor down, Tensor[] columns, Tensor gate) -> Tensor",
      torch::dispatch(at::kCPU, TORCH_FN(adapted)));
}
