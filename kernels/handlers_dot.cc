// XLA FFI handlers of the canonical dots.  Every operand may carry leading batch dimensions, each
// either the result's or 1: jax.ffi's vmap_method="expand_dims" makes exactly these.
#include <string>

#include "runtime.h"

namespace moejax {
namespace {

template <typename Element> void run(const Product<Element>& p);
template <> void run(const Product<uint16_t>& p) { kernels().dot_bf16(p, scratch(kDotScratch)); }
template <> void run(const Product<float>& p) { kernels().dot_f32(p, scratch(kDotScratch)); }

// Several products, each cut into strips of columns, run on the pool.
template <typename Element>
void run_all(ffi::ThreadPool pool, const std::vector<Product<Element>>& products) {
  int64_t threads = pool.num_threads(), work = 0, elements = 0, widest = 0;
  for (const auto& p : products) {
    work += p.rows * p.k1 * (p.n1 - p.n0);
    elements += p.k1 * (p.n1 - p.n0);
    widest = std::max(widest, p.n1 - p.n0);
  }
  if (widest == 0) return;
  // Small work is not worth waking a thread: about 10 microseconds, in multiply-adds or in elements of
  // W read.  Strips of one large product repeat the packing of a; in small ones, and over many
  // products, finer strips even out the load when a thread wakes late.
  bool serial = work + 8 * elements < (1 << 21);
  int64_t strips = 1;
  if (!serial) {
    int64_t wanted = products.size() == 1 && work > (1 << 25) ? threads : 2 * threads;
    strips = std::max<int64_t>(1, (wanted + products.size() - 1) / products.size());
  }
  int64_t step = std::max<int64_t>(64, round_up((widest + strips - 1) / strips, 64));
  strips = (widest + step - 1) / step;
  auto strip = [&products, strips, step](int64_t i) {
    Product<Element> p = products[i / strips];
    int64_t n0 = p.n0 + i % strips * step;
    if (n0 >= p.n1) return;
    p.n1 = std::min(p.n1, n0 + step);
    p.n0 = n0;
    run(p);
  };
  int64_t chunks = strips * (int64_t)products.size();
  if (serial) {
    IeeeScope ieee;
    for (int64_t i = 0; i < chunks; ++i) strip(i);
  } else {
    parallel_chunks(pool, chunks, strip);
  }
}

// Rows [first, last) with valid lengths of their own along k (values) or n (keys, transposed W):
// what all of them share in one product, then each half goes on alone.
template <typename Element>
void ragged(Product<Element> p, const int32_t* length, int64_t full) {
  if (p.rows == 0) return;
  int64_t shortest = full;
  for (int64_t m = 0; m < p.rows; ++m)
    shortest = std::min<int64_t>(shortest, std::max<int32_t>(0, length[m]));
  Product<Element> shared = p;
  if (p.transposed) {
    shared.n1 = std::min(p.n1, std::max(p.n0, shortest));
    if (shared.n1 > shared.n0) run(shared);
    p.n0 = shared.n1;
    if (p.rows == 1) {
      std::fill(p.c[0] + p.n0, p.c[0] + p.n1, 0.0f);
      return;
    }
    if (p.n0 >= p.n1) return;
  } else {
    shared.k1 = shortest;
    if (shared.k1 > shared.k0 || !shared.accumulate) run(shared);
    p.k0 = std::max(p.k0, shortest);
    p.accumulate = true;
    if (p.rows == 1 || p.k0 >= full) return;
  }
  int64_t half = p.rows / 2;
  Product<Element> rest = p;
  p.rows = half;
  rest.a += half;
  rest.c += half;
  rest.rows -= half;
  ragged(p, length, full);
  ragged(rest, length + half, full);
}

// a [*B, M, K], w [*B, K, N] (or [*B, N, K] if transposed), lengths [*B, M] (or none) -> [*B, M, N].
template <typename Element>
ffi::Error dot(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer w, const int32_t* lengths,
               Dims length_dims, bool transposed, bool blocked, ffi::ResultBuffer<ffi::F32> out) {
  Dims ad = a.dimensions(), wd = w.dimensions(), od = out->dimensions();
  if (ad.size() < 2 || wd.size() < 2 || od.size() < 2) return invalid("dot: operands need two axes");
  int64_t m = ad[ad.size() - 2], k = ad[ad.size() - 1];
  int64_t n = transposed ? wd[wd.size() - 2] : wd[wd.size() - 1];
  std::vector<int64_t> lead = leading(od, 2);
  Batch of_a(lead, ad, 2), of_w(lead, wd, 2);
  if (!of_a.valid() || !of_w.valid() || (transposed ? wd[wd.size() - 1] : wd[wd.size() - 2]) != k ||
      od[od.size() - 2] != m || od[od.size() - 1] != n)
    return invalid("dot: shapes do not fit");
  const Element* A = (const Element*)a.untyped_data();
  const Element* W = (const Element*)w.untyped_data();
  float* C = out->typed_data();
  int64_t batches = count(od, 0, od.size() - 2), rows = batches * m;
  if (rows == 0 || n == 0) return ffi::Error::Success();
  std::vector<const Element*> ar(rows);
  std::vector<float*> cr(rows);
  for (int64_t b = 0; b < batches; ++b) {
    const Element* from = A + of_a(b) * m * k;
    for (int64_t i = 0; i < m; ++i) {
      ar[b * m + i] = from + i * k;
      cr[b * m + i] = C + (b * m + i) * n;
    }
  }
  Product<Element> p = {};
  p.rows = m;
  p.k1 = k;
  p.n1 = n;
  p.ld = transposed ? k : n;
  p.transposed = transposed;
  p.blocked = blocked;
  auto of_batch = [&](int64_t b) {
    Product<Element> q = p;
    q.a = ar.data() + b * m;
    q.c = cr.data() + b * m;
    q.w = W + of_w(b) * k * n;
    return q;
  };
  if (lengths) {
    Batch of_lengths(lead, length_dims, 1);
    if (!of_lengths.valid() || length_dims[length_dims.size() - 1] != m)
      return invalid("batched_dot: lengths do not fit");
    parallel_chunks(pool, batches, [&](int64_t b) {
      ragged(of_batch(b), lengths + of_lengths(b) * m, transposed ? n : k);
    });
    return ffi::Error::Success();
  }
  std::vector<Product<Element>> products;
  if (of_w.shared()) {  // a batch of rows is only more rows
    p.rows = rows;
    m = rows;
    products.push_back(of_batch(0));
  } else {
    for (int64_t b = 0; b < batches; ++b) products.push_back(of_batch(b));
  }
  run_all(pool, products);
  return ffi::Error::Success();
}

ffi::Error dot_bf16(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer w, bool blocked,
                    ffi::ResultBuffer<ffi::F32> out) {
  return dot<uint16_t>(pool, a, w, nullptr, {}, false, blocked, out);
}
ffi::Error dot_f32(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer w,
                   ffi::ResultBuffer<ffi::F32> out) {
  return dot<float>(pool, a, w, nullptr, {}, false, false, out);
}
ffi::Error batched_dot(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer w,
                       ffi::Buffer<ffi::S32> lengths, bool transposed,
                       ffi::ResultBuffer<ffi::F32> out) {
  return dot<uint16_t>(pool, a, w, lengths.typed_data(), lengths.dimensions(), transposed, false, out);
}

// x [*B, T, S or 1, K], w [*B, E, K, N], ids [*B, T, S] -> [*B, T, S, N].  One row of x per token
// (third axis 1) or per slot (S).  An id outside 0..E-1 gives a row of zeros.
ffi::Error grouped_dot(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                       ffi::Buffer<ffi::S32> ids, ffi::ResultBuffer<ffi::F32> out) {
  Dims xd = x.dimensions(), wd = w.dimensions(), id = ids.dimensions(), od = out->dimensions();
  if (xd.size() < 3 || wd.size() < 3 || id.size() < 2 || od.size() < 3)
    return invalid("grouped_dot: operands have too few axes");
  std::vector<int64_t> lead = leading(od, 3);
  Batch of_x(lead, xd, 3), of_w(lead, wd, 3), of_ids(lead, id, 2);
  int64_t experts = wd[wd.size() - 3], k = wd[wd.size() - 2], n = wd[wd.size() - 1];
  int64_t tokens = od[od.size() - 3], slots = od[od.size() - 2], x_slots = xd[xd.size() - 2];
  if (!of_x.valid() || !of_w.valid() || !of_ids.valid() || xd[xd.size() - 1] != k ||
      (x_slots != 1 && x_slots != slots) || xd[xd.size() - 3] != tokens ||
      id[id.size() - 2] != tokens || id[id.size() - 1] != slots || od[od.size() - 1] != n)
    return invalid("grouped_dot: shapes do not fit");
  const uint16_t *X = (const uint16_t*)x.untyped_data(), *W = (const uint16_t*)w.untyped_data();
  const int32_t* I = ids.typed_data();
  float* Y = out->typed_data();
  int64_t batches = count(od, 0, od.size() - 3), weights = count(wd, 0, wd.size() - 3);
  // Rows by expert.  With shared weights the experts of all batches are the same ones.
  std::vector<std::vector<const uint16_t*>> ar(weights * experts);
  std::vector<std::vector<float*>> cr(weights * experts);
  for (int64_t b = 0; b < batches; ++b) {
    int64_t base = of_w(b) * experts;
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t s = 0; s < slots; ++s) {
        float* y = Y + ((b * tokens + t) * slots + s) * n;
        int32_t e = I[(of_ids(b) * tokens + t) * slots + s];
        if (e < 0 || e >= experts) { std::fill(y, y + n, 0.0f); continue; }
        int64_t row = (of_x(b) * tokens + t) * x_slots + (x_slots == 1 ? 0 : s);
        ar[base + e].push_back(X + row * k);
        cr[base + e].push_back(y);
      }
  }
  std::vector<Product<uint16_t>> products;
  for (int64_t e = 0; e < weights * experts; ++e) {
    if (ar[e].empty()) continue;
    Product<uint16_t> p = {};
    p.a = ar[e].data();
    p.c = cr[e].data();
    p.rows = (int64_t)ar[e].size();
    p.k1 = k;
    p.n1 = n;
    p.w = W + e * k * n;
    p.ld = n;
    products.push_back(p);
  }
  if (!products.empty() && n > 0) run_all(pool, products);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace moejax

using xla::ffi::AnyBuffer;
using xla::ffi::Buffer;
using xla::ffi::Ffi;
using xla::ffi::ThreadPool;

// The macro sets no visibility; the library hides everything by default.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoejaxDot, moejax::dot_bf16,
               Ffi::Bind().Ctx<ThreadPool>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                   .Attr<bool>("blocked").Ret<Buffer<xla::ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MoejaxDotF32, moejax::dot_f32,
               Ffi::Bind().Ctx<ThreadPool>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                   .Ret<Buffer<xla::ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MoejaxBatchedDot, moejax::batched_dot,
               Ffi::Bind().Ctx<ThreadPool>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                   .Arg<Buffer<xla::ffi::S32>>().Attr<bool>("transposed")
                   .Ret<Buffer<xla::ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MoejaxGroupedDot, moejax::grouped_dot,
               Ffi::Bind().Ctx<ThreadPool>().Arg<AnyBuffer>().Arg<AnyBuffer>()
                   .Arg<Buffer<xla::ffi::S32>>().Ret<Buffer<xla::ffi::F32>>());
