// Sixteen values at a time, whatever a CPU makes of them, and the two types that they are read from and rounded to.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>

constexpr int kLanes = 16;
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Integers = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Shorts = uint16_t __attribute__((vector_size(2 * kLanes)));

inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Floats load(const at::BFloat16* from) {
  Shorts bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

inline void store(at::BFloat16* to, Floats values) {  // rounded to the nearest, to even where two are as near
  const Words bits = (Words)values;
  const Shorts rounded = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Shorts);
  std::memcpy(to, &rounded, sizeof rounded);
}
