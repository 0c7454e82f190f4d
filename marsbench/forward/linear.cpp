// Products of a few positions with weights that lie in the order in which they are read. What one position gives is
// summed over the inputs in their order, in fp32, and rounded once: it does not depend on how many others stand beside
// it. The weights of sixteen outputs lie beside each other, input after input, so that a thread reads straight on.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "lanes.h"

namespace {

using at::Tensor;

constexpr int kMost = 9;             // positions that are summed at once, as many as registers hold
constexpr int64_t kStretch = 3;      // blocks of outputs that all positions are done with, while a cache holds them
constexpr int64_t kAhead = 32;       // words of weights that are fetched before they are wanted
constexpr int64_t kBytes = 1 << 16;  // of weights that one thread reads before another is asked

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A word is a float, or two bf16 of inputs that follow each other, the first in the lower half.
inline Floats add(Floats sum, Words weights, uint32_t values, float) { return sum + (Floats)weights * as_float(values); }

inline Floats add(Floats sum, Words weights, uint32_t values, at::BFloat16) {
#ifdef __AVX512BF16__
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)(Words{} + values));
#else
  sum += (Floats)(weights << 16) * as_float(values << 16);
  return sum + (Floats)(weights & 0xffff0000u) * as_float(values & 0xffff0000u);
#endif
}

struct Part {  // values [M, words], a row every `stride` words, and weights [blocks, words, 16]
  const uint32_t *values, *weights;
  int64_t words, stride;
};

template <typename T>
struct Product {
  Part parts[2];  // the layers' weights; an adapter's columns behind them
  int count;
  const T* bias;
  T* out;  // [M, blocks * 16], a row every `outputs` values
  int64_t blocks, outputs;

  // M positions by B blocks of outputs.
  template <int M, int B>
  void tile(int64_t block, int64_t position) const {
    Floats sum[M][B] = {};
    for (int p = 0; p < count; ++p) {
      const int64_t words = parts[p].words, stride = parts[p].stride;
      const uint32_t* values = parts[p].values + position * stride;
      const uint32_t* weights = parts[p].weights + block * words * kLanes;
      for (int64_t k = 0; k < words; ++k) {
        Words of[B];
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) {
          const uint32_t* from = weights + (b * words + k) * kLanes;
          __builtin_prefetch(from + kAhead * kLanes);
          std::memcpy(&of[b], from, sizeof of[b]);
        }
#pragma GCC unroll 9
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
          for (int b = 0; b < B; ++b) sum[m][b] = add(sum[m][b], of[b], values[m * stride + k], T());
      }
    }
    for (int m = 0; m < M; ++m)
      for (int b = 0; b < B; ++b) {
        const int64_t at = (block + b) * kLanes;
        store(out + (position + m) * outputs + at, bias == nullptr ? sum[m][b] : sum[m][b] + load(bias + at));
      }
  }

  template <int M = kMost>
  void run(int64_t begin, int64_t end, int64_t position, int64_t positions) const {
    if constexpr (M > 1)
      if (positions < M) return run<M - 1>(begin, end, position, positions);
    constexpr int kBlocks = M <= kMost / 2 ? 4 : kStretch;  // more than half of the most come stretch by stretch
    for (; begin + kBlocks <= end; begin += kBlocks) tile<M, kBlocks>(begin, position);
    for (; begin < end; ++begin) tile<M, 1>(begin, position);
  }
};

Part part(const Tensor& of, const Tensor& weights) {
  return {static_cast<const uint32_t*>(of.const_data_ptr()), static_cast<const uint32_t*>(weights.const_data_ptr()),
          weights.size(1), weights.size(1)};
}

// Layers that lie below each other in packed weights, by the same values.
template <typename T>
struct Layers {
  c10::SmallVector<Product<T>, 4> each;
  int64_t blocks, positions, grain;

  // values [M, in] by packed weights [out / 16, words, 16 words], plus a bias [out], into out [M, out]; and plus inner
  // [M, R] by the layers' packed `columns`, of which each reads its own part of R.
  Layers(const Tensor& values, const Tensor& packed, const std::optional<Tensor>& bias, Tensor& out,
         const Tensor& inner = {}, at::TensorList columns = {})
      : blocks(packed.size(0)), positions(values.size(0)) {
    grain = std::max<int64_t>(1, kBytes / (packed.size(1) * kLanes * 4));
    const T* added = bias ? bias->const_data_ptr<T>() : nullptr;
    const Product<T> all{{part(values, packed)}, 1, added, out.mutable_data_ptr<T>(), blocks, blocks * kLanes};
    int64_t first = 0, before = 0;  // blocks of the layers above, and words of theirs in `inner`
    for (const Tensor& of : columns) {
      Product<T>& layer = each.emplace_back(all);
      layer.parts[0].weights += first * packed.size(1) * kLanes;
      if (of.size(1) > 0) {
        Part& mapped = layer.parts[layer.count++] = part(inner, of);
        mapped.values += before;
        mapped.stride = inner.size(1) * inner.element_size() / 4;
      }
      if (added != nullptr) layer.bias += first * kLanes;
      layer.out += first * kLanes;
      layer.blocks = of.size(0);
      first += of.size(0), before += of.size(1);
    }
    if (each.empty()) each.push_back(all);
  }

  void run(int64_t begin, int64_t end) const {
    const int64_t turns = (positions + kMost - 1) / kMost, stretch = turns == 1 ? blocks : kStretch;
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
  Tensor out = at::empty({values.size(0), packed.size(0) * kLanes}, values.options());
  const auto run = [&]<typename T>(T) {
    const Layers<T> layers(values, packed, bias, out);
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
  const int64_t positions = values.size(0), rank = down.size(0) * kLanes;
  Tensor inner = at::empty({positions, rank}, values.options());
  Tensor out = at::empty({positions, packed.size(0) * kLanes}, values.options());
  const auto run = [&]<typename T>(T) {
    const Layers<T> first(values, down, std::nullopt, inner), second(values, packed, bias, out, inner, columns);
    const T* kept = gate.const_data_ptr<T>();
    T* found = inner.mutable_data_ptr<T>();
    const auto make_inner = [&](int64_t begin, int64_t end) {
      first.run(begin, end);
      for (int64_t m = 0; m < positions; ++m)
        if (kept[m] == T(0)) std::fill(found + m * rank + begin * kLanes, found + m * rank + end * kLanes, T(0));
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
  library.def("product(Tensor values, Tensor packed, Tensor? bias) -> Tensor");
  library.def(
      "adapted(Tensor values, Tensor packed, Tensor? bias, Tensor down, Tensor[] columns, Tensor gate) -> Tensor");
}

TORCH_LIBRARY_IMPL(marsbench, CPU, library) {
  library.impl("product", TORCH_FN(product));
  library.impl("adapted", TORCH_FN(adapted));
}
