// What every handler needs: IEEE arithmetic, XLA's thread pool, scratch memory, the kernels of the
// processor at hand, and leading batch dimensions that broadcast.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace moejax {

namespace ffi = xla::ffi;

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  decltype(&generic::dot_bf16) dot_bf16;
  decltype(&generic::dot_f32) dot_f32;
  decltype(&generic::round_terms) round_terms;
  decltype(&generic::combine) combine;
  decltype(&generic::all_orders) all_orders;
  decltype(&generic::all_orders_fingerprints) all_orders_fingerprints;
};
// The best set the processor has, or the lower one that MOEJAX_ISA or moejax_force_isa asks for.
const Kernels& kernels();

// XLA calls handlers, and runs its pool, with subnormals flushed.  Inside this scope arithmetic is
// IEEE: gradual underflow, nearest-even, no traps; afterwards everything is as XLA had it.
class IeeeScope {
 public:
#if defined(__x86_64__)
  IeeeScope() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~IeeeScope() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  IeeeScope() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~IeeeScope() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// Runs fn(0) .. fn(chunks - 1) on the pool and the calling thread.  Chunks are handed out by a
// counter and the caller waits only for chunks already taken, so a busy pool cannot deadlock it.
// Which thread runs a chunk never changes its bits.
template <typename F>
void parallel_chunks(ffi::ThreadPool pool, int64_t chunks, F fn) {
  struct State {
    State(F f, int64_t n) : fn(std::move(f)), chunks(n) {}
    void work() {
      IeeeScope ieee;
      for (int64_t i; (i = next.fetch_add(1)) < chunks;) {
        fn(i);
        if (done.fetch_add(1) + 1 == chunks) {
          std::lock_guard<std::mutex> lock(mutex);
          finished.notify_all();
        }
      }
    }
    F fn;
    int64_t chunks;
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable finished;
  };
  auto state = std::make_shared<State>(std::move(fn), chunks);
  int64_t helpers = std::min<int64_t>(pool.num_threads(), chunks) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([state] { state->work(); });
  state->work();
  for (int spin = 0; spin < 20000 && state->done.load() != chunks; ++spin) {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
  std::unique_lock<std::mutex> lock(state->mutex);
  state->finished.wait(lock, [&] { return state->done.load() == chunks; });
}

// Thread-local floats that live until the thread's next call.
inline float* scratch(size_t n) {
  thread_local std::vector<float> buffer;
  if (buffer.size() < n) buffer.resize(n);
  return buffer.data();
}

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

using Dims = ffi::Span<const int64_t>;

inline int64_t count(Dims dims, size_t first, size_t last) {
  int64_t n = 1;
  for (size_t i = first; i < last; ++i) n *= dims[i];
  return n;
}

// Leading batch dimensions of an operand against those of the result: equal, or 1 and broadcast.
class Batch {
 public:
  // `result`: leading dimensions of the result; the operand's are dims[0 .. dims.size() - inner).
  Batch(const std::vector<int64_t>& result, Dims dims, size_t inner) : result_(result) {
    int64_t lead = (int64_t)dims.size() - (int64_t)inner;
    valid_ = lead == (int64_t)result.size();
    strides_.assign(result.size(), 0);
    int64_t step = 1;
    for (int64_t i = lead - 1; valid_ && i >= 0; --i) {
      if (dims[i] != 1 && dims[i] != result[i]) valid_ = false;
      if (dims[i] != 1) { strides_[i] = step; shared_ = false; }
      step *= dims[i];
    }
  }
  bool valid() const { return valid_; }
  bool shared() const { return shared_; }  // one operand for the whole batch
  // Which of the operand's entries goes with result entry `flat`.
  int64_t operator()(int64_t flat) const {
    int64_t at = 0;
    for (int64_t i = (int64_t)result_.size() - 1; i >= 0; --i) {
      at += flat % result_[i] * strides_[i];
      flat /= result_[i];
    }
    return at;
  }

 private:
  std::vector<int64_t> result_, strides_;
  bool valid_, shared_ = true;
};

inline std::vector<int64_t> leading(Dims dims, size_t inner) {
  return std::vector<int64_t>(dims.begin(), dims.begin() + (dims.size() - std::min(inner, dims.size())));
}

inline ffi::Error invalid(const std::string& message) {
  return ffi::Error::InvalidArgument(message);
}

}  // namespace moejax
