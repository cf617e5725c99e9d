// What the instruction-set specific units (dot.cc, combine.cc) offer to the handlers.
//
// Those units are compiled once per instruction set into a namespace each and use no std templates,
// so that no inline function built for a newer instruction set can replace a baseline one.
#pragma once
#include <stdint.h>

namespace moejax {

// Contract codes, as moejax/combine/contract.py has them: bit 0 rounds every operand to BF16, the
// rest selects the accumulator.
enum Accumulator { kFloat32 = 0, kBfloat16 = 1, kExact = 2 };
inline bool rounds_operand(int32_t code) { return code & 1; }
inline int accumulator(int32_t code) { return code >> 1; }
enum { kCodes = 6 };

enum {
  kFewRows = 6,      // up to here W is streamed; above it is packed into FP32 panels
  kPanelDepth = 256, // k per panel, and the width of a block of the blocked dot
  kRowBlock = 384,   // rows packed at a time
  kMaxVector = 16,   // floats of the widest vector
  kMaxTerms = 16,    // terms of one combine
  kTile = 1024       // columns of one tile of the all-orders kernels: a page of every result
};

// One matrix product, or a part of one: rows a[m][0..k1) against columns n0..n1 of W.
template <typename Element>
struct Product {
  const Element* const* a;  // [rows] pointers to k values
  float* const* c;          // [rows] pointers to n values
  int64_t rows, k0, k1, n0, n1;
  const Element* w;         // w[k * ld + n], or w[n * ld + k] if transposed
  int64_t ld;
  bool transposed;
  bool blocked;             // blocks of kPanelDepth, each from +0, added in order
  bool accumulate;          // c holds the sum over k < k0
};
// Floats of scratch that one dot call may use.
enum { kDotScratch = kPanelDepth * 2 * kMaxVector + kRowBlock * (kPanelDepth + 16) };

// One tile of columns of an enumeration of orders.
struct OrdersTile {
  const float* terms;      // [num_terms][kTile], operands already rounded
  const uint8_t* orders;   // [num_orders][num_terms], sorted so that prefixes are shared
  const int32_t* rows;     // [num_orders], where each order's result goes
  int64_t num_terms, num_orders, columns;
  float* stack;            // [num_terms][kTile]
};
struct FingerprintTile {
  uint32_t first_word, num_words;  // of the vector's words (combine.cc): this tile's, an even number
  const float* reference;          // [kTile], or null: no distances
  uint64_t* sums;                  // [num_orders][2], by row
  uint32_t* linf;                  // [num_orders], bits of max |x - reference|, by row
};

#define MOEJAX_DECLARE_ISA(ISA)                                                                  \
  namespace ISA {                                                                                \
  void dot_bf16(const Product<uint16_t>&, float* scratch);                                       \
  void dot_f32(const Product<float>&, float* scratch);                                           \
  void round_terms(const float* x, float* y, int64_t n, bool round);                             \
  void combine(const float* terms, int64_t ld, const int32_t* order, int64_t num_terms,          \
               int32_t code, float* out, int64_t columns);                                       \
  void all_orders(const OrdersTile&, int accumulator, float* out, int64_t ld);                   \
  void all_orders_fingerprints(const OrdersTile&, int accumulator, const FingerprintTile&);      \
  }
MOEJAX_DECLARE_ISA(generic)
#if defined(MOEJAX_X86)
MOEJAX_DECLARE_ISA(avx2)
MOEJAX_DECLARE_ISA(avx512)
#endif

}  // namespace moejax
