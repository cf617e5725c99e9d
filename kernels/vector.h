// Vectors of one instruction set, as compiler vector extensions.  Included by dot.cc and combine.cc.
#pragma once
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

namespace moejax {
namespace ISA {

enum { kLanes = VECTOR_BYTES / 4 };
typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef float FloatsUnaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t WordsUnaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t Longs __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t HalvesUnaligned __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2)));

INLINE Floats load(const float* p) { return *(const FloatsUnaligned*)p; }
INLINE Words load(const uint32_t* p) { return *(const WordsUnaligned*)p; }
INLINE Floats load(const uint16_t* p) {  // BF16, widened
  return (Floats)(__builtin_convertvector(*(const HalvesUnaligned*)p, Words) << 16);
}
INLINE void store(float* p, Floats v) { *(FloatsUnaligned*)p = v; }
INLINE float widen(float x) { return x; }
INLINE float widen(uint16_t half) {
  uint32_t word = (uint32_t)half << 16;
  float x;
  memcpy(&x, &word, 4);
  return x;
}

}  // namespace ISA
}  // namespace moejax
