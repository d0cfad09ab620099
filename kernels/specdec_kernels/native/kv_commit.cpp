#include <algorithm>

#include "common.h"

extern "C" int specdec_cpu_kv_commit(void* cache, const int64_t* source, const int64_t* start, const int64_t* count,
                                     const int64_t* block_table, int64_t layers, int64_t rows, int64_t moves,
                                     int64_t table_width, int64_t page_size, int64_t entry, int64_t stride_layer,
                                     int64_t stride_row, int64_t stride_slot) {
  constexpr int64_t kMoves = 1024, kBuffer = 32768;  // all moves of a row pass through the buffer, some columns at once
  if (rows < 0 || moves < 0 || moves > kMoves || table_width < 1 || page_size < 1 || entry < 0) return SPECDEC_INVALID;
  int64_t from[kMoves], to[kMoves];
  char buffer[kBuffer];
  for (int64_t row = 0; row < rows; ++row, source += moves) {
    const auto place = [=](int64_t slot) {
      if (!block_table) return row * stride_row + slot * stride_slot;
      return block_table[row * table_width + slot / page_size] * stride_row + slot % page_size * stride_slot;
    };
    const int64_t slots = table_width * page_size;
    int64_t used = 0;
    for (int64_t i = 0; i < std::min(count[row], moves); ++i) {
      const int64_t target = start[row] + i;
      if (source[i] < 0 || source[i] >= slots || target < 0 || target >= slots || source[i] == target) continue;
      from[used] = place(source[i]);
      to[used++] = place(target);
    }
    if (!used) continue;
    const int64_t piece = std::min(entry, kBuffer / used);
    for (int64_t layer = 0; layer < layers; ++layer) {
      char* const data = static_cast<char*>(cache) + layer * stride_layer;
      for (int64_t begin = 0; begin < entry; begin += piece) {
        const size_t size = std::min(piece, entry - begin);
        for (int64_t i = 0; i < used; ++i) std::memcpy(buffer + i * size, data + from[i] + begin, size);
        for (int64_t i = 0; i < used; ++i) std::memcpy(data + to[i] + begin, buffer + i * size, size);
      }
    }
  }
  return SPECDEC_OK;
}
