// What the generated entry points need: the table of binaries, and one function that launches them.
#pragma once

#include <cstdint>

#include "specdec_kernels.h"

namespace specdec {

struct Image {
  int capability;  // 90 for sm_90
  bool exact;      // runs on that capability only; otherwise on later minor ones too
  unsigned threads, shared;
  const unsigned char* binary;
};

struct Kernel {
  const char* name;
  Image images[4];
};

extern const Kernel kernels[];
extern const int kernel_count;

inline int64_t cdiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Not a multiple of 16: the binary was promised one.
inline bool odd(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 != 0; }
inline bool odd(int64_t number) { return number % 16 != 0; }

int launch(specdec_context* context, int kernel, const int64_t (&grid)[3], void** arguments, specdec_stream stream);

}  // namespace specdec
