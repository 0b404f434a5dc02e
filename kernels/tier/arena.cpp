#include "tier/arena.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tier/handshake.h"

namespace glm53 {
namespace {

AbiArenaHeader header_for(const ArenaSpec& spec) {
  AbiArenaHeader h{};
  h.magic = ABI_ARENA_MAGIC;
  h.abi_version = ABI_VERSION;
  h.arithmetic_version = MOE_ARITHMETIC_VERSION;
  h.layout_hash = abi_layout_hash();
  h.state = ABI_STATE_FILLING;
  h.num_layers = spec.num_layers;
  h.experts_per_layer = spec.experts_per_layer;
  h.num_slots = static_cast<uint64_t>(spec.num_layers) * spec.experts_per_layer;
  for (uint32_t i = 0; i < spec.num_layers && i < ABI_MAX_LAYERS; ++i) {
    if (spec.shapes[i].hidden != spec.shapes[0].hidden) {
      throw Error(GLM53_INVALID, format("layer %u has hidden %u, layer 0 has %u: all layers of an arena have one width", i,
                                        spec.shapes[i].hidden, spec.shapes[0].hidden));
    }
    h.record_stride = std::max(h.record_stride, spec.shapes[i].record_bytes);
  }
  std::memcpy(h.checkpoint_hash, spec.checkpoint_hash, sizeof h.checkpoint_hash);
  if (abi_arena_geometry(&h) != 0) {
    throw Error(GLM53_INVALID, format("arena of %u layers (1..%u) x %u experts (1..65536) x %u bytes (a multiple of 4096): out of range",
                                      spec.num_layers, ABI_MAX_LAYERS, spec.experts_per_layer, h.record_stride));
  }
  return h;
}

std::string hex(const uint8_t* bytes, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += format("%02x", bytes[i]);
  return text;
}

// Everything that any reader must insist on.
void check_header(const AbiArenaHeader& h, const Mapping& mapping, uint64_t generation) {
  const Handshake check{mapping.path()};
  check.same("magic", h.magic, ABI_ARENA_MAGIC);
  check.same("abi_version", h.abi_version, ABI_VERSION);
  check.same("layout_hash", h.layout_hash, abi_layout_hash());
  check.same("arithmetic_version", h.arithmetic_version, MOE_ARITHMETIC_VERSION);
  check.same("state", __atomic_load_n(&h.state, __ATOMIC_ACQUIRE), ABI_STATE_READY);
  check.same("total_bytes", mapping.bytes(), h.total_bytes);
  if (generation != 0) check.same("generation", h.generation, generation);
  AbiArenaHeader own = h;
  if (abi_arena_geometry(&own) != 0 || std::memcmp(&own, &h, sizeof own) != 0) {
    throw Error(GLM53_MISMATCH, mapping.path() + ": the offsets in the header are not those of its counts");
  }
}

}  // namespace

Arena::Arena(Mapping mapping, bool owner)
    : mapping_(std::move(mapping)), owner_(owner), header_(reinterpret_cast<AbiArenaHeader*>(mapping_.data())) {}

void Arena::bind() {
  shapes_ = reinterpret_cast<MoeExpertShape*>(mapping_.data() + header_->shapes_offset);
  generations_ = reinterpret_cast<uint32_t*>(mapping_.data() + header_->generations_offset);
  checksums_ = reinterpret_cast<uint64_t*>(mapping_.data() + header_->checksums_offset);
  records_ = mapping_.data() + header_->records_offset;
}

std::unique_ptr<Arena> Arena::create(const std::string& path, const ArenaSpec& spec) {
  AbiArenaHeader h = header_for(spec);
  h.generation = random_id();
  std::unique_ptr<Arena> arena(new Arena(Mapping::create(path, h.total_bytes), true));
  if (!arena->mapping_.try_lock()) throw Error(GLM53_IN_USE, path + ": the new segment is locked by somebody else");
  *arena->header_ = h;
  arena->bind();
  std::memcpy(arena->shapes_, spec.shapes, spec.num_layers * sizeof(MoeExpertShape));
  return arena;
}

std::unique_ptr<Arena> Arena::attach(const std::string& path, uint64_t generation) {
  std::unique_ptr<Arena> arena(new Arena(Mapping::open(path, sizeof(AbiArenaHeader)), false));
  check_header(*arena->header_, arena->mapping_, generation);
  arena->bind();
  return arena;
}

std::unique_ptr<Arena> Arena::adopt(const std::string& path, const ArenaSpec& spec) {
  const AbiArenaHeader want = header_for(spec);
  std::unique_ptr<Arena> arena(new Arena(Mapping::open(path, sizeof(AbiArenaHeader)), true));
  // The lock first: while another worker lives, nothing about its arena is ours to judge.
  if (!arena->mapping_.try_lock()) {
    throw Error(GLM53_IN_USE, path + " belongs to a running worker: give this deployment another GLM53_INSTANCE");
  }
  const AbiArenaHeader& h = *arena->header_;
  check_header(h, arena->mapping_, 0);
  arena->bind();
  const Handshake check{path};
  check.same("num_layers", h.num_layers, want.num_layers);
  check.same("experts_per_layer", h.experts_per_layer, want.experts_per_layer);
  check.same("record_stride", h.record_stride, want.record_stride);
  if (std::memcmp(h.checkpoint_hash, want.checkpoint_hash, sizeof h.checkpoint_hash) != 0) {
    throw Error(GLM53_MISMATCH, format("%s: checkpoint_hash is %s, expected %s", path.c_str(), hex(h.checkpoint_hash, 32).c_str(),
                                       hex(want.checkpoint_hash, 32).c_str()));
  }
  if (std::memcmp(arena->shapes_, spec.shapes, spec.num_layers * sizeof(MoeExpertShape)) != 0) {
    throw Error(GLM53_MISMATCH, path + ": the records are laid out for other expert shapes");
  }
  for (uint64_t slot = 0; slot < h.num_slots; ++slot) {
    const uint32_t generation = arena->generation_of(slot);
    if (generation == 0 || generation % 2 != 0) {
      throw Error(GLM53_MISMATCH, format("%s: slot %llu has generation %u, expected an even one: its last writer died while writing it",
                                         path.c_str(), static_cast<unsigned long long>(slot), generation));
    }
  }
  return arena;
}

void Arena::require_slot(uint64_t slot) const {
  if (slot >= header_->num_slots) {
    throw Error(GLM53_INVALID, format("slot %llu of an arena of %llu", static_cast<unsigned long long>(slot),
                                      static_cast<unsigned long long>(header_->num_slots)));
  }
}

void Arena::require_owner(const char* action) const {
  if (!owner_) throw Error(GLM53_INVALID, format("only the owner of an arena may %s it, and %s is attached", action, path().c_str()));
}

void Arena::finish(uint64_t first, uint64_t count) {
  require_owner("fill");
  if (count == 0) return;
  require_slot(first);
  require_slot(first + count - 1);
  for (uint64_t slot = first; slot < first + count; ++slot) {
    checksums_[slot] = abi_checksum(record(slot), record_bytes(slot));
    abi_store_generation(&generations_[slot], 2);
  }
}

void Arena::seal() {
  require_owner("seal");
  for (uint64_t slot = 0; slot < header_->num_slots; ++slot) {
    if (generation_of(slot) == 0) finish(slot, 1);
  }
  __atomic_store_n(&header_->state, static_cast<uint32_t>(ABI_STATE_READY), __ATOMIC_RELEASE);
  mapping_.publish();
}

bool Arena::check(uint64_t slot) const {
  require_slot(slot);
  return abi_checksum(record(slot), record_bytes(slot)) == checksums_[slot];
}

void Arena::rewrite_begin(uint64_t slot) {
  require_owner("rewrite");
  require_slot(slot);
  abi_store_generation(&generations_[slot], generation_of(slot) | 1u);
  // Without the fence the record's stores could become visible before the odd generation does.
  abi_full_fence();
}

void Arena::rewrite_end(uint64_t slot) {
  require_owner("rewrite");
  require_slot(slot);
  checksums_[slot] = abi_checksum(record(slot), record_bytes(slot));
  abi_store_generation(&generations_[slot], (generation_of(slot) | 1u) + 1u);
}

void Arena::unlink() {
  require_owner("unlink");
  mapping_.unlink_if_current();
}

}  // namespace glm53
