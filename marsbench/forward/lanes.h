// As many values at a time as a register of the CPU holds, and the two types that they are read from and rounded to.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// kSums: registers of sums that a product keeps; the others hold weights and a value. More would be kept in memory.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kSums = 27;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kSums = 12;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kSums = 24;
#else
constexpr int kLanes = 4, kSums = 12;
#endif
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Integers = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Shorts = uint16_t __attribute__((vector_size(2 * kLanes)));

template <typename Lanes>
inline Lanes lanes_at(const void* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline Words load(const uint32_t* from) { return lanes_at<Words>(from); }
inline Floats load(const float* from) { return lanes_at<Floats>(from); }
inline Floats load(const at::BFloat16* from) {
  return (Floats)(__builtin_convertvector(lanes_at<Shorts>(from), Words) << 16);
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

inline void store(at::BFloat16* to, Floats values) {  // rounded to the nearest, to even where two are as near
#ifdef __AVX512BF16__
  const Shorts rounded = (Shorts)_mm512_cvtneps_pbh((__m512)values);
#else
  const Words bits = (Words)values;
  const Shorts rounded = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Shorts);
#endif
  std::memcpy(to, &rounded, sizeof rounded);
}
