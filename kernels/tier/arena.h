// The home of the expert records in shared memory. expert_abi.h has the layout and the rules.
#pragma once

#include <memory>
#include <string>

#include "tier/error.h"
#include "tier/mapping.h"

namespace glm53 {

// What an arena is made for; a READY arena is adopted only when all of it is equal.
struct ArenaSpec {
  const MoeExpertShape* shapes;
  uint32_t num_layers;
  uint32_t experts_per_layer;
  const uint8_t* checkpoint_hash;  // [32]
};

class Arena {
 public:
  static std::unique_ptr<Arena> create(const std::string& path, const ArenaSpec& spec);
  static std::unique_ptr<Arena> attach(const std::string& path, uint64_t generation);
  static std::unique_ptr<Arena> adopt(const std::string& path, const ArenaSpec& spec);

  const AbiArenaHeader& header() const { return *header_; }
  const MoeExpertShape& shape(uint32_t layer) const { return shapes_[layer]; }
  uint8_t* record(uint64_t slot) const { return records_ + slot * header_->record_stride; }
  uint32_t generation_of(uint64_t slot) const { return abi_load_generation(&generations_[slot]); }
  bool owner() const { return owner_; }
  const std::string& path() const { return mapping_.path(); }

  void finish(uint64_t first, uint64_t count);
  void seal();
  bool check(uint64_t slot) const;
  void rewrite_begin(uint64_t slot);
  void rewrite_end(uint64_t slot);
  void unlink();

 private:
  Arena(Mapping mapping, bool owner);
  void bind();  // pointers from the header's offsets
  // Record bytes that mean something: those of the slot's layer while slot == layer * experts + expert, which is all that exists so far.
  uint64_t record_bytes(uint64_t slot) const { return shapes_[slot / header_->experts_per_layer].record_bytes; }
  void require_slot(uint64_t slot) const;
  void require_owner(const char* action) const;

  Mapping mapping_;
  bool owner_;
  AbiArenaHeader* header_;
  MoeExpertShape* shapes_ = nullptr;
  uint32_t* generations_ = nullptr;
  uint64_t* checksums_ = nullptr;
  uint8_t* records_ = nullptr;
};

}  // namespace glm53
