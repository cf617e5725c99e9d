// The canonical dot for one instruction set.
//
//   c[m, n] = fold over k = 0..K-1 of fl(c + fl(a[m, k] * w[k, n])),  c = +0 at first,  in FP32.
//
// BF16 operands (the default): every product is exact, so a fused multiply-add gives the same bits
// and the compiler may use it.  FP32 operands (-DDOT_F32, built without contraction): the product is
// rounded, then added.  The result does not depend on tiling, threads or the other rows: an FP32
// accumulator may be stored and reloaded between panels without changing a bit.
#include "kernels.h"
#include "vector.h"

namespace moejax {
namespace ISA {
namespace {

#if defined(DOT_F32)
typedef float Element;
#else
typedef uint16_t Element;
#endif
enum {
  kPanelWidth = 2 * kLanes,
  kRowStride = kPanelDepth + 16  // of the packed rows of a; not a power of two
};

// ---- few rows: a strip of c stays in L1 while rows of W stream past it

// c += a few rows of W, kWide vectors of columns at a time so that a broadcast of a serves them all.
template <int kRows, int kDeep, int kWide>
INLINE int64_t add_columns(const float* const* a, float* const* c, const Element* w, int64_t ld,
                           int64_t j, int64_t n) {
  for (; j + kWide * kLanes <= n; j += kWide * kLanes) {
    Floats wv[kDeep][kWide];
    for (int u = 0; u < kDeep; ++u) {
      for (int i = 0; i < kWide; ++i) wv[u][i] = load(w + u * ld + j + i * kLanes);
      // With few rows the loop waits for memory: ask for the rows of W that come next.
      if (kRows <= 2) __builtin_prefetch(w + (u + kDeep) * ld + j);
    }
    for (int m = 0; m < kRows; ++m) {
      Floats sum[kWide];
      for (int i = 0; i < kWide; ++i) sum[i] = load(c[m] + j + i * kLanes);
      for (int u = 0; u < kDeep; ++u)
        for (int i = 0; i < kWide; ++i) sum[i] += a[m][u] * wv[u][i];
      for (int i = 0; i < kWide; ++i) store(c[m] + j + i * kLanes, sum[i]);
    }
  }
  return j;
}

template <int kRows, int kDeep>
INLINE void add_rows_of_w(const float* const* a, float* const* c, const Element* w, int64_t ld,
                          int64_t n) {
  int64_t j = add_columns<kRows, kDeep, 2>(a, c, w, ld, 0, n);
  j = add_columns<kRows, kDeep, 1>(a, c, w, ld, j, n);
  for (; j < n; ++j)
    for (int m = 0; m < kRows; ++m) {
      float sum = c[m][j];
      for (int u = 0; u < kDeep; ++u) sum += a[m][u] * widen(w[u * ld + j]);
      c[m][j] = sum;
    }
}

template <int kRows>
void stream(const Product<Element>& p) {
  enum { kDeep = VECTOR_BYTES == 64 || kRows <= 2 ? 8 : 4, kStrip = 1024 };
  float a[kRows][kPanelDepth], sums[kRows][kStrip];
  for (int64_t s = p.n0; s < p.n1; s += kStrip) {
    int64_t n = p.n1 - s < kStrip ? p.n1 - s : (int64_t)kStrip;
    for (int m = 0; m < kRows; ++m) {
      if (p.accumulate) memcpy(sums[m], p.c[m] + s, n * sizeof(float));
      else memset(sums[m], 0, n * sizeof(float));
    }
    for (int64_t k0 = p.k0; k0 < p.k1; k0 += kPanelDepth) {
      int64_t depth = p.k1 - k0 < kPanelDepth ? p.k1 - k0 : (int64_t)kPanelDepth;
      for (int m = 0; m < kRows; ++m)
        for (int64_t k = 0; k < depth; ++k) a[m][k] = widen(p.a[m][k0 + k]);
      const float* ap[kRows];
      float* cp[kRows];
      for (int m = 0; m < kRows; ++m) cp[m] = sums[m];
      int64_t k = 0;
      for (; k + kDeep <= depth; k += kDeep) {
        for (int m = 0; m < kRows; ++m) ap[m] = a[m] + k;
        add_rows_of_w<kRows, kDeep>(ap, cp, p.w + (k0 + k) * p.ld + s, p.ld, n);
      }
      for (; k < depth; ++k) {
        for (int m = 0; m < kRows; ++m) ap[m] = a[m] + k;
        add_rows_of_w<kRows, 1>(ap, cp, p.w + (k0 + k) * p.ld + s, p.ld, n);
      }
      if (!p.blocked) continue;
      for (int m = 0; m < kRows; ++m) {
        float* c = p.c[m] + s;
        if (k0 == p.k0) memcpy(c, sums[m], n * sizeof(float));
        else for (int64_t j = 0; j < n; ++j) c[j] = c[j] + sums[m][j];
        memset(sums[m], 0, n * sizeof(float));
      }
    }
    if (!p.blocked)
      for (int m = 0; m < kRows; ++m) memcpy(p.c[m] + s, sums[m], n * sizeof(float));
  }
}

// ---- many rows: a register tile of kRows x kPanelWidth over packed FP32 panels

enum Start { kFromZero, kFromC, kAddToC };

template <int kRows>
INLINE void tile(const float* a, const float* panel, int64_t depth, float* const* c, int64_t j,
                 int64_t width, Start start) {
  Floats sum[kRows][2];
  float edge[kPanelWidth];
  bool whole = width == kPanelWidth;
  for (int m = 0; m < kRows; ++m) {
    if (start != kFromC) {
      sum[m][0] = sum[m][1] = (Floats){};
    } else if (whole) {
      sum[m][0] = load(c[m] + j);
      sum[m][1] = load(c[m] + j + kLanes);
    } else {
      memset(edge, 0, sizeof edge);
      memcpy(edge, c[m] + j, width * sizeof(float));
      sum[m][0] = load(edge);
      sum[m][1] = load(edge + kLanes);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Floats w0 = load(panel + k * kPanelWidth), w1 = load(panel + k * kPanelWidth + kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      float x = a[m * kRowStride + k];
      sum[m][0] += x * w0;
      sum[m][1] += x * w1;
    }
  }
  for (int m = 0; m < kRows; ++m) {
    float* out = c[m] + j;
    if (whole) {
      if (start == kAddToC) {
        sum[m][0] = load(out) + sum[m][0];
        sum[m][1] = load(out + kLanes) + sum[m][1];
      }
      store(out, sum[m][0]);
      store(out + kLanes, sum[m][1]);
    } else {
      store(edge, sum[m][0]);
      store(edge + kLanes, sum[m][1]);
      if (start == kAddToC) for (int64_t i = 0; i < width; ++i) out[i] = out[i] + edge[i];
      else memcpy(out, edge, width * sizeof(float));
    }
  }
}

template <int kRows>
void tile_of(int rows, const float* a, const float* panel, int64_t depth, float* const* c,
             int64_t j, int64_t width, Start start) {
  if (rows == kRows) return tile<kRows>(a, panel, depth, c, j, width, start);
  if constexpr (kRows > 1) tile_of<kRows - 1>(rows, a, panel, depth, c, j, width, start);
}

// Columns j..j+width of rows k0..k0+depth of W, as [depth][kPanelWidth] floats padded with zeros.
void pack_panel(const Product<Element>& p, int64_t k0, int64_t depth, int64_t j, int64_t width,
                float* panel) {
  if (p.transposed) {
    for (int64_t i = 0; i < width; ++i) {
      const Element* w = p.w + (j + i) * p.ld + k0;
      for (int64_t k = 0; k < depth; ++k) panel[k * kPanelWidth + i] = widen(w[k]);
    }
    for (int64_t i = width; i < kPanelWidth; ++i)
      for (int64_t k = 0; k < depth; ++k) panel[k * kPanelWidth + i] = 0;
  } else if (width == kPanelWidth) {
    for (int64_t k = 0; k < depth; ++k) {
      const Element* w = p.w + (k0 + k) * p.ld + j;
      __builtin_prefetch(w + kPanelWidth, 0, 2);  // the next panel
      store(panel + k * kPanelWidth, load(w));
      store(panel + k * kPanelWidth + kLanes, load(w + kLanes));
    }
  } else {
    memset(panel, 0, sizeof(float) * kPanelWidth * depth);
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t i = 0; i < width; ++i)
        panel[k * kPanelWidth + i] = widen(p.w[(k0 + k) * p.ld + j + i]);
  }
}

void packed(const Product<Element>& p, float* scratch) {
  float *panel = scratch, *a = scratch + kPanelDepth * kPanelWidth;
  for (int64_t k0 = p.k0; k0 < p.k1; k0 += kPanelDepth) {
    int64_t depth = p.k1 - k0 < kPanelDepth ? p.k1 - k0 : (int64_t)kPanelDepth;
    Start start = p.blocked ? (k0 == p.k0 ? kFromZero : kAddToC)
                            : (k0 == p.k0 && !p.accumulate ? kFromZero : kFromC);
    for (int64_t m = 0; m < p.rows; ++m) {
      float* row = a + m * kRowStride;
      const Element* source = p.a[m] + k0;
      int64_t k = 0;
      for (; k + kLanes <= depth; k += kLanes) store(row + k, load(source + k));
      for (; k < depth; ++k) row[k] = widen(source[k]);
    }
    int64_t tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS;  // of as equal heights as can be
    for (int64_t j = p.n0; j < p.n1; j += kPanelWidth) {
      int64_t width = p.n1 - j < kPanelWidth ? p.n1 - j : (int64_t)kPanelWidth;
      pack_panel(p, k0, depth, j, width, panel);
      for (int64_t t = 0; t < tiles; ++t) {
        int64_t m = t * p.rows / tiles, rows = (t + 1) * p.rows / tiles - m;
        tile_of<TILE_ROWS>((int)rows, a + m * kRowStride, panel, depth, p.c + m, j, width, start);
      }
    }
  }
}

}  // namespace

#if defined(DOT_F32)
void dot_f32(const Product<float>& p, float* scratch) {
#else
void dot_bf16(const Product<uint16_t>& p, float* scratch) {
#endif
  if (p.k1 <= p.k0) {
    if (!p.accumulate)
      for (int64_t m = 0; m < p.rows; ++m)
        memset(p.c[m] + p.n0, 0, (p.n1 > p.n0 ? p.n1 - p.n0 : 0) * sizeof(float));
    return;
  }
  if (!p.transposed) {
    switch (p.rows) {
      case 1: return stream<1>(p);
      case 2: return stream<2>(p);
      case 3: return stream<3>(p);
      case 4: return stream<4>(p);
      case 5: return stream<5>(p);
      case 6: return stream<6>(p);
    }
  }
  for (int64_t m = 0; m < p.rows; m += kRowBlock) {
    Product<Element> part = p;
    part.a += m;
    part.c += m;
    part.rows = p.rows - m < kRowBlock ? p.rows - m : (int64_t)kRowBlock;
    packed(part, scratch);
  }
}

}  // namespace ISA
}  // namespace moejax
