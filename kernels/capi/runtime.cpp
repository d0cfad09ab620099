#include "runtime.h"

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <vector>

namespace {

// The part of the driver's interface that is used, by hand: the library needs no cuda.h.
using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
constexpr int kDynamicShared = 8;        // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr unsigned kSharedByDefault = 48 * 1024;

struct Driver {
  int status = SPECDEC_NO_DRIVER;
  CUresult (*init)(unsigned) = nullptr;
  CUresult (*device_get)(CUdevice*, int) = nullptr;
  CUresult (*device_attribute)(int*, int, CUdevice) = nullptr;
  CUresult (*context_retain)(CUcontext*, CUdevice) = nullptr;
  CUresult (*context_release)(CUdevice) = nullptr;
  CUresult (*context_push)(CUcontext) = nullptr;
  CUresult (*context_pop)(CUcontext*) = nullptr;
  CUresult (*module_load)(CUmodule*, const void*) = nullptr;
  CUresult (*module_unload)(CUmodule) = nullptr;
  CUresult (*module_function)(CUfunction*, CUmodule, const char*) = nullptr;
  CUresult (*function_set)(CUfunction, int, int) = nullptr;
  CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, specdec_stream,
                     void**, void**) = nullptr;

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    bool found = true;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      found = found && function;
    };
    find(init, "cuInit");
    find(device_get, "cuDeviceGet");
    find(device_attribute, "cuDeviceGetAttribute");
    find(context_retain, "cuDevicePrimaryCtxRetain");
    find(context_release, "cuDevicePrimaryCtxRelease_v2");
    find(context_push, "cuCtxPushCurrent_v2");
    find(context_pop, "cuCtxPopCurrent_v2");
    find(module_load, "cuModuleLoadData");
    find(module_unload, "cuModuleUnload");
    find(module_function, "cuModuleGetFunction");
    find(function_set, "cuFuncSetAttribute");
    find(launch, "cuLaunchKernel");
    if (!found) return;
    status = SPECDEC_OK;
    if (init(0)) status = SPECDEC_NO_DEVICE;
  }
};

const Driver& driver() {  // opened by the first caller, once
  static const Driver opened;
  return opened;
}

}  // namespace

#ifdef SPECDEC_CPU_ONLY
namespace specdec {
const Kernel kernels[1] = {};
const int kernel_count = 0;
}  // namespace specdec
#endif

struct specdec_context {
  CUdevice device = 0;
  CUcontext handle = nullptr;
  int capability = 0;
  std::atomic<CUresult> error{0};
  std::mutex loading;
  std::vector<CUmodule> modules;
  std::unique_ptr<std::atomic<CUfunction>[]> functions;

  int check(CUresult result) {
    if (!result) return SPECDEC_OK;
    error = result;
    return SPECDEC_CUDA_ERROR;
  }

  const specdec::Image* image(int kernel) const {
    const specdec::Image* best = nullptr;
    for (const specdec::Image& candidate : specdec::kernels[kernel].images) {
      const bool later = candidate.capability / 10 == capability / 10 && candidate.capability <= capability;
      if (candidate.capability == capability || (later && !candidate.exact)) best = &candidate;
    }
    return best;
  }

  int load(int kernel, const specdec::Image& image) {  // the context is current
    if (functions[kernel].load(std::memory_order_acquire)) return SPECDEC_OK;
    const std::lock_guard<std::mutex> lock(loading);
    if (functions[kernel].load(std::memory_order_relaxed)) return SPECDEC_OK;
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    if (const int status = check(driver().module_load(&module, image.binary))) return status;
    CUresult result = driver().module_function(&function, module, specdec::kernels[kernel].name);
    if (!result && image.shared > kSharedByDefault)
      result = driver().function_set(function, kDynamicShared, static_cast<int>(image.shared));
    if (result) {
      driver().module_unload(module);
      return check(result);
    }
    modules.push_back(module);
    functions[kernel].store(function, std::memory_order_release);
    return SPECDEC_OK;
  }
};

