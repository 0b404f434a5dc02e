// Plans every step and runs the CPU lane, in a thread of its own that never takes the GIL. It always answers: a step that it cannot place,
// or whose lane job breaks, is answered too, with an error or with recomputed rows.
//
// A device whose waits are ordinary function calls (the CPU) may let the waiting thread do the controller's next piece of work itself
// (`caller_runs`): the same functions under the same lock, without two context switches per layer. The thread then only watches the lane.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "tier/backend.h"
#include "tier/options.h"
#include "tier/stats.h"

namespace glm53 {

// One request and its answer. The engine writes `request`, then raises the request word; the controller writes the rest before it raises
// the plan word (plan, error) and the cold word (cold).
struct Step {
  StepRequest request;
  StepPlan plan;
  std::string plan_error;  // not empty: nothing of the plan may be used
  ColdReply cold;
  std::string cold_error;
};

class Controller {
 public:
  static constexpr uint32_t kRing = 4;

  Controller(const Arena& arena, const TierOptions& options, Device& device, std::unique_ptr<ExpertBackend> backend, CostModel costs);
  ~Controller();

  Step& step(uint64_t pass) { return ring_[pass % kRing]; }
  SeqWord* request_word() { return &request_word_; }
  SeqWord* plan_word() { return &plan_word_; }
  SeqWord* cold_word() { return &cold_word_; }
  SeqWord* pass_word() { return &pass_word_; }
  // Answers what is still open of the pass: the plan, or the CPU lane's rows. The controller's thread calls it, and a waiting caller may.
  void answer_plan(uint64_t pass);
  void answer_cold(uint64_t pass);
  bool caller_runs() const { return caller_runs_; }
  // Before the pass word is raised: the pass broke, what it was to copy is not there.
  void mark_failed(uint64_t pass) { failed_pass_.store(pass, std::memory_order_release); }

  // Everything below is for any thread.
  struct Snapshot {
    TierStats stats;
    PlannerCounters planner;
    LaneSnapshot lane;
    uint32_t slots_used;
    double ct_a_us, ct_scale, hot_scale;
  };
  Snapshot snapshot();
  bool lane_up() const { return lane_up_.load(std::memory_order_acquire); }
  // Runs `change` on the statistics under the lock.
  template <typename Change>
  void update(const Change& change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    change(stats_, costs_);
  }
  std::vector<uint8_t> save_heat();
  // Calls visit(slot, record) for every resident slot, with the planner held off.
  template <typename Visit>
  void for_each_resident(const Visit& visit) {
    const std::lock_guard<std::mutex> lock(mutex_);
    slots_.settle(pass_word_.value(), failed_pass_.load());
    for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
      if (slots_.record_in(slot) != SlotTable::kNone) visit(slot, static_cast<uint32_t>(slots_.record_in(slot)));
    }
  }
  // Empties the slot that holds a copy of the record, if there is one. Not while a pass is under way.
  void forget(uint32_t record) {
    const std::lock_guard<std::mutex> lock(mutex_);
    slots_.settle(pass_word_.value(), failed_pass_.load());
    if (const int32_t slot = slots_.resident(record); slot != SlotTable::kNone) slots_.evict(slot, pass_word_.value());
  }
  const char* backend_name() const { return backend_->name(); }
  const std::string& heat_note() const { return heat_note_; }

 private:
  void run();
  void plan(Step* step);
  void collect(Step* step);
  void recompute(Step* step);
  void count(const Step& step);
  // Looks at the lane, prices it when it has just come up; true while it may be used.
  bool lane_ready(uint64_t now_ns);
  void look_at_lane();
  void load_heat();

  const Arena& arena_;
  const TierOptions options_;
  const bool cpu_lane_;
  const bool caller_runs_;
  std::unique_ptr<ExpertBackend> backend_;
  InProcessBackend fallback_;

  std::mutex serve_mutex_;        // whoever answers holds it; guards backend_, fallback_ and the following
  bool priced_ = false;           // the lane's costs were measured since it came up
  uint64_t planned_ = 0;          // last pass whose plan is answered
  uint64_t collected_ = 0;        // last pass whose CPU rows are answered
  std::vector<uint32_t> counts_;  // scratch of group_picks
  int64_t held_buffer_ = -1;      // of the last pass, until it is over

  std::mutex mutex_;  // taken after serve_mutex_; guards everything down to the next empty line
  HeatTable heat_;
  SlotTable slots_;
  CostModel costs_;
  Planner planner_;
  TierStats stats_;
  LaneSnapshot lane_snapshot_;

  std::string heat_note_;
  std::array<Step, kRing> ring_;
  SeqWord request_word_, plan_word_, cold_word_, pass_word_, idle_word_;
  std::atomic<uint64_t> failed_pass_{0};
  std::atomic<bool> lane_up_{false};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace glm53
