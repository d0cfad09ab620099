#include "fake_cuda.h"

#include <atomic>
#include <cstring>
#include <mutex>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Module {
  int binary;
  std::string kernel;
};

FakeCuda fake;
std::mutex lock;

constexpr int kInvalidValue = 1, kInvalidDevice = 101, kInvalidImage = 200, kInvalidContext = 201;

thread_local int pushed = 0;

// The compute capability in a cubin's ELF header; 0 if it is none.
int capability_of(const void* image) {
  const auto* bytes = static_cast<const unsigned char*>(image);
  if (std::memcmp(bytes, "\177ELF", 4) != 0) return 0;
  uint32_t flags;
  std::memcpy(&flags, bytes + 48, sizeof flags);
  return bytes[8] >= 8 ? flags >> 8 & 0xFF : flags & 0xFF;  // newer ABIs moved it
}

}  // namespace

EXPORT FakeCuda* fake_cuda() { return &fake; }

EXPORT int cuInit(unsigned) { return 0; }

EXPORT int cuDeviceGet(int* device, int ordinal) { return ordinal == 0 ? *device = 0 : kInvalidDevice; }

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  if (attribute != 75 && attribute != 76) return kInvalidValue;
  *value = attribute == 75 ? fake.capability / 10 : fake.capability % 10;
  return 0;
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &fake;
  ++fake.retained;
  return 0;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int) {
  ++fake.released;
  return 0;
}

EXPORT int cuCtxPushCurrent_v2(void* context) {
  if (context != &fake) return kInvalidContext;
  ++pushed;
  return 0;
}

EXPORT int cuCtxPopCurrent_v2(void** context) {
  *context = &fake;
  fake.depth = --pushed;
  return 0;
}

EXPORT int cuModuleLoadData(void** module, const void* image) {
  const std::lock_guard<std::mutex> guard(lock);
  if (!pushed) return kInvalidContext;
  if (!capability_of(image)) return kInvalidImage;
  ++fake.loaded;
  *module = new Module{capability_of(image), ""};
  return 0;
}

EXPORT int cuModuleUnload(void* module) {
  ++fake.unloaded;
  delete static_cast<Module*>(module);
  return 0;
}

EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  static_cast<Module*>(module)->kernel = name;
  *function = module;
  return 0;
}

EXPORT int cuFuncSetAttribute(void*, int attribute, int value) {
  if (attribute != 8) return kInvalidValue;
  fake.allowed_shared = value;
  return 0;
}

EXPORT int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void* stream, void** parameters, void** extra) {
  const std::lock_guard<std::mutex> guard(lock);
  if (!pushed || extra) return kInvalidContext;
  const auto* module = static_cast<const Module*>(function);
  fake.kernel = module->kernel;
  fake.binary = module->binary;
  const unsigned sizes[] = {gx, gy, gz, bx, by, bz};
  std::memcpy(fake.grid, sizes, sizeof fake.grid);
  std::memcpy(fake.block, sizes + 3, sizeof fake.block);
  fake.shared = shared;
  fake.stream = stream;
  fake.parameters.clear();
  for (int size : fake.sizes) {
    uint64_t word = 0;
    std::memcpy(&word, *parameters++, size);
    fake.parameters.push_back(word);
  }
  return fake.result;
}
