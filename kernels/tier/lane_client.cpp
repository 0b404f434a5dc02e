#include "tier/lane_client.h"

#include <algorithm>
#include <cstring>

namespace glm53 {

const char* down_reason_name(DownReason reason) {
  switch (reason) {
    case DownReason::kNone:
      return "";
    case DownReason::kNeverAttached:
      return "no cpu_expert has attached";
    case DownReason::kHeartbeatLost:
      return "heartbeat lost";
    case DownReason::kJobTimeout:
      return "job deadline passed";
    case DownReason::kServerRestarted:
      return "cpu_expert restarted";
    case DownReason::kDrained:
      return "cpu_expert drained";
    case DownReason::kAborted:
      return "aborted";
    case DownReason::kServerDied:
      return "cpu_expert died";
  }
  return "unknown";
}

LaneClient::LaneClient(Region& region, uint64_t heartbeat_timeout_ns, uint64_t job_timeout_ns)
    : region_(region),
      words_(region.words()),
      heartbeat_timeout_ns_(heartbeat_timeout_ns),
      job_timeout_ns_(job_timeout_ns),
      epoch_(abi_load(&words_.epoch)),
      buffers_(words_.num_buffers, Buffer::kFree) {}

DownReason LaneClient::judge(uint64_t now_ns) const {
  const uint64_t id = abi_load(&words_.server_id);
  if (id == 0) return DownReason::kNeverAttached;
  if (up_ && id != server_id_) return DownReason::kServerRestarted;
  if (abi_load(&words_.server_state) != ABI_SERVER_SERVING) return DownReason::kDrained;
  const uint64_t beat = abi_load(&words_.server_beat);
  // A beat can be newer than a `now` that was read before it.
  if (now_ns > beat && now_ns - beat > heartbeat_timeout_ns_) return DownReason::kHeartbeatLost;
  return DownReason::kNone;
}

bool LaneClient::tick(uint64_t now_ns) {
  const DownReason reason = judge(now_ns);
  if (up_) {
    if (reason != DownReason::kNone) abort(reason, now_ns);
    return up_;
  }
  if (reason != DownReason::kNone || abi_load(&words_.ack_epoch) != epoch_) return false;
  // Acknowledged: the server will not touch anything of an earlier epoch, so the quarantine ends.
  for (Buffer& buffer : buffers_) {
    if (buffer == Buffer::kQuarantined) buffer = Buffer::kFree;
  }
  server_id_ = abi_load(&words_.server_id);
  up_ = true;
  reason_ = DownReason::kNone;
  since_ns_ = now_ns;
  ++counters_.ups;
  return true;
}

void LaneClient::check_lease(uint64_t now_ns) {
  if (up_ && region_.lease_is_free()) abort(DownReason::kServerDied, now_ns);
}

void LaneClient::abort(DownReason reason, uint64_t now_ns) {
  // The order is the rule: abort first, so that a server that looks now drops the job; then the new epoch, so that it acknowledges.
  abi_store(&words_.abort_epoch, epoch_);
  for (const Open& job : open_) buffers_[job.buffer] = Buffer::kQuarantined;
  open_.clear();
  ++epoch_;
  abi_store(&words_.epoch, epoch_);
  ring(&words_.doorbell, words_.server_asleep);
  up_ = false;
  reason_ = reason;
  since_ns_ = now_ns;
  ++counters_.aborts;
}

uint64_t LaneClient::next_seq() {
  if (!up_) return 0;
  const uint64_t seq = abi_load(&words_.job_head) + 1;
  if (seq - abi_load(&words_.job_tail) <= words_.ring_len) return seq;
  ++counters_.full;
  return 0;
}

void LaneClient::publish(const LaneJob& job, uint64_t seq, uint32_t buffer, uint32_t x_dtype, uint64_t now_ns) {
  AbiJob* slot = region_.job(seq);
  AbiJob header{};
  header.seq = seq;
  header.epoch = epoch_;
  header.layer = job.layer;
  header.num_rows = job.num_rows;
  header.num_experts = static_cast<uint32_t>(job.experts.size());
  header.num_picks = static_cast<uint32_t>(job.rows.size());
  header.x_dtype = x_dtype;
  header.buffer = buffer;
  *slot = header;
  std::memcpy(region_.experts(slot), job.experts.data(), job.experts.size() * sizeof(AbiJobExpert));
  std::memcpy(region_.pick_row(slot), job.rows.data(), job.rows.size() * sizeof(uint32_t));
  std::memcpy(region_.pick_out(slot), job.outs.data(), job.outs.size() * sizeof(uint32_t));
  abi_store(&words_.job_head, seq);
  ring(&words_.doorbell, words_.server_asleep);
  buffers_[buffer] = Buffer::kBusy;
  open_.push_back({seq, buffer, now_ns});
  ++counters_.submitted;
}

uint64_t LaneClient::submit(const LaneJob& job, const float* x, uint64_t now_ns) {
  const uint64_t seq = next_seq();
  if (seq == 0) return 0;
  const auto free = std::find(buffers_.begin(), buffers_.end(), Buffer::kFree);
  if (free == buffers_.end()) {
    ++counters_.full;
    return 0;
  }
  const uint32_t buffer = static_cast<uint32_t>(free - buffers_.begin());
  std::memcpy(region_.x(buffer), x, static_cast<size_t>(job.num_rows) * words_.hidden * sizeof(float));
  publish(job, seq, buffer, MOE_DTYPE_F32, now_ns);
  return seq;
}

uint64_t LaneClient::submit_in_place(const LaneJob& job, uint32_t buffer, uint64_t now_ns) {
  const uint64_t seq = next_seq();
  if (seq == 0) return 0;
  if (buffers_[buffer] != Buffer::kFree) {
    ++counters_.full;
    return 0;
  }
  publish(job, seq, buffer, MOE_DTYPE_F16, now_ns);
  return seq;
}

void LaneClient::close_job(uint64_t seq) {
  open_.erase(std::remove_if(open_.begin(), open_.end(), [seq](const Open& job) { return job.seq == seq; }), open_.end());
}

LaneClient::Poll LaneClient::poll(uint64_t seq, uint64_t now_ns, LaneResult* result) {
  const auto found = std::find_if(open_.begin(), open_.end(), [seq](const Open& job) { return job.seq == seq; });
  if (found == open_.end()) return Poll::kFailed;  // abandoned with its epoch
  const Open job = *found;
  const AbiDone* done = region_.done(seq);
  // Done entries before life: a server that drained or died after it finished the job has still finished it.
  if (abi_load_seq(&done->seq) == seq && done->epoch == epoch_) {
    result->rows = region_.out(job.buffer);
    result->buffer = job.buffer;
    result->status = done->status;
    result->claimed_ns = done->claimed_ns;
    result->done_ns = done->done_ns;
    close_job(seq);
    if (done->status == ABI_STATUS_OK) {
      buffers_[job.buffer] = Buffer::kHeld;
      ++counters_.done;
      return Poll::kDone;
    }
    buffers_[job.buffer] = Buffer::kFree;  // the server is through with it and nobody will read it
    ++counters_.refused;
    return Poll::kFailed;
  }
  if (!tick(now_ns)) return Poll::kFailed;
  if (now_ns > job.submitted_ns && now_ns - job.submitted_ns > job_timeout_ns_) {
    abort(DownReason::kJobTimeout, now_ns);
    return Poll::kFailed;
  }
  return Poll::kPending;
}

void LaneClient::release(uint32_t buffer) {
  if (buffer < buffers_.size() && buffers_[buffer] == Buffer::kHeld) buffers_[buffer] = Buffer::kFree;
}

uint32_t LaneClient::free_buffers() const { return static_cast<uint32_t>(std::count(buffers_.begin(), buffers_.end(), Buffer::kFree)); }

}  // namespace glm53
