// A libcuda.so.1 that runs nothing and remembers what it was asked: for machines without a GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct FakeCuda {
  int capability = 90;
  int result = 0;          // what the next launches return
  std::vector<int> sizes;  // of the parameters that the next launch is expected to have, in bytes

  int loaded = 0, unloaded = 0, retained = 0, released = 0, depth = 0;  // modules, primary contexts, pushed contexts
  std::string kernel;
  int binary = 0;  // compute capability for which the launched binary was made
  unsigned grid[3] = {}, block[3] = {}, shared = 0;
  int64_t allowed_shared = 0;
  void* stream = nullptr;
  std::vector<uint64_t> parameters;
};
