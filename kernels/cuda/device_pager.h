// Brings picked records into slots while the device waits, without the GIL: by the copy engine, one transfer for every miss, or by one
// gather on the multiprocessors.
//
// One layer step, in the order of the compute stream:
//   1. the picks are copied to pinned memory, the request word is raised;
//   2. the device waits until the reply word has reached the step's number;
//   3. the layer's kernels run.
// Between 1 and 2 the pager's thread sees the request, decides, and enqueues on the copy stream: records into slots, then the layer's table
// if it changed, then the reply. With nothing to copy it stores the reply itself.
//
// Why no event is needed: when a request is seen, every kernel before it in the compute stream is over, so any slot that this step does not
// read may be overwritten, and any table block that was copied before has been read. A record is in its slot for every kernel after the
// reply, and only those. A table is brought up to date at its own layer's turn, however many slots of its were taken meanwhile.
//
// Admission: a missing record takes a free slot, or the coldest record's if it is hotter; else one of the transit slots, for this step
// alone; else, a record that passes, the coldest one's slot all the same, and is the next to leave it; else it is read in place. Slots that
// wait for what passes are slots less for what stays: one step of one stream needs about two. If a copy cannot be enqueued the record is
// read in place too, so that every request is answered.
//
// The two ways to copy differ in nothing but who moves the bytes. With a gather (PagerDriver) a step's misses are noted while it is decided
// where each goes, and launched together on the copy stream, ahead of the table and of the reply. If that launch fails, all of them are
// read in place, as after a copy that fails. Hints stay with the copy engine: their chunks must end soon when a step asks.
//
// How far the host may be ahead. A stream takes some thousand launches that wait; the next one blocks in the driver, with locks that the
// pager's calls need too, and nobody would be left to let the device go on. A step of every layer is more than that, so the stepping thread
// waits by itself when a few layers are unanswered. And what may make the host wait for the device inside the driver (a graph that is
// captured, code that is loaded) is done with nothing unanswered: `catch_up` before it.
//
// Hints (device_hints.h) bring records of the next layer ahead of its request, while the copy engine has nothing else to do, into slots
// that are set aside for them.
//
// `fast` (expert_pager.h, device_pager_fast.cpp) is the same with three differences. The kernels read `records`, one address an expert, so
// a step sends that row and the tables wait for the next flush. A pick of the CPU lane has the address 0 for its step alone. And there is a
// second word, for the lane's rows: the pager raises it when cpu_expert has answered, or when it has computed the picks itself.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device_costs.h"
#include "cuda/device_hints.h"
#include "cuda/device_lane.h"
#include "expert_pager.h"
#include "tier/heat.h"
#include "tier/slot_table.h"
#include "tier/spin.h"
#include "tier/stats.h"

namespace glm53 {

// What `fast` adds to a pager.
struct FastParts {
  FastParts(const PagerSpec& spec, const PagerFast& fast, const Arena& arena, Region* region);

  PagerFast spec;
  std::vector<void*> experts;  // [layers]
  const Arena& arena;
  std::unique_ptr<DeviceLane> lane;  // null: never one
  uint32_t hidden;
  // The stepping thread's: the step that was published and waits for its second half.
  bool published = false, with_x = false;
  uint32_t layer = 0, rows = 0;
  uint64_t selected = 0, x = 0;
  std::atomic<bool> lane_wanted{true};

  // Everything below is guarded by the pager's mutex.
  struct Entry {
    LaneExpert picks;
    int32_t slot;  // or SlotTable::kNone
    float heat;
    bool in_lane;
    Lane lane = Lane::kZeroCopy;  // of a miss that is not in_lane: where it is read in the end
  };
  DeviceCosts costs;
  StepForecast forecast;
  TierStats stats;
  std::vector<bool> dirty;                    // [layers]: the mirror of `records` is ahead
  std::vector<std::vector<uint32_t>> masked;  // [layers]: experts whose address is 0
  std::vector<Entry> entries;                 // of the step
  std::vector<uint32_t> order;                // entries that are in no slot, coldest first
  std::vector<uint32_t> picks;                // the entries' picks
  std::vector<LaneExpert> job;                // entries of the CPU lane
  std::vector<CostedMiss> misses;             // as order
  std::vector<uint32_t> entry_of;             // [experts]
  std::mt19937_64 random;
  uint32_t placement = PAGER_BY_COST;
  uint32_t unused = 0;               // steps in a row for which the costs chose no lane, those without misses too
  uint32_t useful = 0;               // steps in a row for which they chose one, those without misses left out; long ago counts none
  std::vector<CostedMiss> job_rows;  // of `job`
  uint64_t evictions = 0;
  uint32_t links_timed = 0;
  DeviceLane::Snapshot lane_seen{};
};

class DevicePager {
 public:
  explicit DevicePager(const PagerSpec& spec, std::unique_ptr<FastParts> fast = nullptr);
  ~DevicePager();
  DevicePager(const DevicePager&) = delete;
  DevicePager& operator=(const DevicePager&) = delete;

