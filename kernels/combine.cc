// The expert combine for one instruction set:  a0 = +0,  a_{j+1} = [R](a_j + [R]v[order[j]]),
// with R the BF16 rounding; or, for the exact accumulator, the FP32 rounding of the exact sum.
//
// Built without contraction.  R works on integers, so no rounding mode and no flush can touch it.
#include "kernels.h"
#include "vector.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace moejax {
namespace ISA {
namespace {

// Nearest-even, before the low half is cleared.  A NaN stays a NaN (quieted): the carry-free rule of
// the paper (section 2.2.3) would turn one whose payload sits in the low half into an infinity.
// kFinite: the caller knows that there is none.
template <bool kFinite>
INLINE Words round_bits(Floats v) {
  Words u = (Words)v;
#if VECTOR_BYTES == 64  // GCC does not fuse the test
  __mmask16 odd = _mm512_test_epi32_mask((__m512i)u, _mm512_set1_epi32(0x10000));
  Words rounded = (Words)_mm512_mask_add_epi32((__m512i)(u + 0x7fffu), odd, (__m512i)u,
                                               _mm512_set1_epi32(0x8000));
#else
  Words rounded = (u & 0x10000u) ? u + 0x8000u : u + 0x7fffu;
#endif
  if (kFinite) return rounded;
  return (Words)(v != v) ? (u | 0x400000u) : rounded;
}
template <bool kFinite = false>
INLINE Floats round_bf16(Floats v) {
  return (Floats)(round_bits<kFinite>(v) & 0xffff0000u);
}
template <int kAccumulator, bool kFinite = false>
INLINE Floats add(Floats sum, Floats term) {
  if constexpr (kAccumulator == kBfloat16) return round_bf16<kFinite>(sum + term);
  else return sum + term;
}

// ---- the exact sum

// FP32 rounding of the exact sum of n floats: a floating-point expansion in FP64 (Shewchuk 1997),
// which holds any sum of floats without error, rounded to odd at 53 bits and then to nearest at 24
// (Boldo and Melquiond 2008).
float exact_sum_of_expansion(const float* x, int n) {
  double parts[kMaxTerms];
  int count = 0;
  for (int i = 0; i < n; ++i) {
    double q = x[i];
    int kept = 0;
    for (int j = 0; j < count; ++j) {
      double s = q + parts[j], t = s - q, error = (q - (s - t)) + (parts[j] - t);
      if (error != 0) parts[kept++] = error;
      q = s;
    }
    if (q != 0) parts[kept++] = q;
    count = kept;
  }
  if (count == 0) return 0.0f;
  double high = parts[count - 1];
  for (int j = count - 2; j >= 0; --j) {
    double s = high + parts[j], error = parts[j] - (s - high);
    high = s;
    if (error == 0) continue;
    int64_t bits;
    memcpy(&bits, &high, 8);
    if (!(bits & 1)) bits += (error > 0) == (high > 0) ? 1 : -1;
    memcpy(&high, &bits, 8);
    break;
  }
  return (float)high;
}

// Terms in rows of stride ld.  Almost always the FP64 sum is already exact, and then its one
// rounding to FP32 is the answer.
void exact_sum(const float* terms, int64_t ld, int64_t num_terms, float* out, int64_t columns) {
  enum { kChunk = 64 };
  double sum[kChunk], lost[kChunk];
  for (int64_t c0 = 0; c0 < columns; c0 += kChunk) {
    int64_t n = columns - c0 < kChunk ? columns - c0 : (int64_t)kChunk;
    for (int64_t i = 0; i < n; ++i) sum[i] = lost[i] = 0;
    for (int64_t t = 0; t < num_terms; ++t) {
      const float* x = terms + t * ld + c0;
      for (int64_t i = 0; i < n; ++i) {
        double q = x[i], s = q + sum[i], d = s - q, error = (q - (s - d)) + (sum[i] - d);
        lost[i] += error < 0 ? -error : error;
        sum[i] = s;
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      bool finite = sum[i] - sum[i] == 0;
      if (lost[i] != 0 && finite) {
        float column[kMaxTerms];
        for (int64_t t = 0; t < num_terms; ++t) column[t] = terms[t * ld + c0 + i];
        out[c0 + i] = exact_sum_of_expansion(column, (int)num_terms);
      } else {
        out[c0 + i] = (float)sum[i];
      }
    }
  }
}

// ---- one order

template <bool kRoundOperand, int kAccumulator>
void sum_in_order(const float* terms, int64_t ld, const int32_t* order, int64_t num_terms,
                  float* out, int64_t columns) {
  // Two vectors at a time hide the latency of the dependent adds.
  int64_t i = 0;
  auto operand = [&](int64_t j, int64_t column) {
    Floats v = load(terms + order[j] * ld + column);
    return kRoundOperand ? round_bf16(v) : v;
  };
  for (; i + 2 * kLanes <= columns; i += 2 * kLanes) {
    Floats sum0 = {}, sum1 = {};
    for (int64_t j = 0; j < num_terms; ++j) {
      sum0 = add<kAccumulator>(sum0, operand(j, i));
      sum1 = add<kAccumulator>(sum1, operand(j, i + kLanes));
    }
    store(out + i, sum0);
    store(out + i + kLanes, sum1);
  }
  for (; i < columns; i += kLanes) {
    int64_t n = columns - i < kLanes ? columns - i : (int64_t)kLanes;
    float edge[kLanes] = {};
    Floats sum = {};
    for (int64_t j = 0; j < num_terms; ++j) {
      memcpy(edge, terms + order[j] * ld + i, n * sizeof(float));
      Floats v = load(edge);
      sum = add<kAccumulator>(sum, kRoundOperand ? round_bf16(v) : v);
    }
    store(edge, sum);
    memcpy(out + i, edge, n * sizeof(float));
  }
}

// ---- all orders: sums of shared prefixes on a stack, the last two adds fused

template <int kAccumulator, bool kFinite>
void first(const float* x, float* out, int64_t n) {
  Floats zero = {};
  for (int64_t i = 0; i < n; i += kLanes)
    store(out + i, add<kAccumulator, kFinite>(zero, load(x + i)));
}
template <int kAccumulator, bool kFinite>
void next(const float* sum, const float* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes)
    store(out + i, add<kAccumulator, kFinite>(load(sum + i), load(x + i)));
}

// The end of one order: the sum of all but its last two terms, and those two.  `sum` is null for two
// terms or one, `y` for one.
struct Last {
  const float *sum, *x, *y;
  template <int kAccumulator, bool kFinite>
  INLINE Floats before(const Last& l, int64_t i) {  // the last rounding, if there is one
    Floats s = l.sum ? load(l.sum + i) : (Floats){};
    if (!l.y) return s + load(l.x + i);
    return add<kAccumulator, kFinite>(s, load(l.x + i)) + load(l.y + i);
  }
};

// Walks the sorted orders of one tile.  `finish(row, last)` is called for each, `repeat(row,
// previous)` for one that is the same as the order before it.
template <int kAccumulator, bool kFinite, typename Finish, typename Repeat>
INLINE void walk(const OrdersTile& t, Finish finish, Repeat repeat) {
  int64_t k = t.num_terms, depth = k - 2;  // levels on the stack
  for (int64_t p = 0; p < t.num_orders; ++p) {
    const uint8_t* order = t.orders + k * p;
    int64_t shared = 0;
    if (p) while (shared < k && order[shared] == order[shared - k]) ++shared;
    if (shared == k) { repeat(t.rows[p], t.rows[p - 1]); continue; }
    for (int64_t level = shared < depth ? shared : depth; level < depth; ++level) {
      const float* term = t.terms + order[level] * kTile;
      float* sum = t.stack + level * kTile;
      if (level == 0) first<kAccumulator, kFinite>(term, sum, t.columns);
      else next<kAccumulator, kFinite>(sum - kTile, term, sum, t.columns);
    }
    const float* y = t.terms + order[k - 1] * kTile;
    if (k == 1) finish(t.rows[p], Last{nullptr, y, nullptr});
    else finish(t.rows[p], Last{depth > 0 ? t.stack + (depth - 1) * kTile : nullptr,
                                t.terms + order[k - 2] * kTile, y});
  }
}

// Two copies of an inner loop, so that the usual one has no branches.
#define WITHOUT_BRANCHES(last, loop)          \
  if (last.sum && last.y) {                   \
    loop                                      \
  } else {                                    \
    loop                                      \
  }

template <int kAccumulator, bool kFinite>
void write_all(const OrdersTile& t, float* out, int64_t ld) {
  int64_t n = t.columns, whole = n / kLanes * kLanes;
  walk<kAccumulator, kFinite>(
      t,
      [=](int64_t row, Last last) {
        float* o = out + row * ld;
        auto value = [&](int64_t i) {
          Floats v = Last::before<kAccumulator, kFinite>(last, i);
          return kAccumulator == kBfloat16 ? round_bf16<kFinite>(v) : v;
        };
        WITHOUT_BRANCHES(last, for (int64_t i = 0; i < whole; i += kLanes) store(o + i, value(i));)
        if (whole < n) {
          float edge[kLanes];
          store(edge, value(whole));
          memcpy(o + whole, edge, (n - whole) * sizeof(float));
        }
      },
      [=](int64_t row, int64_t previous) {
        memcpy(out + row * ld, out + previous * ld, n * sizeof(float));
      });
}

// ---- fingerprints

// Products of the low halves of 64-bit lanes.  GCC does not find the instruction by itself.
INLINE Longs multiply_low(Longs x, Longs y) {
#if VECTOR_BYTES == 64
  return (Longs)_mm512_maskz_mul_epu32(0xff, (__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
  return (Longs)_mm256_mul_epu32((__m256i)x, (__m256i)y);
#else
  return (x & 0xffffffffu) * (y & 0xffffffffu);
#endif
}

INLINE uint64_t sum_of(Longs x) {
  uint64_t lanes[kLanes / 2], total = 0;
  memcpy(lanes, &x, sizeof lanes);  // subscripts of x would extract lane by lane
  for (int i = 0; i < kLanes / 2; ++i) total += lanes[i];
  return total;
}

// Fingerprint of a vector: per stream the NH sum (Black et al. 1999) over words w with keys k by
// position, of (w[2j] + k[2j]) (w[2j+1] + k[2j+1]) mod 2^64.  The words of a tile of 1024 columns are
// the high halves of columns j and j + 512 side by side, and, keyed apart, their low halves: those of
// a BF16-valued vector are zero and need no work.  Pairs of words without a column have
// key 0 and add nothing.
struct Hash {
  enum { kWords = kTile / 2 };
  uint32_t keys[2][2][kWords];  // [stream][high, low]
  uint64_t low_of_bf16[2];      // what low halves of zero add to each stream

  explicit Hash(const FingerprintTile& f) {
    for (uint32_t stream = 0; stream < 2; ++stream) {
      for (uint32_t half = 0; half < 2; ++half)
        for (uint32_t i = 0; i < kWords; ++i) {  // the finaliser of MurmurHash3 over a counter
          uint32_t x = 4 * (f.first_word + i) + 2 * half + stream + 1;
          x = (x ^ x >> 16) * 0x85ebca6bu;
          x = (x ^ x >> 13) * 0xc2b2ae35u;
          keys[stream][half][i] = i < f.num_words ? x ^ x >> 16 : 0;
        }
      low_of_bf16[stream] = 0;
      for (uint32_t i = 0; i < kWords; i += 2)
        low_of_bf16[stream] += (uint64_t)keys[stream][1][i] * keys[stream][1][i + 1];
    }
  }

  // value(i): the vector's bits at columns i...  of the tile; without kLow, and finite, their low halves
  // may hold anything.
  template <bool kLow, bool kFinite, typename Value>
  INLINE void fingerprint(const Hash& h, const FingerprintTile& f, int64_t row, Value value) {
    Longs sum[2] = {{}, {}};
    Ints largest = {};
    for (int64_t i = 0; i < f.num_words; i += kLanes) {
      Words u[2] = {value(i), value(i + kWords)};
      if (!kFinite)  // every NaN counts as one pattern
        for (int side = 0; side < 2; ++side)
          u[side] = (u[side] & 0x7fffffffu) > 0x7f800000u ? (Words){} + 0x7fc00000u : u[side];
      Words high = (u[0] >> 16) | (u[1] & 0xffff0000u), low = (u[0] & 0xffffu) | (u[1] << 16);
      for (int s = 0; s < 2; ++s) {
        Longs keyed = (Longs)(high + load(h.keys[s][0] + i));
        sum[s] += multiply_low(keyed, keyed >> 32);
        if (!kLow) continue;
        keyed = (Longs)(low + load(h.keys[s][1] + i));
        sum[s] += multiply_low(keyed, keyed >> 32);
      }
      if (!f.reference) continue;
      for (int side = 0; side < 2; ++side) {
        Floats v = (Floats)(kLow ? u[side] : u[side] & 0xffff0000u);
        Ints distance = (Ints)(v - load(f.reference + i + side * kWords)) & 0x7fffffff;
        largest = distance > largest ? distance : largest;  // of bits: a NaN is the largest
      }
    }
    for (int s = 0; s < 2; ++s)
      f.sums[2 * row + s] = sum_of(sum[s]) + (kLow ? 0 : h.low_of_bf16[s]);
    int32_t most = 0;
    if (f.reference)
      for (int i = 0; i < kLanes; ++i) most = largest[i] > most ? largest[i] : most;
    f.linf[row] = (uint32_t)most;
  }
};

void repeat_fingerprint(const FingerprintTile& f, int64_t row, int64_t previous) {
  f.sums[2 * row] = f.sums[2 * previous];
  f.sums[2 * row + 1] = f.sums[2 * previous + 1];
  f.linf[row] = f.linf[previous];
}

template <int kAccumulator, bool kFinite>
void fingerprint_all(const OrdersTile& t, const FingerprintTile& f) {
  Hash hash(f);
  enum { kLow = kAccumulator != kBfloat16 };
  walk<kAccumulator, kFinite>(
      t,
      [&](int64_t row, Last last) {
        auto value = [&](int64_t i) {
          if (i >= t.columns) return (Words){};
          Floats v = Last::before<kAccumulator, kFinite>(last, i);
          if (kLow) return (Words)v;
          return kFinite ? round_bits<true>(v) : (Words)round_bf16<false>(v);
        };
        WITHOUT_BRANCHES(last, (Hash::fingerprint<kLow, kFinite>(hash, f, row, value));)
      },
      [&](int64_t row, int64_t previous) { repeat_fingerprint(f, row, previous); });
}

// Whether no sum of the tile's operands can overflow: each below 2^123, at most 16 of them.
bool stays_finite(const OrdersTile& t) {
  uint32_t largest = 0;
  for (int64_t j = 0; j < t.num_terms; ++j)
    for (int64_t i = 0; i < t.columns; ++i) {
      uint32_t u;
      memcpy(&u, t.terms + j * kTile + i, 4);
      u &= 0x7fffffffu;
      largest = u > largest ? u : largest;
    }
  return largest < 250u << 23;
}

}  // namespace

void round_terms(const float* x, float* y, int64_t n, bool round) {
  if (!round) { memcpy(y, x, n * sizeof(float)); return; }
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, round_bf16(load(x + i)));
  if (i < n) {
    float edge[kLanes] = {};
    memcpy(edge, x + i, (n - i) * sizeof(float));
    store(edge, round_bf16(load(edge)));
    memcpy(y + i, edge, (n - i) * sizeof(float));
  }
}

void combine(const float* terms, int64_t ld, const int32_t* order, int64_t num_terms, int32_t code,
             float* out, int64_t columns) {
  switch (code) {
    case 0: return sum_in_order<false, kFloat32>(terms, ld, order, num_terms, out, columns);
    case 1: return sum_in_order<true, kFloat32>(terms, ld, order, num_terms, out, columns);
    case 2: return sum_in_order<false, kBfloat16>(terms, ld, order, num_terms, out, columns);
    case 3: return sum_in_order<true, kBfloat16>(terms, ld, order, num_terms, out, columns);
  }
  float rounded[kMaxTerms * kTile];  // the exact sum of the listed terms has no order
  for (int64_t c0 = 0; c0 < columns; c0 += kTile) {
    int64_t n = columns - c0 < kTile ? columns - c0 : (int64_t)kTile;
    for (int64_t j = 0; j < num_terms; ++j)
      round_terms(terms + order[j] * ld + c0, rounded + j * kTile, n, code & 1);
    exact_sum(rounded, kTile, num_terms, out + c0, n);
  }
}

void all_orders(const OrdersTile& t, int accumulator, float* out, int64_t ld) {
  if (accumulator == kFloat32) return write_all<kFloat32, true>(t, out, ld);  // nothing to round
  if (accumulator == kBfloat16)
    return stays_finite(t) ? write_all<kBfloat16, true>(t, out, ld)
                           : write_all<kBfloat16, false>(t, out, ld);
  exact_sum(t.terms, kTile, t.num_terms, t.stack, t.columns);
  for (int64_t p = 0; p < t.num_orders; ++p)
    memcpy(out + p * ld, t.stack, t.columns * sizeof(float));
}

void all_orders_fingerprints(const OrdersTile& t, int accumulator, const FingerprintTile& f) {
  bool finite = stays_finite(t);
  if (accumulator == kFloat32)
    return finite ? fingerprint_all<kFloat32, true>(t, f) : fingerprint_all<kFloat32, false>(t, f);
  if (accumulator == kBfloat16)
    return finite ? fingerprint_all<kBfloat16, true>(t, f) : fingerprint_all<kBfloat16, false>(t, f);
  exact_sum(t.terms, kTile, t.num_terms, t.stack, t.columns);
  Hash::fingerprint<true, false>(Hash(f), f, 0,
                                 [&](int64_t i) {
                                   return i < t.columns ? (Words)load(t.stack + i) : (Words){};
                                 });
  for (int64_t p = 1; p < t.num_orders; ++p) repeat_fingerprint(f, p, 0);
}

}  // namespace ISA
}  // namespace moejax
