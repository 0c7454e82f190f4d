// What lies between the linear maps of a Qwen2 or Llama layer, for a few entries on a CPU: residual and norm, rotation,
// cache and attention, activation. Everything is computed in fp32 and rounded once. An entry's result depends on its own
// values and on what it sees, never on how many others stand beside it: sums run in the order of the slots.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "lanes.h"

namespace {

using at::Tensor;

constexpr int64_t kRows = 4;  // of an activation that one thread does before another is asked

// The halves of every piece of 2 * G lanes of a, then of b: the first halves, or with H = G the second ones.
template <int G, int H, int... K>
inline Floats halves(Floats a, Floats b, std::integer_sequence<int, K...>) {
  return __builtin_shufflevector(a, b, (K / G * 2 * G + K % G + H)...);
}

// Lane k is the total of x[k]; x is spent.
template <int G = kLanes / 2>
inline Floats totals(Floats (&x)[kLanes]) {
  constexpr std::make_integer_sequence<int, kLanes> lanes;
  for (int i = 0; i < G; ++i)
    x[i] = halves<G, 0>(x[2 * i], x[2 * i + 1], lanes) + halves<G, G>(x[2 * i], x[2 * i + 1], lanes);
  if constexpr (G == 1) return x[0];
  else return totals<G / 2>(x);
}

inline float total(Floats x) {  // to the same bits
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

// e^x to within two units of the last place, x held within [-87, 87]: 2^n times a polynomial of what is left of x.
inline Floats exponential(Floats x) {
  x = x < -87.0f ? Floats{} - 87.0f : x;
  x = x > 87.0f ? Floats{} + 87.0f : x;
  const Floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // which rounds to an integer
  const Floats r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  Floats p = Floats{} + 1.98756915e-4f;
  p = p * r + 1.39819995e-3f;
  p = p * r + 8.33345191e-3f;
  p = p * r + 4.16657959e-2f;
  p = p * r + 1.66666655e-1f;
  p = p * r + 5.00000012e-1f;
  p = p * r * r + r + 1.0f;
  return p * (Floats)((__builtin_convertvector(n, Integers) + 127) << 23);
}

// hidden [M, H] += change [M, H] where there is one; the root-mean-square norm of the sum, [M, H].
template <typename T>
void add_and_norm(T* hidden, const T* change, const T* weight, T* normed, int64_t rows, int64_t size, float epsilon) {
  for (int64_t row = 0; row < rows; ++row) {
    T* of = hidden + row * size;
    Floats squares{};
    for (int64_t i = 0; i < size; i += kLanes) {
      if (change != nullptr) store(of + i, load(of + i) + load(change + row * size + i));
      const Floats x = load(of + i);
      squares += x * x;
    }
    const float scale = 1.0f / std::sqrt(total(squares) / static_cast<float>(size) + epsilon);
    for (int64_t i = 0; i < size; i += kLanes) store(normed + row * size + i, load(of + i) * scale * load(weight + i));
  }
}

Tensor norm(Tensor hidden, const std::optional<Tensor>& change, const Tensor& weight, double epsilon) {
  Tensor normed = at::empty(hidden.sizes(), hidden.options());
  const auto run = [&]<typename T>(T) {
    add_and_norm<T>(hidden.mutable_data_ptr<T>(), change ? change->const_data_ptr<T>() : nullptr,
                    weight.const_data_ptr<T>(), normed.mutable_data_ptr<T>(), hidden.size(0), hidden.size(1),
                    static_cast<float>(epsilon));
  };
  hidden.scalar_type() == at::kFloat ? run(float()) : run(at::BFloat16());
  return normed;
}

// silu(gate) * up, [M, I] each; their rows may lie apart.
Tensor swiglu(const Tensor& gate, const Tensor& up) {
  const int64_t rows = gate.size(0), size = gate.size(1);
  Tensor found = at::empty({rows, size}, gate.options());
  const auto run = [&]<typename T>(T) {
    const T *of_gate = gate.const_data_ptr<T>(), *of_up = up.const_data_ptr<T>();
    T* to = found.mutable_data_ptr<T>();
    at::parallel_for(0, rows, kRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t i = 0; i < size; i += kLanes) {
          const Floats x = load(of_gate + row * gate.stride(0) + i);
          store(to + row * size + i, x / (1.0f + exponential(-x)) * load(of_up + row * up.stride(0) + i));
        }
    });
  };
  gate.scalar_type() == at::kFloat ? run(float()) : run(at::BFloat16());
  return found;
}

