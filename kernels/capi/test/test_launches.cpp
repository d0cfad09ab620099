// Every GPU entry point against a fake driver: the binary, grid, block, shared memory and parameters that reach it.
#include <dlfcn.h>

#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_cuda.h"
#include "specdec_kernels.h"

namespace {

template <typename T>
uint64_t as_word(T value) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}

struct Expected {
  const char* name;
  const char* kernel;
  int (*call)(specdec_context*, specdec_stream);
  std::vector<unsigned> grid;
  std::vector<uint64_t> parameters;  // with the two pointers that Triton adds
  struct Target {
    int capability;
    unsigned threads, shared;
    std::vector<int> sizes;
  };
  std::vector<Target> targets;
};

const std::vector<Expected> all = {
#include "expected_launches.inc"
};

FakeCuda& fake() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  const auto get = library ? reinterpret_cast<FakeCuda* (*)()>(dlsym(library, "fake_cuda")) : nullptr;
  if (!get) {
    std::cerr << "libcuda.so.1 is not the fake one\n";
    std::exit(2);
  }
  return *get();
}

specdec_context* create(int capability) {
  fake().capability = capability;
  specdec_context* context = nullptr;
  CHECK_EQUAL(specdec_create(&context, 0), SPECDEC_OK);
  return context;
}

void entry_points() {
  for (size_t target = 0; target < all.at(0).targets.size(); ++target) {
    specdec_context* context = create(all[0].targets[target].capability);
    void* stream = reinterpret_cast<void*>(uintptr_t{0x5000});
    for (const Expected& expected : all) {
      const Expected::Target& on = expected.targets[target];
      fake().sizes = on.sizes;
      fake().allowed_shared = 48 * 1024;
      CHECK_EQUAL(expected.call(context, stream), SPECDEC_OK);
      CHECK_EQUAL(fake().kernel, expected.kernel);
      CHECK_EQUAL(fake().binary, on.capability);
      for (int axis = 0; axis < 3; ++axis) {
        CHECK_EQUAL(fake().grid[axis], expected.grid[axis]);
        CHECK_EQUAL(fake().block[axis], axis ? 1 : on.threads);
      }
      CHECK_EQUAL(fake().shared, on.shared);
      CHECK(on.shared <= fake().allowed_shared);
      CHECK(fake().stream == stream);
      CHECK_EQUAL(fake().parameters.size(), expected.parameters.size());
      for (size_t i = 0; i < fake().parameters.size(); ++i) CHECK_EQUAL(fake().parameters[i], expected.parameters[i]);
      CHECK_EQUAL(fake().depth, 0);
    }
    specdec_destroy(context);
  }
  CHECK_EQUAL(fake().loaded, fake().unloaded);
  CHECK_EQUAL(fake().retained, fake().released);
}

void other_devices() {
  for (const auto& [device, binary] : {std::pair{86, 80}, {89, 80}, {80, 80}}) {
    specdec_context* context = create(device);
    fake().sizes = all[0].targets[0].sizes;
    CHECK_EQUAL(all[0].call(context, nullptr), SPECDEC_OK);
    CHECK_EQUAL(fake().binary, binary);
    specdec_destroy(context);
  }
  for (int device : {70, 75, 103, 121}) {
    fake().capability = device;
    specdec_context* context = nullptr;
    CHECK_EQUAL(specdec_create(&context, 0), SPECDEC_NO_KERNEL);
    CHECK(!context);
  }
  specdec_context* context = nullptr;
  CHECK_EQUAL(specdec_create(&context, 1), SPECDEC_NO_DEVICE);
  CHECK_EQUAL(specdec_create(nullptr, 0), SPECDEC_INVALID);
}

int64_t* device_pointer(uintptr_t address) { return reinterpret_cast<int64_t*>(address); }

int walk(specdec_context* context, int64_t* path, int rows) {
  int64_t* const p = device_pointer(1 << 20);
  return specdec_cuda_verify_walk(context, nullptr, path, p, p, p, p, p, p, 8, rows);
}

void errors() {
  specdec_context* context = create(90);
  int64_t* const path = device_pointer(1 << 20);
  fake().sizes.clear();
  fake().kernel.clear();
  CHECK_EQUAL(walk(context, path + 1, 1), SPECDEC_INVALID);  // not aligned
  CHECK_EQUAL(walk(context, path, -1), SPECDEC_INVALID);
  CHECK_EQUAL(walk(nullptr, path, 1), SPECDEC_INVALID);
  CHECK_EQUAL(walk(context, path, 0), SPECDEC_OK);  // nothing to do
  CHECK_EQUAL(fake().kernel, "");
  fake().result = 700;
  CHECK_EQUAL(walk(context, path, 1), SPECDEC_CUDA_ERROR);
  CHECK_EQUAL(specdec_cuda_error(context), 700);
  fake().result = 0;
  CHECK_EQUAL(walk(context, path, 1), SPECDEC_OK);
  CHECK_EQUAL(specdec_load(nullptr), SPECDEC_INVALID);
  specdec_destroy(context);
  specdec_destroy(nullptr);
}

void threads() {
  specdec_context* context = create(90);
  fake().sizes.clear();
  const int before = fake().loaded;
  std::vector<std::thread> running;
  for (int i = 0; i < 8; ++i)
    running.emplace_back([&] { CHECK_EQUAL(walk(context, device_pointer(1 << 20), 1), SPECDEC_OK); });
  for (std::thread& thread : running) thread.join();
  CHECK_EQUAL(fake().loaded, before + 1);
  CHECK_EQUAL(specdec_load(context), SPECDEC_OK);
  CHECK_EQUAL(fake().loaded, before + static_cast<int>(all.size()));
  specdec_destroy(context);
}

}  // namespace

int main() {
  entry_points();
  other_devices();
  errors();
  threads();
  std::cout << all.size() << " entry points, " << failures << " failures\n";
  return failures != 0;
}
