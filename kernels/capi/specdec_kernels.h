/* The kernels of tree speculative decoding for decoders that are not written in Python.
 *
 * Two halves. On CPUs: specdec_cpu_* (specdec_cpu.h). On NVIDIA GPUs: specdec_cuda_* (specdec_entry_points.h), Triton
 * kernels compiled ahead of time; `specdec_has_cuda` says at compile time whether the library was built with them.
 * libcuda is opened when the first context is made, so that the library builds, links and loads without a GPU.
 *
 * Shapes and meaning of the arguments are in specdec_kernels/<op>.py and reference.py; a kernel's pointers are device
 * memory, aligned to 16 bytes, strides count elements. Calls only enqueue work: they neither allocate on the device nor
 * wait. Every function may be called from several threads at once, and none ends the process. */
#ifndef SPECDEC_KERNELS_H
#define SPECDEC_KERNELS_H

#include "specdec_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Beside those of specdec_cpu.h. */
enum {
  SPECDEC_NO_DRIVER = 16,   /* libcuda.so.1 is missing, or lacks a function */
  SPECDEC_NO_DEVICE = 17,   /* no such device */
  SPECDEC_NO_KERNEL = 18,   /* no binary for this device's compute capability, or built without kernels */
  SPECDEC_CUDA_ERROR = 19   /* see specdec_cuda_error */
};

typedef struct specdec_context specdec_context; /* the kernels on one device, in its primary context */
typedef void* specdec_stream;                   /* a CUstream or cudaStream_t; NULL is the default stream */

/* Out: a context for `device`, to be destroyed when none of its kernels runs any more. */
SPECDEC_API int specdec_create(specdec_context** context, int device);
SPECDEC_API void specdec_destroy(specdec_context* context);

/* Loads every kernel now. Otherwise each is loaded by its first launch, which cannot happen in a stream capture. */
SPECDEC_API int specdec_load(specdec_context* context);

/* The CUresult of the last call in this context that returned SPECDEC_CUDA_ERROR. */
SPECDEC_API int specdec_cuda_error(const specdec_context* context);

/* A status in words. */
SPECDEC_API const char* specdec_status_string(int status);

#if defined(__has_include)
#if __has_include("specdec_entry_points.h")
#define specdec_has_cuda 1
#include "specdec_entry_points.h"
#endif
#endif
#ifndef specdec_has_cuda
#define specdec_has_cuda 0
#endif

#ifdef __cplusplus
}
#endif
#endif
