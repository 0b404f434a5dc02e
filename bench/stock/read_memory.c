/* Reads memory as fast as some threads can: the ceiling of any kernel whose weights come from there. Built by bench/cpu_kernel.py. */
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define MAX_THREADS 256

static uint64_t read_part(const uint8_t* bytes, size_t count) {
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

typedef struct {
  const uint8_t* bytes;
  size_t count;
  int cpu;
  pthread_barrier_t* start;
  uint64_t sum;
  double began, ended;
} Part;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void* reader(void* argument) {
  Part* part = argument;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(part->cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  pthread_barrier_wait(part->start);
  part->began = now();
  part->sum = read_part(part->bytes, part->count);
  part->ended = now();
  return 0;
}

/* Seconds from the first thread's first byte to the last one's last: thread i runs on cpus[i] and reads its share. -1: too many threads. */
__attribute__((visibility("default"))) double read_memory(const uint8_t* bytes, size_t count, int threads, const int* cpus) {
  Part parts[MAX_THREADS];
  pthread_t ids[MAX_THREADS];
  pthread_barrier_t start;
  if (threads < 1 || threads > MAX_THREADS) return -1;
  pthread_barrier_init(&start, 0, (unsigned)threads);
  const size_t share = count / (size_t)threads / 4096 * 4096;
  for (int i = 0; i < threads; ++i) {
    parts[i] = (Part){bytes + share * (size_t)i, share, cpus[i], &start, 0, 0, 0};
    if (pthread_create(&ids[i], 0, reader, &parts[i]) != 0) return -1;
  }
  double began = 1e300, ended = 0;
  for (int i = 0; i < threads; ++i) {
    pthread_join(ids[i], 0);
    if (parts[i].began < began) began = parts[i].began;
    if (parts[i].ended > ended) ended = parts[i].ended;
  }
  pthread_barrier_destroy(&start);
  return (ended - began) * (double)count / (double)(share * (size_t)threads);
}
