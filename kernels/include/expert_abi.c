/* The functions of the layout: plain C, so that the header is compiled as C in every build. */
#include "expert_abi.h"

#include <string.h>

static uint64_t hash_bytes(uint64_t hash, const void* data, size_t bytes) {
  const uint8_t* p = (const uint8_t*)data;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
  return hash;
}

static uint64_t hash_field(uint64_t hash, const char* name, uint64_t offset, uint64_t bytes) {
  hash = hash_bytes(hash, name, strlen(name) + 1);
  hash = hash_bytes(hash, &offset, sizeof offset);
  return hash_bytes(hash, &bytes, sizeof bytes);
}

uint64_t abi_layout_hash(void) {
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
#define HASH_FIELD(type, name) hash = hash_field(hash, #name, offsetof(HASHED, name), sizeof(((HASHED*)0)->name));
#define HASH_ARRAY(type, name, count) HASH_FIELD(type, name)
#define HASH_STRUCT(struct_name, fields)                      \
  {                                                           \
    typedef struct_name HASHED;                               \
    hash = hash_field(hash, #struct_name, 0, sizeof(HASHED)); \
    fields(HASH_FIELD, HASH_ARRAY)                            \
  }
  ABI_STRUCTS(HASH_STRUCT) {
    /* The arena stores the kernels' description of a record: its layout is part of ours. */
    typedef MoeExpertShape HASHED;
    hash = hash_field(hash, "MoeExpertShape", 0, sizeof(HASHED));
    HASH_FIELD(uint8_t, k_gate)
    HASH_FIELD(uint8_t, codebook)
    HASH_FIELD(float, act_limit)
    HASH_FIELD(uint32_t, gate_trellis)
    HASH_FIELD(uint32_t, down_svh)
    HASH_FIELD(uint32_t, down_bias)
  }
  return hash;
}

static uint64_t align_up(uint64_t value, uint64_t alignment) { return (value + alignment - 1) / alignment * alignment; }

int abi_ctl_geometry(AbiCtlHeader* h) {
  if (h->ring_len < 2 || h->ring_len > 1024) return -1;
  if (h->num_buffers < 4 || h->num_buffers > 1024) return -1;
  if (h->max_rows < 1 || h->max_rows > 1024) return -1;
  if (h->max_picks < h->max_rows || h->max_picks > 65536) return -1;
  if (h->max_experts < 1 || h->max_experts > h->max_picks) return -1;
  if (h->hidden < 128 || h->hidden % 128 != 0 || h->hidden > 65536) return -1;
  h->experts_offset = sizeof(AbiJob);
  h->pick_row_offset = h->experts_offset + (uint64_t)h->max_experts * sizeof(AbiJobExpert);
  h->pick_out_offset = h->pick_row_offset + (uint64_t)h->max_picks * sizeof(uint32_t);
  h->job_stride = align_up(h->pick_out_offset + (uint64_t)h->max_picks * sizeof(uint32_t), ABI_LINE);
  h->jobs_offset = align_up(sizeof(AbiCtlHeader), ABI_PAGE);
  h->dones_offset = align_up(h->jobs_offset + h->ring_len * h->job_stride, ABI_PAGE);
  h->buffers_offset = align_up(h->dones_offset + h->ring_len * sizeof(AbiDone), ABI_PAGE);
  h->out_offset = align_up((uint64_t)h->max_rows * h->hidden * sizeof(float), ABI_LINE);
  h->buffer_stride = align_up(h->out_offset + (uint64_t)h->max_picks * h->hidden * sizeof(float), ABI_PAGE);
  h->total_bytes = h->buffers_offset + h->num_buffers * h->buffer_stride;
  return 0;
}

int abi_arena_geometry(AbiArenaHeader* h) {
  if (h->num_layers < 1 || h->num_layers > ABI_MAX_LAYERS) return -1;
  if (h->experts_per_layer < 1 || h->experts_per_layer > 65536) return -1;
  if (h->num_slots < 1 || h->num_slots > UINT64_C(0x7fffffff)) return -1;
  if (h->record_stride < ABI_PAGE || h->record_stride % ABI_PAGE != 0) return -1;
  h->shapes_offset = sizeof(AbiArenaHeader);
  h->generations_offset = align_up(h->shapes_offset + h->num_layers * sizeof(MoeExpertShape), ABI_LINE);
  h->checksums_offset = align_up(h->generations_offset + h->num_slots * sizeof(uint32_t), ABI_LINE);
  h->records_offset = align_up(h->checksums_offset + h->num_slots * sizeof(uint64_t), ABI_PAGE);
  h->total_bytes = h->records_offset + h->num_slots * (uint64_t)h->record_stride;
  return 0;
}

uint64_t abi_checksum(const void* data, uint64_t bytes) {
  /* Four independent multiply chains: one chain would wait for the multiplier instead of for memory. */
  static const uint64_t kMul = UINT64_C(0x9e3779b97f4a7c15);
  uint64_t lane[4] = {1, 2, 3, 4};
  const uint8_t* p = (const uint8_t*)data;
  for (uint64_t i = 0; i + 32 <= bytes; i += 32) {
    uint64_t w[4];
    memcpy(w, p + i, sizeof w);
    for (int j = 0; j < 4; ++j) {
      uint64_t h = (lane[j] ^ w[j]) * kMul;
      lane[j] = h ^ (h >> 29); /* the multiply only carries upwards: fold the high bits back */
    }
  }
  uint64_t hash = bytes;
  for (int j = 0; j < 4; ++j) {
    hash = (hash ^ lane[j]) * kMul;
    hash ^= hash >> 32;
  }
  return hash;
}
