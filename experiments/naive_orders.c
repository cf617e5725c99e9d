// What anyone would write first: every order of every column, one after the other.  Compiled by
// benchmark.py as the plain C figure to compare with.
#include <stdint.h>
#include <string.h>

static float round_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  u = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u;
  memcpy(&x, &u, 4);
  return x;
}

// terms [k][h], orders [p][k] -> out [p][h]; code bit 0 rounds operands, bit 1 the accumulator.
void naive_orders(const float* terms, const int32_t* orders, long p, long k, long h, int code,
                  float* out) {
  for (long r = 0; r < p; ++r) {
    float* o = out + r * h;
    for (long i = 0; i < h; ++i) o[i] = 0;
    for (long j = 0; j < k; ++j) {
      const float* v = terms + orders[r * k + j] * h;
      for (long i = 0; i < h; ++i) {
        float sum = o[i] + (code & 1 ? round_bf16(v[i]) : v[i]);
        o[i] = code & 2 ? round_bf16(sum) : sum;
      }
    }
  }
}
