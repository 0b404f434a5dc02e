#include "tier/job_server.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "moe_host.h"
#include "tier/spin.h"

namespace glm53 {
namespace {

constexpr int64_t kIdleSleepNs = 40'000'000;            // < the beat period: an idle loop still shows progress
constexpr uint64_t kLongestComputeNs = 10'000'000'000;  // a kernel call that takes longer counts as stuck
constexpr int kPausesPerLook = 16;
constexpr auto kBeatPeriod = std::chrono::milliseconds(50);
// Of the records, before jobs are taken: all of layer 0, on which a worker times the lane. A tenth of a second to half a second.
constexpr uint64_t kMappedBeforeServing = uint64_t{4} << 30;
constexpr auto kLongestMapping = std::chrono::seconds(1);

}  // namespace

JobServer::JobServer(const std::string& ctl_path, const std::string& arena_path, const ServerOptions& options)
    : JobServer(std::shared_ptr<Region>(Region::attach(ctl_path, 0)), nullptr, arena_path, options) {}

JobServer::JobServer(std::shared_ptr<Region> region, std::shared_ptr<Arena> arena, const ServerOptions& options)
    : JobServer(std::move(region), std::move(arena), "", options) {}

JobServer::JobServer(std::shared_ptr<Region> region, std::shared_ptr<Arena> arena, const std::string& arena_path,
                     const ServerOptions& options)
    : region_(std::move(region)),
      arena_(std::move(arena)),
      words_(region_->words()),
      options_(options),
      spin_ns_(options.spin_ns >= 0 ? options.spin_ns : moe_hot_ns(options.threads, static_cast<uint32_t>(options.cpus.size()))) {
  if (arena_ == nullptr) arena_ = Arena::attach(arena_path, words_.arena_generation);
  const std::string& ctl_path = region_->path();
  if (words_.hidden != arena_->shape(0).hidden) {
    throw Error(GLM53_MISMATCH, format("%s: hidden is %u, the arena's is %u", ctl_path.c_str(), words_.hidden, arena_->shape(0).hidden));
  }
  if (abi_load(&words_.quit) != 0) throw Error(GLM53_ABSENT, ctl_path + ": its worker has quit");
  if (!region_->try_lease()) throw Error(GLM53_IN_USE, ctl_path + " is already served by another cpu_expert");
  pool_ = moe_pool_create(options.variant, options.threads, options.cpus.empty() ? nullptr : options.cpus.data(),
                          static_cast<uint32_t>(options.cpus.size()));
  if (pool_ == nullptr) throw Error(GLM53_INVALID, moe_last_error());
  if (options.tune && moe_pool_tune(pool_, &arena_->shape(0)) != 0) throw Error(GLM53_INVALID, moe_last_error());
  if (options.huge_pages) ask_for_huge_pages();
  // The words of a dead predecessor are still there: position, acknowledgement and beat become ours before the id says so.
  const uint64_t now = abi_now_ns();
  abi_store(&words_.server_variant, moe_pool_variant(pool_));
  abi_store(&words_.server_threads, options.threads);
  abi_store(&words_.server_picks, 0);
  acknowledge(now);
  beat(now);
  abi_store(&words_.server_id, random_id());
  abi_store(&words_.server_state, ABI_SERVER_SERVING);
  ring(&words_.done_bell, words_.worker_asleep);
  state_ = ServerStep::kIdle;
  if (options_.beat_thread) beat_thread_ = std::thread(&JobServer::beat_loop, this);
}

JobServer::~JobServer() {
  stop_beat_.store(true);
  if (beat_thread_.joinable()) beat_thread_.join();
  if (!dead_) {
    abi_store(&words_.server_state, ABI_SERVER_DRAINED);
    ring(&words_.done_bell, words_.worker_asleep);
  }
  region_->end_lease();
  if (pool_ != nullptr) moe_pool_destroy(pool_);
}

void JobServer::ask_for_huge_pages() {
  uint8_t* records = arena_->record(0);
  const size_t bytes = arena_->header().total_bytes - arena_->header().records_offset;
  huge_note_ = moe_advise_huge(records, bytes) == 0 ? "" : moe_last_error();
  moe_meet_pages(records, bytes);
  huge_bytes_ = moe_huge_bytes(records, bytes);
  if (huge_bytes_ < 0) huge_note_ = moe_last_error();
  pages_ = std::make_unique<PageTableFill>(records, bytes, options_.threads);
  pages_->wait_for(kMappedBeforeServing, kLongestMapping);
}

void JobServer::beat_loop() {
  uint64_t shown = ~uint64_t{0};
  while (!stop_beat_.load()) {
    const uint64_t progress = progress_.load(std::memory_order_relaxed);
    const uint64_t now = abi_now_ns();
    const uint64_t since = computing_since_ns_.load(std::memory_order_relaxed);
    // A big job is progress too: whether it takes too long is for its deadline to say.
    const bool computing = since != 0 && now < since + kLongestComputeNs;
    if (progress != shown || computing) beat(now);
    shown = progress;
    std::this_thread::sleep_for(kBeatPeriod);
  }
}

bool JobServer::step(uint64_t now_ns) {
  progress_.fetch_add(1, std::memory_order_relaxed);
  const bool inside_job = state_ >= ServerStep::kClaimed && state_ <= ServerStep::kFilled;
  if (inside_job && ended()) {
    ++counters_.dropped;
    acknowledge(now_ns);
    return true;
  }
  switch (state_) {
    case ServerStep::kClaimed:
      status_ = !valid() ? ABI_STATUS_BAD_JOB : generations_hold() ? ABI_STATUS_OK : ABI_STATUS_STALE_RECORD;
      computed_ = 0;
      state_ = status_ == ABI_STATUS_OK ? ServerStep::kChecked : ServerStep::kComputed;
      return true;
    case ServerStep::kChecked:
    case ServerStep::kComputing:
      compute_some();
      return true;
    case ServerStep::kComputed:
      if (status_ == ABI_STATUS_OK && !generations_hold()) status_ = ABI_STATUS_STALE_RECORD;
      fill_done(now_ns);
      state_ = ServerStep::kFilled;
      return true;
    case ServerStep::kFilled:
      abi_store_seq(&region_->done(job_.seq)->seq, job_.seq);
      state_ = ServerStep::kPublished;
      return true;
    case ServerStep::kPublished:
      abi_store(&words_.job_tail, job_.seq);
      next_seq_ = job_.seq + 1;
      state_ = ServerStep::kPassed;
      return true;
    case ServerStep::kPassed:
      ring(&words_.done_bell, words_.worker_asleep);
      state_ = ServerStep::kIdle;
      return true;
    default:
      return step_idle(now_ns);
  }
}

bool JobServer::step_idle(uint64_t now_ns) {
  if (state_ == ServerStep::kQuit) return false;
  if (abi_load(&words_.epoch) != epoch_) {
    acknowledge(now_ns);
    return true;
  }
  if (abi_load(&words_.job_head) >= next_seq_) {
    claim(now_ns);
    return true;
  }
  if (abi_load(&words_.quit) != 0) {
    state_ = ServerStep::kQuit;
    return true;
  }
  if (draining_.load(std::memory_order_acquire)) {
    if (abi_load(&words_.server_state) != ABI_SERVER_DRAINED) {
      abi_store(&words_.server_state, ABI_SERVER_DRAINED);
      // A job published before the worker could see DRAINED is still served: look once more after the store.
      abi_full_fence();
      ring(&words_.done_bell, words_.worker_asleep);
      return true;
    }
    state_ = ServerStep::kDrained;
    return false;
  }
  state_ = ServerStep::kIdle;
  return false;
}

void JobServer::acknowledge(uint64_t now_ns) {
  epoch_ = abi_load(&words_.epoch);
  // Nothing is published between the change of epoch and its acknowledgement, so job_head is where the new epoch begins.
  next_seq_ = abi_load(&words_.job_head) + 1;
  abi_store(&words_.job_tail, next_seq_ - 1);
  abi_store(&words_.ack_epoch, epoch_);
  if (options_.beat_thread) beat(now_ns);
  ring(&words_.done_bell, words_.worker_asleep);
  ++counters_.acks;
  state_ = ServerStep::kAcknowledged;
}

void JobServer::claim(uint64_t now_ns) {
  AbiJob* shared = region_->job(next_seq_);
  std::memcpy(&job_, shared, sizeof job_);
  claimed_ns_ = now_ns;
  const uint32_t num_experts = std::min(job_.num_experts, words_.max_experts);
  const uint32_t num_picks = std::min(job_.num_picks, words_.max_picks);
  experts_.assign(region_->experts(shared), region_->experts(shared) + num_experts);
  rows_.assign(region_->pick_row(shared), region_->pick_row(shared) + num_picks);
  outs_.assign(region_->pick_out(shared), region_->pick_out(shared) + num_picks);
  state_ = ServerStep::kClaimed;
}

bool JobServer::valid() const {
  if (job_.seq != next_seq_ || job_.epoch != epoch_ || job_.flags != 0 || job_.x_dtype > MOE_DTYPE_F16) return false;
  if (job_.layer >= arena_->header().num_layers || job_.buffer >= words_.num_buffers) return false;
  if (job_.num_rows > words_.max_rows || job_.num_experts > words_.max_experts || job_.num_picks > words_.max_picks) return false;
  for (const AbiJobExpert& e : experts_) {
    if (e.arena_slot >= arena_->header().num_slots) return false;
    if (static_cast<uint64_t>(e.first_pick) + e.num_picks > job_.num_picks) return false;
  }
  for (uint32_t i = 0; i < job_.num_picks; ++i) {
    if (rows_[i] >= job_.num_rows || outs_[i] >= words_.max_picks) return false;
  }
  return true;
}

bool JobServer::generations_hold() const {
  // Orders the record bytes read so far before the second look; the first look's loads are acquire themselves.
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return std::all_of(experts_.begin(), experts_.end(), [this](const AbiJobExpert& e) {
    return e.generation % 2 == 0 && e.generation != 0 && arena_->generation_of(e.arena_slot) == e.generation;
  });
}

void JobServer::compute_some() {
  const uint32_t total = job_.num_experts;
  const uint32_t count = options_.experts_per_step == 0 ? total : std::min(total - computed_, options_.experts_per_step);
  tasks_.clear();
  for (uint32_t i = computed_; i < computed_ + count; ++i) {
    const AbiJobExpert& e = experts_[i];
    if (e.num_picks == 0) continue;
    tasks_.push_back({&arena_->shape(job_.layer), arena_->record(e.arena_slot), region_->x(job_.buffer), &rows_[e.first_pick],
                      region_->out(job_.buffer), &outs_[e.first_pick], e.num_picks, job_.x_dtype});
    counters_.picks += e.num_picks;
    counters_.bytes += arena_->shape(job_.layer).record_bytes;
  }
  counters_.experts += count;
  computing_since_ns_.store(abi_now_ns(), std::memory_order_relaxed);
  if (!tasks_.empty() && moe_pool_run(pool_, tasks_.data(), static_cast<uint32_t>(tasks_.size())) != 0) status_ = ABI_STATUS_BAD_JOB;
  computing_since_ns_.store(0, std::memory_order_relaxed);
  computed_ += count;
  state_ = computed_ < total && status_ == ABI_STATUS_OK ? ServerStep::kComputing : ServerStep::kComputed;
}

void JobServer::fill_done(uint64_t now_ns) {
  AbiDone* done = region_->done(job_.seq);
  done->epoch = job_.epoch;
  done->status = status_;
  done->num_picks = job_.num_picks;
  done->claimed_ns = claimed_ns_;
  done->done_ns = now_ns;
  ++counters_.jobs;
  counters_.stale += status_ == ABI_STATUS_STALE_RECORD;
  counters_.bad += status_ == ABI_STATUS_BAD_JOB;
  abi_store(&words_.server_picks, counters_.picks);
}

ServerStep JobServer::run(int64_t max_ns) {
  const uint64_t start = abi_now_ns();
  const uint64_t end = start + static_cast<uint64_t>(max_ns);
  while (state_ != ServerStep::kQuit && state_ != ServerStep::kDrained) {
    const uint32_t seen = abi_load_bell(&words_.doorbell);
    const uint64_t now = abi_now_ns();
    if (step(now)) {
      if (state_ == ServerStep::kIdle) awake_until_ns_ = abi_now_ns() + static_cast<uint64_t>(spin_ns_);
      continue;
    }
    if (state_ == ServerStep::kQuit || state_ == ServerStep::kDrained || now >= end) break;
    // Only after a job: an idle server that polled at every look around would take a share of a CPU for nothing.
    if (now < awake_until_ns_) {
      for (int i = 0; i < kPausesPerLook; ++i) cpu_relax();
      continue;
    }
    const int64_t left = static_cast<int64_t>(end - now);
    sleep_on(words_.doorbell, seen, &words_.server_asleep, std::min(left, kIdleSleepNs));
  }
  return state_;
}

}  // namespace glm53
