#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tier/device.h"

namespace glm53 {
namespace {

constexpr uint64_t kHugePage = 2u << 20;

// Start-up measurements: the smallest of a few runs, because anything else on the machine only makes one longer.
template <typename Run>
double best_us(int repeats, const Run& run) {
  double best = 1e30;
  for (int i = 0; i < repeats; ++i) {
    const uint64_t start = abi_now_ns();
    run();
    best = std::min(best, static_cast<double>(abi_now_ns() - start) * 1e-3);
    if (best > 20'000) break;  // a big expert on a slow kernel: once is enough
  }
  return best;
}

}  // namespace

CpuDevice::CpuDevice(const Arena& arena, const CpuDeviceOptions& options) : arena_(arena), options_(options) {
  pool_ = moe_pool_create(options.variant, options.threads, options.cpus.empty() ? nullptr : options.cpus.data(),
                          static_cast<uint32_t>(options.cpus.size()));
  if (pool_ == nullptr) throw Error(GLM53_INVALID, moe_last_error());
  if (options.num_slots > 0) {
    slots_bytes_ = (static_cast<uint64_t>(options.num_slots) * arena.header().record_stride + kHugePage - 1) / kHugePage * kHugePage;
    void* p = mmap(nullptr, slots_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      moe_pool_destroy(pool_);
      throw_errno(format("cannot map %llu bytes for %u slots", static_cast<unsigned long long>(slots_bytes_), options.num_slots));
    }
    slots_ = static_cast<uint8_t*>(p);
    madvise(slots_, slots_bytes_, MADV_HUGEPAGE);  // a wish: 4 KiB pages work too
  }
}

CpuDevice::~CpuDevice() {
  if (slots_ != nullptr) munmap(slots_, slots_bytes_);
  if (pool_ != nullptr) moe_pool_destroy(pool_);
}

void CpuDevice::stage(StepRequest* request) {
  // Picks and activations are host memory already; only the result rows are the device's.
  const size_t num_picks = static_cast<size_t>(request->rows) * request->top_k;
  const size_t needed = num_picks * arena_.shape(request->layer).hidden;
  if (pick_rows_.size() < needed) pick_rows_.resize(needed);
  if (row_of_.size() < num_picks) row_of_.resize(num_picks);
}

void CpuDevice::wait(SeqWord* word, uint64_t pass, const char* what) {
  if (word->wait(pass, abi_now_ns() + options_.wait_timeout_ns, options_.spin_ns)) return;
  throw Error(GLM53_TIMEOUT, format("the controller did not answer pass %llu (%s) within %llu ms", static_cast<unsigned long long>(pass),
                                    what, static_cast<unsigned long long>(options_.wait_timeout_ns / 1000000)));
}

const uint8_t* CpuDevice::slot_bytes(int32_t slot) { return slots_ + static_cast<uint64_t>(slot) * arena_.header().record_stride; }

void CpuDevice::copy_record(int32_t slot, const uint8_t* record, uint32_t bytes) {
  std::memcpy(slots_ + static_cast<uint64_t>(slot) * arena_.header().record_stride, record, bytes);
}

void CpuDevice::compute(const StepRequest& request, const StepPlan& plan) {
  tasks_.clear();
  for (const PlanEntry& entry : plan.entries) {
    if (entry.lane == Lane::kCpu) continue;
    const bool in_slot = entry.lane == Lane::kHit || entry.lane == Lane::kAdmit;
    const uint64_t id = static_cast<uint64_t>(request.layer) * arena_.header().experts_per_layer + entry.expert;
    const uint8_t* record = in_slot ? slot_bytes(entry.slot) : arena_.record(id);
    tasks_.push_back({&arena_.shape(request.layer), record, request.x, &plan.pick_row[entry.first], pick_rows_.data(),
                      &plan.pick_out[entry.first], entry.count, MOE_DTYPE_F32});
  }
  if (tasks_.empty()) return;
  if (moe_pool_run(pool_, tasks_.data(), static_cast<uint32_t>(tasks_.size())) != 0) {
    throw Error(GLM53_INTERNAL, format("the kernel refused the tasks of layer %u", request.layer));
  }
}

void CpuDevice::combine(const StepRequest& request, const StepPlan& plan, const ColdReply& cold, const float* weights, float* out) {
  const uint32_t hidden = arena_.shape(request.layer).hidden;
  std::fill_n(row_of_.begin(), static_cast<size_t>(request.rows) * request.top_k, nullptr);
  const float* cold_row = cold.rows;
  for (const PlanEntry& entry : plan.entries) {
    for (uint32_t i = entry.first; i < entry.first + entry.count; ++i) {
      const uint32_t pick = plan.pick_out[i];
      if (entry.lane == Lane::kCpu) {
        row_of_[pick] = cold_row;
        cold_row += hidden;
      } else {
        row_of_[pick] = pick_rows_.data() + static_cast<size_t>(pick) * hidden;
      }
    }
  }
  for (uint32_t row = 0; row < request.rows; ++row) {
    const size_t first = static_cast<size_t>(row) * request.top_k;
    combine_rows(out + static_cast<size_t>(row) * hidden, &row_of_[first], weights + first, request.top_k, hidden);
  }
}

double CpuDevice::measure_kernel_us(uint32_t layer, uint32_t rows) {
  const MoeExpertShape& shape = arena_.shape(layer);
  std::vector<float> x(static_cast<size_t>(rows) * shape.hidden, 1.0f);
  std::vector<float> y(x.size());
  std::vector<uint32_t> numbers(rows);
  for (uint32_t i = 0; i < rows; ++i) numbers[i] = i;
  const MoeTask task{&shape,   arena_.record(static_cast<uint64_t>(layer) * arena_.header().experts_per_layer),
                     x.data(), numbers.data(),
                     y.data(), numbers.data(),
                     rows,     MOE_DTYPE_F32};
  return best_us(5, [&] { moe_pool_run(pool_, &task, 1); });
}

double CpuDevice::measure_copy_us() {
  if (slots_ == nullptr) return 0;
  return best_us(5, [&] { copy_record(0, arena_.record(0), arena_.shape(0).record_bytes); });
}

}  // namespace glm53
