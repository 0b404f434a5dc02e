/* The public headers compile as C11, and the layout functions agree with themselves. */
#include <stdio.h>
#include <string.h>

#include "expert_tier.h"

static int failures = 0;

static void check(int ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "failed: %s\n", what);
  ++failures;
}

int main(void) {
  AbiCtlHeader h;
  memset(&h, 0, sizeof h);
  h.ring_len = 8;
  h.num_buffers = 4;
  h.max_rows = 8;
  h.max_picks = 64;
  h.max_experts = 64;
  h.hidden = 256;
  check(abi_ctl_geometry(&h) == 0, "a plain geometry is accepted");
  check(h.jobs_offset % ABI_PAGE == 0 && h.dones_offset % ABI_PAGE == 0 && h.buffers_offset % ABI_PAGE == 0, "sections begin on pages");
  check(h.dones_offset >= h.jobs_offset + h.ring_len * h.job_stride, "done entries lie behind the jobs");
  check(h.out_offset >= h.max_rows * h.hidden * sizeof(float), "results lie behind the activations");
  check(h.total_bytes == h.buffers_offset + h.num_buffers * h.buffer_stride, "the buffers end the segment");
  h.num_buffers = 3;
  check(abi_ctl_geometry(&h) == -1, "three buffers are refused");
  h.num_buffers = 4;
  h.hidden = 200;
  check(abi_ctl_geometry(&h) == -1, "a width that is no multiple of 128 is refused");

  AbiArenaHeader a;
  memset(&a, 0, sizeof a);
  a.num_layers = 42;
  a.experts_per_layer = 288;
  a.num_slots = 42 * 288;
  a.record_stride = 9474048;
  check(abi_arena_geometry(&a) == 0, "the real model's arena is accepted");
  check(a.records_offset % ABI_PAGE == 0, "records begin on a page");
  check(a.total_bytes == a.records_offset + a.num_slots * a.record_stride, "the records end the segment");
  a.record_stride = 1000;
  check(abi_arena_geometry(&a) == -1, "a stride that is no multiple of 4096 is refused");

  uint8_t record[4096] = {0};
  const uint64_t before = abi_checksum(record, sizeof record);
  for (unsigned bit = 0; bit < 8 * sizeof record; bit += 37) {
    record[bit / 8] ^= (uint8_t)(1u << (bit % 8));
    check(abi_checksum(record, sizeof record) != before, "a flipped bit changes the checksum");
    record[bit / 8] ^= (uint8_t)(1u << (bit % 8));
  }
  check(abi_checksum(record, sizeof record) == before, "the checksum is a function of the bytes");
  return failures == 0 ? 0 : 1;
}