namespace {

// Makes a context current, and the one before it afterwards.
class Current {
 public:
  explicit Current(specdec_context* context) : status(context->check(driver().context_push(context->handle))) {}
  ~Current() {
    CUcontext popped;
    if (!status) driver().context_pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  const int status;
};

}  // namespace

int specdec::launch(specdec_context* context, int kernel, const int64_t (&grid)[3], void** arguments,
                    specdec_stream stream) {
  if (!context) return SPECDEC_INVALID;
  constexpr int64_t kLimits[3] = {INT32_MAX, 65535, 65535};
  for (int axis = 0; axis < 3; ++axis) {
    if (grid[axis] < 0 || grid[axis] > kLimits[axis]) return SPECDEC_INVALID;
  }
  if (!grid[0] || !grid[1] || !grid[2]) return SPECDEC_OK;
  const Image* const image = context->image(kernel);
  if (!image) return SPECDEC_NO_KERNEL;
  const Current current(context);
  if (current.status) return current.status;
  if (const int status = context->load(kernel, *image)) return status;
  return context->check(driver().launch(context->functions[kernel].load(std::memory_order_acquire),
                                        static_cast<unsigned>(grid[0]), static_cast<unsigned>(grid[1]),
                                        static_cast<unsigned>(grid[2]), image->threads, 1, 1, image->shared, stream,
                                        arguments, nullptr));
}

extern "C" int specdec_create(specdec_context** out, int device) {
  if (!out) return SPECDEC_INVALID;
  *out = nullptr;
  if (!specdec::kernel_count) return SPECDEC_NO_KERNEL;
  if (driver().status) return driver().status;
  CUdevice handle = 0;
  int major = 0, minor = 0;
  if (driver().device_get(&handle, device) || driver().device_attribute(&major, kMajor, handle) ||
      driver().device_attribute(&minor, kMinor, handle)) {
    return SPECDEC_NO_DEVICE;
  }
  std::unique_ptr<specdec_context> context(new (std::nothrow) specdec_context);
  if (!context) return SPECDEC_OUT_OF_MEMORY;
  context->functions.reset(new (std::nothrow) std::atomic<CUfunction>[specdec::kernel_count]());
  if (!context->functions) return SPECDEC_OUT_OF_MEMORY;
  context->device = handle;
  context->capability = 10 * major + minor;
  if (!context->image(0)) return SPECDEC_NO_KERNEL;
  if (driver().context_retain(&context->handle, handle)) return SPECDEC_NO_DEVICE;
  *out = context.release();
  return SPECDEC_OK;
}

extern "C" void specdec_destroy(specdec_context* context) {
  if (!context) return;
  {
    const Current current(context);
    for (CUmodule module : context->modules) driver().module_unload(module);
  }
  driver().context_release(context->device);
  delete context;
}

extern "C" int specdec_load(specdec_context* context) {
  if (!context) return SPECDEC_INVALID;
  const Current current(context);
  if (current.status) return current.status;
  for (int kernel = 0; kernel < specdec::kernel_count; ++kernel) {
    const specdec::Image* const image = context->image(kernel);
    if (!image) return SPECDEC_NO_KERNEL;
    if (const int status = context->load(kernel, *image)) return status;
  }
  return SPECDEC_OK;
}

extern "C" int specdec_cuda_error(const specdec_context* context) { return context ? context->error.load() : 0; }

extern "C" const char* specdec_status_string(int status) {
  switch (status) {
    case SPECDEC_OK: return "ok";
    case SPECDEC_INVALID: return "an argument is out of range or not aligned";
    case SPECDEC_OUT_OF_MEMORY: return "out of memory";
    case SPECDEC_NO_DRIVER: return "no CUDA driver: libcuda.so.1 is missing or too old";
    case SPECDEC_NO_DEVICE: return "no such CUDA device";
    case SPECDEC_NO_KERNEL: return "no kernel for this device: its compute capability is not among 8.x, 9.0, 10.0 and "
                                   "12.0, or the library was built without kernels";
    case SPECDEC_CUDA_ERROR: return "the CUDA driver reported an error; see specdec_cuda_error";
    default: return "unknown status";
  }
}