// x [D] turned by its position: x * cos + (x, its halves exchanged) * sin, the first half of sin being negative.
template <int D, typename T, typename To>
void turn(const T* x, const T* cos, const T* sin, To* out) {
  T exchanged[D];
  std::copy_n(x, D / 2, std::copy_n(x + D / 2, D / 2, exchanged));
  for (int i = 0; i < D; i += kLanes)
    store(out + i, load(x + i) * load(cos + i) + load(exchanged + i) * load(sin + i));
}

// Weighted sums of values, for G query heads at once: out [G, D] *= 1 / whole.
template <int D, int G, typename T>
void gather(const float* scores, int64_t room, const T* values, int64_t stride, const std::vector<int64_t>& seen,
            const float* whole, T* out) {
  constexpr int kParts = D / kLanes;
  Floats sum[G][kParts] = {};
  for (size_t at = 0; at < seen.size(); ++at)
    for (int i = 0; i < kParts; ++i) {
      const Floats value = load(values + seen[at] * stride + i * kLanes);
      for (int g = 0; g < G; ++g) sum[g][i] += scores[g * room + at] * value;
    }
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < kParts; ++i) store(out + g * D + i * kLanes, sum[g][i] / whole[g]);
}

// One key head and the G query heads that share it: queries [G, D], scaled, over the slots that are seen; out [G, D].
template <int D, typename T>
void attend_one(const float* queries, int64_t group, const T* keys, const T* values, int64_t stride,
                const std::vector<int64_t>& seen, std::vector<float>& scores, T* out) {
  constexpr int kParts = D / kLanes;
  if (seen.empty()) return static_cast<void>(std::fill_n(out, group * D, T(0)));  // a filler before a row's beginning
  const int64_t count = static_cast<int64_t>(seen.size()), room = (count + kLanes - 1) / kLanes * kLanes;
  scores.resize(group * (room + 1));
  for (int64_t first = 0; first < room; first += kLanes) {
    Floats key[kLanes][kParts];
    for (int64_t k = 0; k < kLanes; ++k)
      for (int i = 0; i < kParts; ++i)
        key[k][i] = load(keys + seen[std::min(first + k, count - 1)] * stride + i * kLanes);
    for (int64_t g = 0; g < group; ++g) {
      Floats sum[kLanes];
      for (int k = 0; k < kLanes; ++k) {
        sum[k] = load(queries + g * D) * key[k][0];
        for (int i = 1; i < kParts; ++i) sum[k] += load(queries + g * D + i * kLanes) * key[k][i];
      }
      store(scores.data() + g * room + first, totals(sum));
    }
  }
  float* whole = scores.data() + group * room;
  for (int64_t g = 0; g < group; ++g) {
    float* score = scores.data() + g * room;
    std::fill(score + count, score + room, -1e30f);
    const float highest = *std::max_element(score, score + count);
    Floats sum{};
    for (int64_t at = 0; at < room; at += kLanes) {
      const Floats weights = exponential(load(score + at) - highest);
      store(score + at, weights);
      sum += weights;
    }
    whole[g] = total(sum);
  }
  int64_t g = 0;
  for (; g + 3 <= group; g += 3) gather<D, 3>(scores.data() + g * room, room, values, stride, seen, whole + g, out + g * D);
  for (; g < group; ++g) gather<D, 1>(scores.data() + g * room, room, values, stride, seen, whole + g, out + g * D);
}

struct Window {
  const int64_t *entry, *slot, *begin;  // [M] of N * W, where it is written among all rows' slots; [N]
  const bool* visible;                  // [W, W]
  int64_t width, count, total;          // W, M, slots of a row that are looked at
};

