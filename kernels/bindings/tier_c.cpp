#include "bindings/guard.h"
#include "expert_tier.h"
#include "tier/engine.h"
#include "tier/simulator.h"

using glm53::guarded;

struct Glm53Tier {
  glm53::TierEngine engine;
};
struct Glm53Server {
  glm53::JobServer server;
};
struct Glm53Lane {
  glm53::LaneClient client;
};

namespace {

// The text of a JSON answer lives until the thread asks for the next one.
const char* keep(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

template <typename Number>
std::string list(const std::vector<Number>& numbers) {
  std::string text = "[";
  for (const Number number : numbers) text += (text.size() > 1 ? ", " : "") + std::to_string(number);
  return text + "]";
}

}  // namespace

extern "C" {

Glm53Tier* glm53_tier_create(const Glm53Arena* arena, Glm53Region* region, const char* options) {
  return guarded<Glm53Tier*>(nullptr, [&] {
    return new Glm53Tier{{*arena->impl, region == nullptr ? nullptr : region->impl.get(), glm53::parse_tier_options(options)}};
  });
}

int glm53_tier_forward(Glm53Tier* tier, uint32_t layer, uint32_t rows, uint32_t top_k, const float* x, const int64_t* sel,
                       const float* weights, int prefill, float* out) {
  return guarded(-1, [&] { return tier->engine.forward({layer, rows, top_k, x, sel, weights, prefill != 0, out}), 0; });
}

int glm53_tier_lane_up(const Glm53Tier* tier) { return tier->engine.lane_up(); }

const char* glm53_tier_stats(Glm53Tier* tier) {
  return guarded<const char*>(nullptr, [&] { return keep(tier->engine.stats_json()); });
}

const char* glm53_tier_verify(Glm53Tier* tier) {
  return guarded<const char*>(nullptr, [&] {
    const glm53::VerifyReport report = tier->engine.verify();
    glm53::JsonObject o;
    o.add("records", report.records).add("slots", report.slots);
    o.add_raw("bad_records", list(report.bad_records)).add_raw("bad_slots", list(report.bad_slots));
    return keep(o.text());
  });
}

int glm53_tier_repair(Glm53Tier* tier, Glm53Arena* arena, uint64_t record, const void* data) {
  return guarded(-1, [&] { return tier->engine.repair(*arena->impl, record, static_cast<const uint8_t*>(data)), 0; });
}

void glm53_tier_close(Glm53Tier* tier) { delete tier; }

Glm53Server* glm53_server_attach(const char* ctl_path, const char* arena_path, const char* options) {
  return guarded<Glm53Server*>(nullptr, [&] { return new Glm53Server{{ctl_path, arena_path, glm53::parse_server_options(options)}}; });
}

int glm53_server_step(Glm53Server* server, uint64_t now_ns) {
  server->server.step(now_ns);
  return static_cast<int>(server->server.state());
}

int glm53_server_run(Glm53Server* server, uint32_t max_ms) {
  return static_cast<int>(server->server.run(static_cast<int64_t>(max_ms) * 1000000));
}

int glm53_server_state(const Glm53Server* server) { return static_cast<int>(server->server.state()); }

void glm53_server_drain(Glm53Server* server) { server->server.drain(); }

void glm53_server_beat(Glm53Server* server, uint64_t now_ns) { server->server.beat(now_ns); }

int glm53_server_current(const Glm53Server* server) { return const_cast<Glm53Server*>(server)->server.region().current(); }

const char* glm53_server_stats(const Glm53Server* server) {
  return guarded<const char*>(nullptr, [&] {
    const glm53::ServerCounters& c = server->server.counters();
    glm53::JsonObject o;
    o.add("jobs", c.jobs).add("picks", c.picks).add("experts", c.experts).add("bytes", c.bytes).add("dropped", c.dropped);
    o.add("stale", c.stale).add("bad", c.bad).add("acks", c.acks);
    o.add("kernel", std::string(moe_variant_name(moe_pool_variant(server->server.pool()))));
    o.add("kernel_reason", std::string(moe_pool_reason(server->server.pool())));
    o.add_raw("huge_bytes", std::to_string(server->server.huge_bytes()));
    o.add("huge_note", server->server.huge_note()).add("mapped_bytes", server->server.mapped_bytes());
    return keep(o.text());
  });
}

void glm53_server_close(Glm53Server* server, int kill) {
  if (kill != 0) server->server.play_dead();
  delete server;
}

Glm53Lane* glm53_lane_create(Glm53Region* region, uint64_t heartbeat_timeout_ns, uint64_t job_timeout_ns) {
  return guarded<Glm53Lane*>(nullptr, [&] { return new Glm53Lane{{*region->impl, heartbeat_timeout_ns, job_timeout_ns}}; });
}

int glm53_lane_tick(Glm53Lane* lane, uint64_t now_ns) { return lane->client.tick(now_ns); }

uint64_t glm53_lane_submit(Glm53Lane* lane, uint32_t layer, uint32_t num_rows, const float* x, uint32_t num_experts,
                           const AbiJobExpert* experts, uint32_t num_picks, const uint32_t* rows, const uint32_t* outs, uint64_t now_ns) {
  return guarded<uint64_t>(0, [&]() -> uint64_t {
    if (num_rows > lane->client.max_rows() || num_picks > lane->client.max_picks() || num_experts > lane->client.max_picks()) {
      throw glm53::Error(GLM53_INVALID, "the job does not fit the region's geometry");
    }
    glm53::LaneJob job;
    job.layer = layer;
    job.num_rows = num_rows;
    job.experts.assign(experts, experts + num_experts);
    job.rows.assign(rows, rows + num_picks);
    job.outs.assign(outs, outs + num_picks);
    return lane->client.submit(job, x, now_ns);
  });
}

int glm53_lane_poll(Glm53Lane* lane, uint64_t seq, uint64_t now_ns, const float** rows, uint32_t* buffer, uint32_t* status) {
  glm53::LaneResult result;
  const auto poll = lane->client.poll(seq, now_ns, &result);
  *rows = result.rows;
  *buffer = result.buffer;
  *status = result.status;
  return static_cast<int>(poll);
}

void glm53_lane_release(Glm53Lane* lane, uint32_t buffer) { lane->client.release(buffer); }

void glm53_lane_abort(Glm53Lane* lane, uint64_t now_ns) { lane->client.abort(glm53::DownReason::kAborted, now_ns); }

uint64_t glm53_lane_epoch(const Glm53Lane* lane) { return lane->client.epoch(); }

uint32_t glm53_lane_free_buffers(const Glm53Lane* lane) { return lane->client.free_buffers(); }

const char* glm53_lane_reason(const Glm53Lane* lane) { return glm53::down_reason_name(lane->client.reason()); }

void glm53_lane_close(Glm53Lane* lane) { delete lane; }

int glm53_simulate_cache(uint32_t policy, const uint16_t* picks, uint32_t tokens, uint32_t num_layers, uint32_t top_k,
                         uint32_t experts_per_layer, uint32_t warm_tokens, const char* options, uint64_t outcome[3]) {
  return guarded(-1, [&] {
    const glm53::CacheOutcome result =
        glm53::simulate_cache(static_cast<glm53::CachePolicy>(policy), {picks, tokens, num_layers, top_k, experts_per_layer},
                              glm53::parse_tier_options(options), warm_tokens);
    outcome[0] = result.picks;
    outcome[1] = result.hits;
    outcome[2] = result.admissions;
    return 0;
  });
}

}  // extern "C"
