/* The ops on CPUs behind a C interface. One thread; nothing here allocates unless its comment says so.
 *
 * Shapes as in specdec_kernels/reference.py: B rows, P parents, N tree nodes, V vocabulary; arrays are contiguous. Every
 * function returns a specdec_status and has written nothing if that is not SPECDEC_OK. */
#ifndef SPECDEC_CPU_H
#define SPECDEC_CPU_H

#include <stdint.h>

#if defined(__GNUC__)
#define SPECDEC_API __attribute__((visibility("default")))
#else
#define SPECDEC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { SPECDEC_FLOAT32 = 0, SPECDEC_FLOAT16 = 1, SPECDEC_BFLOAT16 = 2 } specdec_dtype;
typedef enum { SPECDEC_OK = 0, SPECDEC_INVALID = 1, SPECDEC_OUT_OF_MEMORY = 2 } specdec_status;

/* Sample and match. tokens, parents, chosen: [B, N]; count: [B]. Out: path [B, N - 1], length [B], bonus [B]. */
SPECDEC_API int specdec_cpu_verify_walk(int64_t* path, int64_t* length, int64_t* bonus, const int64_t* tokens,
                                        const int64_t* parents, const int64_t* count, const int64_t* chosen,
                                        int64_t rows, int64_t nodes);

#ifdef __cplusplus
}
#endif
#endif
