// How likely a record is to be wanted soon: the cache policy's only knowledge. No memory but its own, no clock: simulators use it too.
//
// Each record has two exponentially aged counts of the decode steps that touched it: a slow one (long-run popularity) and a fast one
// (what the last few tokens used). Both matter: popularity differs by an order of magnitude between experts, and a third of the picks
// repeat from token to token. The score is an estimate of the chance per step, score = slow + kFastWeight * fast, so frequency and recency
// are one number. Time is the layer's own count of decode steps. Prefill neither touches nor ages anything: a long prompt cannot wash the
// decode set out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace glm53 {

// Chosen on synthetic traces (bench/cache_policy.py): a shorter slow half-life follows a change of subject sooner and costs little in a
// steady stream; the fast part only has to keep what the last token or two used.
struct HeatParams {
  float slow_half_life = 200.0f;  // decode steps
  float fast_half_life = 0.5f;
  float fast_weight = 0.25f;
};

class HeatTable {
 public:
  struct Entry {
    float slow = 0;  // chance per step as of `last`
    float fast = 0;
    uint32_t last = 0;     // step of the last touch
    uint32_t touches = 0;  // saturating
  };

  HeatTable(uint32_t num_layers, uint32_t experts_per_layer, const HeatParams& params = {});

  // A decode step of the layer begins.
  void advance(uint32_t layer) { ++clock_[layer]; }
  // The current step of the record's layer uses it.
  void touch(uint32_t id);
  float score(uint32_t id) const {
    const Entry& e = entries_[id];
    const uint32_t age = clock_[id / experts_per_layer_] - e.last;
    if (age >= kTable) return e.slow * slow_table_[kTable - 1];
    return e.slow * slow_table_[age] + params_.fast_weight * e.fast * fast_table_[age];
  }
  uint32_t touches(uint32_t id) const { return entries_[id].touches; }
  // Both counts as of now, and their way back.
  void read(uint32_t id, float* slow, float* fast) const;
  void write(uint32_t id, float slow, float fast);
  uint32_t size() const { return static_cast<uint32_t>(entries_.size()); }

  // Versioned bytes, keyed by the checkpoint: a restart starts warm. load() is false, and changes nothing, when they belong to another
  // version, checkpoint or shape, or are damaged.
  std::vector<uint8_t> save(const uint8_t* checkpoint_hash) const;
  bool load(const std::vector<uint8_t>& bytes, const uint8_t* checkpoint_hash, std::string* why);

 private:
  static constexpr uint32_t kTable = 8192;
  HeatParams params_;
  uint32_t experts_per_layer_;
  std::vector<uint32_t> clock_;                 // [num_layers]
  std::vector<Entry> entries_;                  // [num_layers * experts_per_layer]
  std::vector<float> slow_table_, fast_table_;  // 2^(-age / half life)
  float slow_gain_, fast_gain_;                 // what one touch adds, so that both counts are chances per step
};

// Writes under a temporary name, syncs, renames. Throws kSystem.
void write_file_atomically(const std::string& path, const std::vector<uint8_t>& bytes);
// False when there is no such file.
bool read_file(const std::string& path, std::vector<uint8_t>* bytes);

}  // namespace glm53
