/* C interface of the tier engine, of cpu_expert's job server, and of the protocol's parts that tests drive one action at a time.
 *
 * Errors as in expert_region.h: NULL or -1, then glm53_error_code() and glm53_error_text() of the calling thread. `options` is text, one
 * name=value per line (tier/options.h lists the names); an unknown name or a value out of range is refused by name.
 */
#ifndef GLM53_EXPERT_TIER_H_
#define GLM53_EXPERT_TIER_H_

#include "expert_region.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Glm53Tier Glm53Tier;
typedef struct Glm53Server Glm53Server;
typedef struct Glm53Lane Glm53Lane;

/* Engine. One thread at a time computes; others wait. region may be NULL unless mode=fast and backend=shm. arena and region must outlive
 * it. */
ABI_API Glm53Tier* glm53_tier_create(const Glm53Arena* arena, Glm53Region* region, const char* options);
/* x float[rows][hidden], sel int64[rows][top_k] (experts_per_layer = masked pick), weights float[rows][top_k], out float[rows][hidden]. */
ABI_API int glm53_tier_forward(Glm53Tier* tier, uint32_t layer, uint32_t rows, uint32_t top_k, const float* x, const int64_t* sel,
                               const float* weights, int prefill, float* out);
ABI_API int glm53_tier_lane_up(const Glm53Tier* tier);
/* JSON, valid until the next call on this thread. */
ABI_API const char* glm53_tier_stats(Glm53Tier* tier);
ABI_API const char* glm53_tier_verify(Glm53Tier* tier);
/* Replaces a damaged record of the engine's arena between two passes; data: the record's bytes. arena: the one that the engine was made
 * with. */
ABI_API int glm53_tier_repair(Glm53Tier* tier, Glm53Arena* arena, uint64_t record, const void* data);
/* Saves the heat, stops the threads. */
ABI_API void glm53_tier_close(Glm53Tier* tier);

/* cpu_expert. step and run return the ServerStep number (tier/job_server.h); run returns after max_ms, on quit, or when drained. */
ABI_API Glm53Server* glm53_server_attach(const char* ctl_path, const char* arena_path, const char* options);
ABI_API int glm53_server_step(Glm53Server* server, uint64_t now_ns);
ABI_API int glm53_server_run(Glm53Server* server, uint32_t max_ms);
ABI_API int glm53_server_state(const Glm53Server* server);
ABI_API void glm53_server_drain(Glm53Server* server);
ABI_API void glm53_server_beat(Glm53Server* server, uint64_t now_ns);
/* 1: the region that it serves is still the one at the path. */
ABI_API int glm53_server_current(const Glm53Server* server);
ABI_API const char* glm53_server_stats(const Glm53Server* server);
/* kill: leave every word as it is, as a killed process does. */
ABI_API void glm53_server_close(Glm53Server* server, int kill);

/* The worker's side of the protocol without an engine. Times are the caller's. */
ABI_API Glm53Lane* glm53_lane_create(Glm53Region* region, uint64_t heartbeat_timeout_ns, uint64_t job_timeout_ns);
ABI_API int glm53_lane_tick(Glm53Lane* lane, uint64_t now_ns);
/* experts: AbiJobExpert[num_experts]; rows, outs: uint32[num_picks]. 0: down, full, or no buffer. */
ABI_API uint64_t glm53_lane_submit(Glm53Lane* lane, uint32_t layer, uint32_t num_rows, const float* x, uint32_t num_experts,
                                   const AbiJobExpert* experts, uint32_t num_picks, const uint32_t* rows, const uint32_t* outs,
                                   uint64_t now_ns);
/* 0 pending, 1 done, 2 failed. */
ABI_API int glm53_lane_poll(Glm53Lane* lane, uint64_t seq, uint64_t now_ns, const float** rows, uint32_t* buffer, uint32_t* status);
ABI_API void glm53_lane_release(Glm53Lane* lane, uint32_t buffer);
ABI_API void glm53_lane_abort(Glm53Lane* lane, uint64_t now_ns);
ABI_API uint64_t glm53_lane_epoch(const Glm53Lane* lane);
ABI_API uint32_t glm53_lane_free_buffers(const Glm53Lane* lane);
ABI_API const char* glm53_lane_reason(const Glm53Lane* lane);
ABI_API void glm53_lane_close(Glm53Lane* lane);

/* Replays a routing trace, picks uint16[tokens][num_layers][top_k], against a cache policy (tier/simulator.h: 0 heat, 1 CLOCK, 2 LRU,
 * 3 Belady). outcome: picks, hits and admissions after the first warm_tokens tokens. */
ABI_API int glm53_simulate_cache(uint32_t policy, const uint16_t* picks, uint32_t tokens, uint32_t num_layers, uint32_t top_k,
                                 uint32_t experts_per_layer, uint32_t warm_tokens, const char* options, uint64_t outcome[3]);

#ifdef __cplusplus
}
#endif

#endif /* GLM53_EXPERT_TIER_H_ */
