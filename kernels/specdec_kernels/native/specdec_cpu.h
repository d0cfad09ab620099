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

/* TALON's gate. logits: [B, P, V] of `dtype`, log-probabilities if `normalized`; parent_scores: [B, P]; budget: [B];
 * mu in [0, 1]; width <= 256 and <= P * V <= 2^31. Out: parent, token, score [B, width], count [B]; what is past the
 * count is 0, 0, -inf. */
SPECDEC_API int specdec_cpu_confidence_gate(int64_t* parent, int64_t* token, float* score, int64_t* count,
                                            const void* logits, const float* parent_scores, const int64_t* budget,
                                            int64_t dtype, double mu, int64_t normalized, int64_t rows, int64_t parents,
                                            int64_t vocab, int64_t width);

/* Log-softmax and the k best of each row; k <= 256 and <= V. logits: [rows, V] of `dtype`. Out: both [rows, k]. */
SPECDEC_API int specdec_cpu_topk_logprobs(float* logprobs, int64_t* token, const void* logits, int64_t dtype,
                                          int64_t rows, int64_t vocab, int64_t k);

/* Multi-step rejection. tokens, parents: [B, N]; count: [B]; p, q: [B, N, V], rows apart by the strides (in elements);
 * coins: [B, N]; draw: [B]; replacement: whether siblings were drawn independently. Out: as verify_walk. */
SPECDEC_API int specdec_cpu_rejection_walk(int64_t* path, int64_t* length, int64_t* bonus, const int64_t* tokens,
                                           const int64_t* parents, const int64_t* count, const float* p, const float* q,
                                           const double* coins, const double* draw, int64_t rows, int64_t nodes,
                                           int64_t vocab, int64_t stride_p_row, int64_t stride_p_node,
                                           int64_t stride_q_row, int64_t stride_q_node, int64_t replacement);

/* Accepted cache entries into place. cache: [L, B, page_size, entry bytes], or [L, pages, page_size, entry bytes] with
 * block_table [B, table_width]; without one it is NULL, table_width is 1 and page_size the slots of a row. source:
 * [B, M]; start, count: [B]; strides in bytes; M at most 1024. Uses 48 KB of stack. */
SPECDEC_API int specdec_cpu_kv_commit(void* cache, const int64_t* source, const int64_t* start, const int64_t* count,
                                      const int64_t* block_table, int64_t layers, int64_t rows, int64_t moves,
                                      int64_t table_width, int64_t page_size, int64_t entry, int64_t stride_layer,
                                      int64_t stride_row, int64_t stride_slot);

/* Per row of logits [B, N, V] of `dtype`, rows apart by the strides (in elements): token [B, N] and values [6, B, N], which
 * are top1, top2, logsumexp, probability, margin and logit margin (see reference.py); without `normalise` the three that
 * need the sum are NaN. */
SPECDEC_API int specdec_cpu_margin_scan(int64_t* token, float* values, const void* logits, int64_t dtype, int64_t rows,
                                        int64_t nodes, int64_t vocab, int64_t stride_row, int64_t stride_node,
                                        int64_t normalise);

/* The walk up to the first node whose margin is below the threshold. As verify_walk, and margins [B, N]; out: also
 * escalated [B]. */
SPECDEC_API int specdec_cpu_trust_walk(int64_t* path, int64_t* length, int64_t* bonus, int64_t* escalated,
                                       const int64_t* tokens, const int64_t* parents, const int64_t* count,
                                       const int64_t* chosen, const float* margins, int64_t rows, int64_t nodes,
                                       double threshold);

/* One draw a node: logits [B, M, V] of `dtype`, rows apart by the strides (in elements), seeds [B], positions and token
 * [B, M]. Without seeds (NULL) greedy; stream and positions are then not read. */
SPECDEC_API int specdec_cpu_sample_tokens(int64_t* token, const void* logits, int64_t dtype, const int64_t* seeds,
                                          int64_t stream, const int64_t* positions, int64_t rows, int64_t nodes,
                                          int64_t vocab, int64_t stride_row, int64_t stride_node);

/* The noise that 32-bit words [n] (in int64) become, and the upper bound that is tried first: both [n]. */
SPECDEC_API int specdec_cpu_gumbel(float* noise, float* bound, const int64_t* words, int64_t n);

#ifdef __cplusplus
}
#endif
#endif
