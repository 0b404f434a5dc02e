#include "tier/region.h"

#include <cstring>
#include <utility>

#include "tier/handshake.h"

namespace glm53 {

Region::Region(Mapping mapping, bool owner)
    : mapping_(std::move(mapping)), owner_(owner), header_(reinterpret_cast<AbiCtlHeader*>(mapping_.data())) {}

std::unique_ptr<Region> Region::create(const std::string& path, const Arena& arena, uint32_t ring_len, uint32_t num_buffers,
                                       uint32_t max_rows, uint32_t max_picks) {
  AbiCtlHeader h{};
  h.magic = ABI_CTL_MAGIC;
  h.abi_version = ABI_VERSION;
  h.arithmetic_version = MOE_ARITHMETIC_VERSION;
  h.layout_hash = abi_layout_hash();
  h.generation = random_id();
  h.arena_generation = arena.header().generation;
  h.ring_len = ring_len;
  h.num_buffers = num_buffers;
  h.max_rows = max_rows;
  h.max_picks = max_picks;
  h.max_experts = max_picks;
  h.hidden = arena.shape(0).hidden;
  if (abi_ctl_geometry(&h) != 0) {
    throw Error(GLM53_INVALID,
                format("control region: ring_len %u (2..1024), num_buffers %u (4..1024), max_rows %u (1..1024), max_picks %u "
                       "(max_rows..65536) or hidden %u (a multiple of 128) is out of range",
                       ring_len, num_buffers, max_rows, max_picks, h.hidden));
  }
  std::unique_ptr<Region> region(new Region(Mapping::create(path, h.total_bytes), true));
  std::memcpy(region->header_, &h, sizeof h);
  abi_store(&region->header_->epoch, 1);
  abi_store(&region->header_->worker_beat, abi_now_ns());
  abi_store(&region->header_->state, ABI_STATE_READY);
  region->mapping_.publish();
  return region;
}

std::unique_ptr<Region> Region::attach(const std::string& path, uint64_t generation) {
  std::unique_ptr<Region> region(new Region(Mapping::open(path, sizeof(AbiCtlHeader)), false));
  const AbiCtlHeader& h = *region->header_;
  const Handshake check{path};
  check.same("magic", h.magic, ABI_CTL_MAGIC);
  check.same("abi_version", h.abi_version, ABI_VERSION);
  check.same("layout_hash", h.layout_hash, abi_layout_hash());
  check.same("arithmetic_version", h.arithmetic_version, MOE_ARITHMETIC_VERSION);
  check.same("state", abi_load(&h.state), ABI_STATE_READY);
  check.same("total_bytes", region->mapping_.bytes(), h.total_bytes);
  if (generation != 0) check.same("generation", h.generation, generation);
  AbiCtlHeader own = h;
  if (abi_ctl_geometry(&own) != 0 || std::memcmp(&own, &h, offsetof(AbiCtlHeader, state)) != 0) {
    throw Error(GLM53_MISMATCH, path + ": the offsets in the header are not those of its counts");
  }
  return region;
}

void Region::end_lease() {
  if (leased_) mapping_.unlock();
  leased_ = false;
}

bool Region::lease_is_free() {
  if (leased_ || !mapping_.try_lock()) return false;
  mapping_.unlock();
  return true;
}

void Region::unlink() {
  if (!owner_) throw Error(GLM53_INVALID, format("only the creator of a region may unlink it, and %s is attached", path().c_str()));
  abi_store(&header_->quit, 1);
  ring(&header_->doorbell, header_->server_asleep);
  mapping_.unlink_if_current();
}

void ring(AbiBell* bell, const AbiBell& peer_asleep) {
  abi_store_bell(bell, abi_load_bell(bell) + 1);
  abi_full_fence();
  if (abi_load_bell(&peer_asleep) != 0) abi_futex_wake(&bell->value);
}

void sleep_on(const AbiBell& bell, uint32_t seen, AbiBell* asleep, int64_t timeout_ns) {
  abi_store_bell(asleep, 1);
  abi_full_fence();
  if (abi_load_bell(&bell) == seen) abi_futex_wait(&bell.value, seen, timeout_ns);
  abi_store_bell(asleep, 0);
}

}  // namespace glm53
