/* Reads memory as fast as one thread can: the ceiling of any kernel whose weights come from there. Built by bench/cpu_kernel.py. */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

__attribute__((visibility("default"))) uint64_t read_memory(const uint8_t* bytes, size_t count) {
  __m128i sums[8];
  for (int i = 0; i < 8; ++i) sums[i] = _mm_setzero_si128();
  for (size_t at = 0; at + 128 <= count; at += 128) {
    _mm_prefetch((const char*)(bytes + at + 4096), _MM_HINT_T0);
    _mm_prefetch((const char*)(bytes + at + 4160), _MM_HINT_T0);
    for (int i = 0; i < 8; ++i) sums[i] = _mm_add_epi64(sums[i], _mm_load_si128((const __m128i*)(bytes + at) + i));
  }
  uint64_t total = 0;
  for (int i = 0; i < 8; ++i) total += (uint64_t)_mm_cvtsi128_si64(sums[i]);
  return total;
}
