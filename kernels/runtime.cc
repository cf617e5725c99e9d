// The choice of instruction set, and the small C interface that Python reads with ctypes.
#include "runtime.h"

#include <cstdlib>
#include <cstring>

namespace moejax {
namespace {

#define MOEJAX_KERNELS(ISA)                                                              \
  {#ISA, ISA::dot_bf16, ISA::dot_f32, ISA::round_terms, ISA::combine, ISA::all_orders, \
   ISA::all_orders_fingerprints}

const Kernels kTable[] = {
    MOEJAX_KERNELS(generic),
#if defined(MOEJAX_X86)
    MOEJAX_KERNELS(avx2),
    MOEJAX_KERNELS(avx512),
#endif
};
constexpr int kLevels = sizeof(kTable) / sizeof(kTable[0]);

int supported() {
#if defined(MOEJAX_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

int level_of(const char* name) {
  for (int i = 0; i < kLevels; ++i)
    if (std::strcmp(kTable[i].name, name) == 0) return i <= supported() ? i : -1;
  return -1;
}

std::atomic<int>& level() {
  static std::atomic<int> chosen = [] {
    const char* name = std::getenv("MOEJAX_ISA");
    int asked = name ? level_of(name) : -1;
    return asked >= 0 ? asked : supported();
  }();
  return chosen;
}

ffi::Error control_word(ffi::ThreadPool pool, ffi::ResultBuffer<ffi::U32> out) {
  uint32_t* words = out->typed_data();
  auto read = [] {
#if defined(__x86_64__)
    return (uint32_t)_mm_getcsr();
#elif defined(__aarch64__)
    uint64_t fpcr;
    asm volatile("mrs %0, fpcr" : "=r"(fpcr));
    return (uint32_t)fpcr;
#else
    return 0u;
#endif
  };
  words[0] = read();
  { IeeeScope ieee; words[1] = read(); }
  words[2] = read();
  words[3] = (uint32_t)pool.num_threads();
  return ffi::Error::Success();
}

// Nothing: the result is the operand's memory, unless XLA wants that elsewhere.
ffi::Error materialize(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  if (out->untyped_data() != x.untyped_data())
    std::memcpy(out->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}

}  // namespace

const Kernels& kernels() { return kTable[level().load()]; }

}  // namespace moejax

// Everything else in the library is hidden, and the handler macro sets no visibility of its own.
#pragma GCC visibility push(default)
extern "C" {
const char* moejax_source_hash() { return MOEJAX_SOURCE_HASH; }
int moejax_ffi_api_minor() { return XLA_FFI_API_MINOR; }
const char* moejax_isa() { return moejax::kernels().name; }
// Names of the instruction sets this processor can run, comma-separated, slowest first.
const char* moejax_isas() {
  static const std::string names = [] {
    std::string all;
    for (int i = 0; i <= moejax::supported(); ++i) all += (i ? "," : "") + std::string(moejax::kTable[i].name);
    return all;
  }();
  return names.c_str();
}
// Returns 0, or -1 if the processor or the build lacks it.
int moejax_force_isa(const char* name) {
  int asked = moejax::level_of(name);
  if (asked < 0) return -1;
  moejax::level().store(asked);
  return 0;
}
}

// [4]: floating-point control word as XLA set it, inside an IeeeScope, after it; pool threads.
XLA_FFI_DEFINE_HANDLER_SYMBOL(MoejaxControlWord, moejax::control_word,
               xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Ret<xla::ffi::Buffer<xla::ffi::U32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MoejaxMaterialize, moejax::materialize,
               xla::ffi::Ffi::Bind().Arg<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>());