  void step(uint32_t layer, uint32_t rows, uint64_t selected, void* stream);
  // Waits until at most `most` steps are unanswered. What is answered needs nobody but the device. Throws kTimeout.
  void catch_up(uint32_t most, uint64_t timeout_ns);
  void ask(uint32_t layer, uint32_t rows, uint64_t selected, void* stream);
  void wait(void* stream);
  void hint(uint32_t layer, uint32_t rows, uint64_t ids, uint32_t width, void* stream);
  void publish(uint32_t layer, uint32_t rows, uint64_t selected, uint64_t x, void* stream);
  void finish(uint32_t layer, uint32_t rows, uint64_t weights, uint64_t shared, uint64_t out, void* stream);
  void force(uint32_t placement, uint64_t seed);
  bool lane_up() const { return fast_ != nullptr && fast_->lane != nullptr && fast_->lane->up(); }
  std::string fast_stats();
  void put(uint32_t record, uint32_t slot);
  void vacate(uint32_t first_slot, uint32_t count);
  void limit(uint32_t usable_slots);
  void flush(void* stream);
  void where(int32_t* slot_of);
  void read_heat(float* slow, float* fast);
  void write_heat(const float* slow, const float* fast);
  void stats(uint64_t counters[8]);
  void hint_stats(uint64_t counters[6]);

 private:
  static constexpr uint32_t kRing = 1024;
  static constexpr uint32_t kMostAhead = 8;         // steps that wait for an answer while another is enqueued: up to 50 launches each
  static constexpr uint32_t kWaitGreaterEqual = 0;  // CU_STREAM_WAIT_VALUE_GEQ, cyclic
  static constexpr uint32_t kWriteDefault = 0;
  static constexpr uint32_t kRequest = 0, kScratch = 16, kReply = 32, kLaneReply = 48, kHint = 56, kHintLanded = 60;

  enum Counter { kSteps, kPicks, kHits, kMissed, kAdmitted, kTransit, kInPlace, kBytes };

  struct Step {
    uint32_t layer, rows;
    bool with_x;  // the activations were published too
  };
  struct Miss {
    uint32_t expert;
    float heat;
  };

