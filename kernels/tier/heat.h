// How likely a record is to be wanted soon: the cache policy's only knowledge. No memory but its own, no clock: simulators use it too.
//
// Each record has two exponentially aged counts of the decode steps that touched it: a slow one (long-run popularity) and a fast one
// (what the last few tokens used). Both matter: popularity differs by an order of magnitude between experts, and a third of the picks
// repeat from token to token. The score is an estimate of the chance per step, score = slow / history + fast_weight * fast, so frequency
// and recency are one number. `history` is what the slow count of a record would be that every step had touched: a young table must not
// take every record for a rare one. Time is the layer's own count of decode steps. Prefill neither touches nor ages anything: a long prompt
// cannot wash the decode set out.
//
// What the slow counts know is about one subject. When the picks of all layers suddenly have less of the chance that they used to have, and
// by more than they ever vary, it is another one, and the counts are forgotten at once: ageing alone would let records of the old subject
// keep their places for as long as they had earned them.
#pragma once

#include <algorithm>
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
  float forget_below = 0.85f;  // picks that have less than this share of their usual chance may be of another subject; 0: never
};

// Says when picks stop being those that are expected. A round is one step of every layer.
class SubjectChange {
 public:
  explicit SubjectChange(float below) : below_(below) {}
  // chance: what the picks of the round had on average, before it touched them. True: another subject, and it starts anew.
  bool round(float chance);

 private:
  struct Mean {
    float sum = 0, weight = 0;
    void add(float value, float half_life);
    float get() const { return sum / weight; }
  };
  static constexpr float kRecent = 2, kUsual = 60;  // half-lives in rounds
  static constexpr float kRecentNoise = 0.17157f;   // of one round's variance, what is left in a mean of half-life kRecent
  static constexpr float kSigmas = 4.5f;
  static constexpr uint32_t kLeast = 20;  // rounds before which nothing is usual yet

  float below_;
  Mean recent_, usual_, variance_;
  uint32_t rounds_ = 0;
};

class HeatTable {
 public:
  struct Entry {
    float slow = 0;  // both as of `last`
    float fast = 0;
    uint32_t last = 0;     // step of the last touch
    uint32_t touches = 0;  // saturating
  };

  HeatTable(uint32_t num_layers, uint32_t experts_per_layer, const HeatParams& params = {});

  // A decode step of the layer begins.
  void advance(uint32_t layer);
  // The current step of the record's layer uses it.
  void touch(uint32_t id);
  float score(uint32_t id) const {
    const Entry& e = entries_[id];
    const uint32_t layer = id / experts_per_layer_, age = std::min(clock_[layer] - e.last, kTable - 1);
    return e.slow * slow_table_[age] * per_history_[layer] + params_.fast_weight * e.fast * fast_table_[age];
  }
  uint32_t touches(uint32_t id) const { return entries_[id].touches; }
  // The two parts of every score as of now, fast without its weight, and their way back: float [num_layers * experts_per_layer] each. What
  // an earlier run knew weighs half of what a long history does; a layer of which nothing is known has none.
  void read(float* popularity, float* fast) const;
  void write(const float* popularity, const float* fast);

  // Versioned bytes, keyed by the checkpoint: a restart starts warm. load() is false, and changes nothing, when they belong to another
  // version, checkpoint or shape, or are damaged.
  std::vector<uint8_t> save(const uint8_t* checkpoint_hash) const;
  bool load(const std::vector<uint8_t>& bytes, const uint8_t* checkpoint_hash, std::string* why);

 private:
  static constexpr uint32_t kTable = 8192;
  static constexpr float kEarlier = 0.5f;  // of a long history: a power of two, so that what is written is read again
  void set_history(uint32_t layer, float history);
  void end_round();
  void forget();

  HeatParams params_;
  uint32_t experts_per_layer_;
  std::vector<uint32_t> clock_;                 // [num_layers]
  std::vector<Entry> entries_;                  // [num_layers * experts_per_layer]
  std::vector<float> slow_table_, fast_table_;  // 2^(-age / half life)
  float slow_gain_, fast_gain_;                 // what one touch adds, so that both counts are chances per step
  // [num_layers]: 1 - 2^(-steps / half life), and its inverse with one more step that touched nothing: no chance is known to be 1.
  std::vector<float> history_, per_history_;
  SubjectChange change_;
  uint32_t last_layer_ = 0, round_touches_ = 0;
  float round_chance_ = 0;  // sum over the round's touches
};

// Writes heat under a temporary name of its own, syncs, renames. A link stays one, a file that was there leaves its mode. Throws kSystem,
// and changes nothing, also when what lies at the path is neither empty nor heat.
void write_heat_file(const std::string& path, const std::vector<uint8_t>& bytes);
// False when there is no such file.
bool read_file(const std::string& path, std::vector<uint8_t>* bytes);

}  // namespace glm53
