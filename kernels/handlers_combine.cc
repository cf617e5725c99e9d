// XLA FFI handlers of the expert combine.  Leading batch dimensions as in handlers_dot.cc.
#include <cstring>
#include <string>
#include <utility>

#include "runtime.h"

namespace moejax {
namespace {

enum { kRowsPerChunk = 8 };

std::string bad_term(const char* what, int64_t term, int64_t terms) {
  return std::string(what) + ": an order names term " + std::to_string(term) + " of " +
         std::to_string(terms);
}

// terms [*B, K, H], orders [*B, K], codes [*B] -> [*B, H].
ffi::Error combine(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> terms, ffi::Buffer<ffi::S32> orders,
                   ffi::Buffer<ffi::S32> codes, ffi::ResultBuffer<ffi::F32> out) {
  Dims td = terms.dimensions(), od = orders.dimensions(), rd = out->dimensions();
  if (td.size() < 2 || od.size() < 1 || rd.size() < 1)
    return invalid("combine: operands have too few axes");
  std::vector<int64_t> lead = leading(rd, 1);
  Batch of_terms(lead, td, 2), of_orders(lead, od, 1), of_codes(lead, codes.dimensions(), 0);
  int64_t k = td[td.size() - 2], h = td[td.size() - 1];
  if (!of_terms.valid() || !of_orders.valid() || !of_codes.valid() || od[od.size() - 1] != k ||
      rd[rd.size() - 1] != h)
    return invalid("combine: shapes do not fit");
  if (k > kMaxTerms) return invalid("combine: at most 16 terms");
  const float* T = terms.typed_data();
  const int32_t *O = orders.typed_data(), *codes_data = codes.typed_data();
  float* out_data = out->typed_data();
  int64_t rows = count(rd, 0, rd.size() - 1);
  for (int64_t i = 0; i < (int64_t)orders.element_count(); ++i)
    if (O[i] < 0 || O[i] >= k) return invalid(bad_term("combine", O[i], k));
  for (int64_t i = 0; i < (int64_t)codes.element_count(); ++i)
    if (codes_data[i] < 0 || codes_data[i] >= kCodes)
      return invalid("combine: unknown contract code " + std::to_string(codes_data[i]));
  auto chunk = [&](int64_t i) {
    for (int64_t r = i * kRowsPerChunk; r < std::min(rows, (i + 1) * kRowsPerChunk); ++r)
      kernels().combine(T + of_terms(r) * k * h, h, O + of_orders(r) * k, k,
                        codes_data[of_codes(r)], out_data + r * h, h);
  };
  int64_t chunks = (rows + kRowsPerChunk - 1) / kRowsPerChunk;
  parallel_chunks(pool, chunks, chunk);
  return ffi::Error::Success();
}

// The orders of one enumeration, sorted so that neighbours share prefixes.
struct SortedOrders {
  std::vector<uint8_t> orders;  // [P][K]
  std::vector<int32_t> rows;    // [P], where each stood
};

// First-pair symmetry: 0 + x and x + y = y + x are exact about their bits unless the first step
// rounds an operand that has not been rounded (FP32 operands, BF16 accumulator).
SortedOrders sort_orders(const int32_t* orders, int64_t p, int64_t k, bool symmetric) {
  std::vector<std::pair<uint64_t, int32_t>> keys(p);
  for (int64_t i = 0; i < p; ++i) {
    const int32_t* q = orders + i * k;
    uint64_t key = 0;
    bool swap = symmetric && k > 1 && q[0] > q[1];
    for (int64_t j = 0; j < k; ++j) key = key << 4 | (uint64_t)q[swap && j < 2 ? 1 - j : j];
    keys[i] = {key, (int32_t)i};
  }
  if (!std::is_sorted(keys.begin(), keys.end())) std::sort(keys.begin(), keys.end());
  SortedOrders sorted = {std::vector<uint8_t>(p * k), std::vector<int32_t>(p)};
  for (int64_t i = 0; i < p; ++i) {
    sorted.rows[i] = keys[i].second;
    for (int64_t j = 0; j < k; ++j)
      sorted.orders[i * k + j] = keys[i].first >> (4 * (k - 1 - j)) & 15;
  }
  return sorted;
}

// Calls tile(b, h0, n, OrdersTile, code) for every batch entry and tile of columns, on the pool.
template <typename Tile>
ffi::Error enumerate(ffi::ThreadPool pool, const char* what, ffi::Buffer<ffi::F32> terms,
                     ffi::Buffer<ffi::S32> orders, ffi::Buffer<ffi::S32> codes,
                     const std::vector<int64_t>& lead, int64_t p, Tile tile) {
  Dims td = terms.dimensions(), od = orders.dimensions();
  if (td.size() < 2 || od.size() < 2) return invalid(std::string(what) + ": too few axes");
  Batch of_terms(lead, td, 2), of_orders(lead, od, 2), of_codes(lead, codes.dimensions(), 0);
  int64_t k = td[td.size() - 2], h = td[td.size() - 1];
  if (!of_terms.valid() || !of_orders.valid() || !of_codes.valid() || od[od.size() - 1] != k ||
      od[od.size() - 2] != p)
    return invalid(std::string(what) + ": shapes do not fit");
  if (k < 1 || k > kMaxTerms) return invalid(std::string(what) + ": 1 to 16 terms");
  const int32_t *O = orders.typed_data(), *codes_data = codes.typed_data();
  for (int64_t i = 0; i < (int64_t)orders.element_count(); ++i)
    if (O[i] < 0 || O[i] >= k) return invalid(bad_term(what, O[i], k));
  int64_t batches = 1;
  for (int64_t d : lead) batches *= d;
  // Two sorted forms per list of orders: with and without first-pair symmetry.
  int64_t lists = (int64_t)orders.element_count() / std::max<int64_t>(1, p * k);
  std::vector<SortedOrders> sorted(2 * lists);
  for (int64_t b = 0; b < batches; ++b) {
    int32_t code = codes_data[of_codes(b)];
    if (code < 0 || code >= kCodes)
      return invalid(std::string(what) + ": unknown contract code " + std::to_string(code));
    bool symmetric = rounds_operand(code) || accumulator(code) != kBfloat16;
    SortedOrders& s = sorted[2 * of_orders(b) + symmetric];
    if (s.rows.empty()) s = sort_orders(O + of_orders(b) * p * k, p, k, symmetric);
  }
  int64_t tiles = (h + kTile - 1) / kTile;
  if (p == 0 || tiles == 0) return ffi::Error::Success();
  const float* T = terms.typed_data();
  parallel_chunks(pool, batches * tiles, [&](int64_t i) {
    int64_t b = i / tiles, h0 = i % tiles * kTile, n = std::min<int64_t>(kTile, h - h0);
    int32_t code = codes_data[of_codes(b)];
    const SortedOrders& s =
        sorted[2 * of_orders(b) + (rounds_operand(code) || accumulator(code) != kBfloat16)];
    float* local = scratch((2 * k + 1) * kTile);
    for (int64_t j = 0; j < k; ++j) {
      float* row = local + j * kTile;
      kernels().round_terms(T + (of_terms(b) * k + j) * h + h0, row, n, rounds_operand(code));
      std::memset(row + n, 0, (kTile - n) * sizeof(float));
    }
    OrdersTile t = {local, s.orders.data(), s.rows.data(), k, p, n, local + k * kTile};
    tile(b, h0, n, t, accumulator(code));
  });
  return ffi::Error::Success();
}

// terms [*B, K, H], orders [*B, P, K], codes [*B] -> [*B, P, H].
ffi::Error all_orders(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> terms,
                      ffi::Buffer<ffi::S32> orders, ffi::Buffer<ffi::S32> codes,
                      ffi::ResultBuffer<ffi::F32> out) {
  Dims rd = out->dimensions();
  if (rd.size() < 2) return invalid("combine_all_orders: too few axes");
  int64_t p = rd[rd.size() - 2], h = rd[rd.size() - 1];
  float* R = out->typed_data();
  return enumerate(pool, "combine_all_orders", terms, orders, codes, leading(rd, 2), p,
                   [=](int64_t b, int64_t h0, int64_t, const OrdersTile& t, int accumulator) {
                     kernels().all_orders(t, accumulator, R + b * p * h + h0, h);
                   });
}

// As above with reference [*B, H], or [*B, 0] for none -> fingerprints u32 [*B, P, 4] and largest
// distance [*B, P], zero without a reference.
ffi::Error fingerprints(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> terms,
                        ffi::Buffer<ffi::S32> orders, ffi::Buffer<ffi::S32> codes,
                        ffi::Buffer<ffi::F32> reference, ffi::ResultBuffer<ffi::U32> prints,
                        ffi::ResultBuffer<ffi::F32> linf) {
  Dims ld = linf->dimensions(), td = terms.dimensions(), fd = reference.dimensions();
  if (ld.size() < 1 || td.size() < 2 || fd.size() < 1)
    return invalid("all_orders_fingerprints: too few axes");
  int64_t p = ld[ld.size() - 1], h = td[td.size() - 1], tiles = (h + kTile - 1) / kTile;
  std::vector<int64_t> lead = leading(ld, 1);
  Batch of_reference(lead, fd, 1);
  int64_t reference_width = fd[fd.size() - 1];
  if (!of_reference.valid() || (reference_width != h && reference_width != 0))
    return invalid("all_orders_fingerprints: the reference does not fit");
  int64_t batches = count(ld, 0, ld.size() - 1);
  std::vector<uint64_t> sums(batches * tiles * p * 2);
  std::vector<uint32_t> largest(batches * tiles * p);
  const float* F = reference.typed_data();
  ffi::Error error = enumerate(
      pool, "all_orders_fingerprints", terms, orders, codes, lead, p,
      [&](int64_t b, int64_t h0, int64_t n, const OrdersTile& t, int accumulator) {
        float local[kTile] = {};
        if (reference_width) std::memcpy(local, F + of_reference(b) * h + h0, n * sizeof(float));
        int64_t at = (b * tiles + h0 / kTile) * p;
        FingerprintTile f = {(uint32_t)(h0 / 2), (uint32_t)round_up(std::min<int64_t>(n, kTile / 2), 2),
                             reference_width ? local : nullptr, sums.data() + 2 * at,
                             largest.data() + at};
        OrdersTile padded = t;  // with zeros, which add nothing
        padded.columns = round_up(n, kMaxVector);
        kernels().all_orders_fingerprints(padded, accumulator, f);
      });
  if (error.failure()) return error;
  for (int64_t b = 0; b < batches; ++b)
    for (int64_t r = 0; r < p; ++r) {
      uint64_t total[2] = {0, 0};
      uint32_t most = 0;
      for (int64_t t = 0; t < tiles; ++t) {
        int64_t at = (b * tiles + t) * p + r;
        for (int s = 0; s < 2; ++s) total[s] += sums[2 * at + s];
        most = std::max(most, largest[at]);
      }
      std::memcpy(prints->typed_data() + 4 * (b * p + r), total, 16);
      if (most > 0x7f800000u) most = 0x7fc00000u;
      std::memcpy(linf->typed_data() + b * p + r, &most, 4);
    }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace moejax

using xla::ffi::Buffer;
using xla::ffi::F32;
using xla::ffi::Ffi;
using xla::ffi::S32;
using xla::ffi::ThreadPool;
using xla::ffi::U32;

// The macro sets no visibility; the library hides everything by default.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoejaxCombine, moejax::combine,
               Ffi::Bind().Ctx<ThreadPool>().Arg<Buffer<F32>>().Arg<Buffer<S32>>()
                   .Arg<Buffer<S32>>().Ret<Buffer<F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MoejaxAllOrders, moejax::all_orders,
               Ffi::Bind().Ctx<ThreadPool>().Arg<Buffer<F32>>().Arg<Buffer<S32>>()
                   .Arg<Buffer<S32>>().Ret<Buffer<F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MoejaxFingerprints, moejax::fingerprints,
               Ffi::Bind().Ctx<ThreadPool>().Arg<Buffer<F32>>().Arg<Buffer<S32>>()
                   .Arg<Buffer<S32>>().Arg<Buffer<F32>>().Ret<Buffer<U32>>().Ret<Buffer<F32>>());