  static void require(bool holds, const char* problem);
  void run();
  // False when told to stop before the device got there.
  bool wait_for_request(uint64_t number);
  void answer(uint64_t number, const Step& step);
  void choose(const Step& step, uint64_t pass);
  void start_step(const Step& step, uint64_t pass);
  uint64_t enter(uint32_t layer, uint32_t rows, bool with_x);
  void refuse(const char* what);
  // Hints
  bool wait_for_armed(uint64_t number, int64_t spin_ns);
  // Does one small thing for the hint that was given in step `number`; true while there is more to do. Never waits.
  bool pump(uint64_t number);
  // The step's reply has reached its word: every copy of it is done.
  bool landed(uint64_t number) const;
  uint32_t chunks_under_way() const;
  void look_at_hint(uint64_t number);
  // False when nothing is left to send, or nothing can be.
  bool send_chunk(uint64_t number);
  bool begin_ahead(uint32_t record, uint64_t number);
  bool send_part(const HintParts::Ahead& a, uint64_t bytes);
  void give_up(const HintParts::Ahead& a, uint64_t pass);
  void meet_hint(const Step& step, uint64_t pass);
  // Sends the rest of a picked record. False when it was given up.
  bool finish_ahead(const HintParts::Ahead& a, uint64_t pass);
  // Heat has seen the step's picks: says how hot its visitors are.
  void weigh_visitors();
  // Visitors that are hotter than the miss, or all of them, get their turn to ask for a slot.
  void keep_visitors(const Miss* until, uint64_t pass);
  void end_visits(uint64_t passes_done);
  uint32_t pool_size() const;
  void fill_pool(uint64_t passes_done);
  // False when the deadline passed first.
  bool chunks_land() const;
  // Waits for what is under way and gives up the rest. Throws kTimeout.
  void end_hints();
  // `fast`
  void answer_fast(uint64_t number, const Step& step);
  void group(const Step& step, uint64_t pass);
  // Fills fast_->job; returns what the step is foretold to take.
  double choose_by_cost(const Step& step, uint64_t pass, bool lane);
  void choose_by_force(bool lane);
  // Lets the lane sleep, or wakes it: what it may not want is not published.
  void note_choice(uint32_t misses, uint32_t chosen);
  bool start_job(const Step& step, uint64_t number);
  void fetch(const Step& step, uint64_t pass);
  void evict_at_random(uint64_t pass);
  void probe_lane();
  void sample_lane();
  void look_at_lane();
  double time_link();
  void follow(uint64_t number, uint32_t layer, uint32_t copies, bool job, uint64_t replied_ns);
  void raise_lane_reply(uint64_t number, uint64_t rows_at);
  void set_record(uint32_t layer, uint32_t expert, uint64_t address);
  void unmask(uint32_t layer);
  void send_records(uint32_t layer);
  Lane bring(uint32_t layer, const Miss& miss, uint64_t pass);
  // True when the record is on its way, or noted for the step's gather.
  bool copy(uint32_t record, uint32_t slot);
  // Enqueues copies of whole records, each once; true when all of them are.
  bool move(const MoeCudaCopy* copies, uint32_t count);
  // The gather
  void note_gathered(uint32_t expert, uint32_t slot, Counter counted);
  // Launches what the step noted, or has it read in place.
  void launch_gather(uint32_t layer, uint64_t pass);
  void read_in_place(uint32_t layer, uint64_t pass);
  void reply(uint64_t number);
  bool send_table(uint32_t layer, void* stream);
  void end_transit(uint32_t layer);
  void point(uint32_t layer, uint32_t expert, uint64_t address);
  void point_at_host(uint32_t record);
  uint64_t on_host(uint32_t record) const { return spec_.host_on_device + record * spec_.record_stride; }
  uint64_t in_slot(uint32_t slot) const { return spec_.slots + slot * spec_.record_stride; }
  struct Place {
    int32_t slot;  // free, or the coldest record's; or SlotTable::kNone
    bool earned;   // by the newcomer's heat
  };
  Place find_place(uint32_t record, float heat, uint64_t pass);
  // Empties a slot whose readers have passed.
  void drive_out(int32_t slot, uint64_t passes_done);
  bool check(int code);

  PagerSpec spec_;
  const PagerDriver& driver_;
  std::vector<int64_t> offsets_;
  void* context_ = nullptr;
  std::array<Step, kRing> ring_{};
  // The stepping thread's: steps that it entered, and the one of `exact` that was asked for and is not waited for yet.
  uint64_t enqueued_ = 0;
  bool asked_ = false;
  uint32_t asked_layer_ = 0;
  const std::unique_ptr<HintParts> hints_;  // null: there are none
  SeqWord armed_;                           // steps whose request is enqueued
  std::atomic<uint64_t> served_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> failed_{false};

  std::mutex mutex_;  // guards everything below
  HeatTable heat_;
  SlotTable slots_;                                // of the slots after the transit ones
  std::vector<bool> dirty_;                        // [layers]: the mirror is ahead of the table
  std::vector<std::vector<uint32_t>> in_transit_;  // [layers]: experts whose addresses are a transit slot
  std::vector<uint64_t> seen_;                     // [experts]: number of the step that picked it last
  std::vector<Miss> misses_;
  // The step's records that wait for its gather: what is copied, and what is to be undone if that fails.
  struct Gathered {
    uint32_t expert, slot;
    Counter counted;
  };
  std::vector<MoeCudaCopy> gather_;
  std::vector<Gathered> gathered_;
  // The step's: what leaves its slot first. Heat stays as it is once the picks are known, so one look at all slots does for every miss.
  std::vector<std::pair<float, int32_t>> coldest_;
  size_t coldest_left_ = 0;  // those before it have left
  bool coldest_known_ = false;
  uint32_t step_picks_ = 0;
  uint32_t transit_used_ = 0, passing_ = 0, copies_ = 0;
  uint32_t usable_;    // slots that there is memory for; the transit ones are among them
  bool sent_ = false;  // this step enqueued something on the copy stream
  uint64_t counters_[8] = {};

  const std::unique_ptr<FastParts> fast_;  // null: exact
  std::thread thread_;
};

}  // namespace glm53