template <int D, typename T>
void attend(const T* every, const T* cos, const T* sin, T* keys, T* values, int64_t slots, int64_t heads,
            int64_t kv_heads, float scale, const Window& window, T* found) {
  const int64_t group = heads / kv_heads, across = heads + 2 * kv_heads, stride = kv_heads * D;
  std::vector<float> queries(window.count * heads * D);
  for (int64_t m = 0; m < window.count; ++m) {
    const T* of = every + m * across * D;
    for (int64_t h = 0; h < heads; ++h) {
      float* query = queries.data() + (m * heads + h) * D;
      turn<D>(of + h * D, cos + m * D, sin + m * D, query);
      for (int i = 0; i < D; i += kLanes) store(query + i, load(query + i) * scale);
    }
    for (int64_t h = 0; h < kv_heads; ++h) {
      turn<D>(of + (heads + h) * D, cos + m * D, sin + m * D, keys + window.slot[m] * stride + h * D);
      std::copy_n(of + (heads + kv_heads + h) * D, D, values + window.slot[m] * stride + h * D);
    }
  }
  at::parallel_for(0, window.count * kv_heads, 1, [&](int64_t from, int64_t to) {
    std::vector<int64_t> seen;
    std::vector<float> scores;
    for (int64_t task = from; task < to; ++task) {
      const int64_t m = task / kv_heads, h = task % kv_heads;
      const int64_t row = window.entry[m] / window.width, entry = window.entry[m] % window.width;
      const int64_t begin = window.begin[row];
      if (task == from || h == 0) {
        seen.clear();
        for (int64_t slot = 0; slot < std::min(begin, window.total); ++slot) seen.push_back(slot);
        const int64_t first = std::max<int64_t>(0, -begin), last = std::min(window.width, window.total - begin);
        for (int64_t other = first; other < last; ++other)
          if (window.visible[entry * window.width + other]) seen.push_back(begin + other);
      }
      const int64_t at = (row * slots * kv_heads + h) * D;
      attend_one<D>(queries.data() + (m * heads + h * group) * D, group, keys + at, values + at, stride, seen, scores,
                    found + (m * heads + h * group) * D);
    }
  });
}

// Queries, keys and values [M, (heads + 2 kv_heads) * D] of a window's entries: turned, written to keys and values
// [rows, slots, kv_heads, D], and attended to; what each entry finds, [M, heads * D].
Tensor attention(const Tensor& every, const Tensor& cos, const Tensor& sin, Tensor keys, Tensor values,
                 const Tensor& entry, const Tensor& slot, const Tensor& begin, const Tensor& visible, int64_t total,
                 double scale) {
  const int64_t count = every.size(0), size = keys.size(3), kv_heads = keys.size(2);
  const int64_t heads = every.size(1) / size - 2 * kv_heads;
  Tensor found = at::empty({count, heads * size}, every.options());
  const Window window{entry.const_data_ptr<int64_t>(), slot.const_data_ptr<int64_t>(), begin.const_data_ptr<int64_t>(),
                      visible.const_data_ptr<bool>(), visible.size(0), count, total};
  const auto run = [&]<int D, typename T>(std::integral_constant<int, D>, T) {
    attend<D, T>(every.const_data_ptr<T>(), cos.const_data_ptr<T>(), sin.const_data_ptr<T>(),
                 keys.mutable_data_ptr<T>(), values.mutable_data_ptr<T>(), keys.size(1), heads, kv_heads,
                 static_cast<float>(scale), window, found.mutable_data_ptr<T>());
  };
  const auto of_size = [&]<int... D>(std::integer_sequence<int, D...>, auto type) {
    const bool is_known = ((size == D && (run(std::integral_constant<int, D>(), type), true)) || ...);
    TORCH_CHECK(is_known, "heads of ", size);
  };
  constexpr std::integer_sequence<int, 16, 32, 64, 80, 96, 128, 256> sizes;
  every.scalar_type() == at::kFloat ? of_size(sizes, float()) : of_size(sizes, at::BFloat16());
  return found;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(marsbench, library) {
  library.def("norm(Tensor(a!) hidden, Tensor? change, Tensor weight, float epsilon) -> Tensor",
              torch::dispatch(at::kCPU, TORCH_FN(norm)));
  library.def("swiglu(Tensor gate, Tensor up) -> Tensor", torch::dispatch(at::kCPU, TORCH_FN(swiglu)));
  library.def(
      "attention(Tensor every, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, Tensor entry, Tensor slot, "
      "Tensor begin, Tensor visible, int total, float scale) -> Tensor",
      torch::dispatch(at::kCPU, TORCH_FN(attention)));
}
