// The control region: its segment, and pointers to its parts.
#pragma once

#include <memory>
#include <string>

#include "tier/arena.h"

namespace glm53 {

class Region {
 public:
  static std::unique_ptr<Region> create(const std::string& path, const Arena& arena, uint32_t ring_len, uint32_t num_buffers,
                                        uint32_t max_rows, uint32_t max_picks);
  static std::unique_ptr<Region> attach(const std::string& path, uint64_t generation);

  AbiCtlHeader& words() const { return *header_; }
  bool owner() const { return owner_; }
  const std::string& path() const { return mapping_.path(); }
  bool current() const { return mapping_.current(); }
  // The server's lease: at most one live cpu_expert serves a region.
  bool try_lease() { return leased_ = mapping_.try_lock(); }
  void end_lease();
  // True when no live process has the lease: the kernel takes it from a process that dies, however it dies.
  bool lease_is_free();
  void unlink();

  AbiJob* job(uint64_t seq) const { return reinterpret_cast<AbiJob*>(base() + header_->jobs_offset + entry(seq) * header_->job_stride); }
  AbiJobExpert* experts(AbiJob* job) const { return reinterpret_cast<AbiJobExpert*>(at(job, header_->experts_offset)); }
  uint32_t* pick_row(AbiJob* job) const { return reinterpret_cast<uint32_t*>(at(job, header_->pick_row_offset)); }
  uint32_t* pick_out(AbiJob* job) const { return reinterpret_cast<uint32_t*>(at(job, header_->pick_out_offset)); }
  AbiDone* done(uint64_t seq) const { return reinterpret_cast<AbiDone*>(base() + header_->dones_offset) + entry(seq); }
  float* x(uint32_t buffer) const { return reinterpret_cast<float*>(base() + header_->buffers_offset + buffer * header_->buffer_stride); }
  float* out(uint32_t buffer) const {
    return reinterpret_cast<float*>(base() + header_->buffers_offset + buffer * header_->buffer_stride + header_->out_offset);
  }

 private:
  Region(Mapping mapping, bool owner);
  uint8_t* base() const { return mapping_.data(); }
  uint64_t entry(uint64_t seq) const { return seq % header_->ring_len; }
  static uint8_t* at(AbiJob* job, uint64_t offset) { return reinterpret_cast<uint8_t*>(job) + offset; }

  Mapping mapping_;
  bool owner_;
  bool leased_ = false;  // by this very object
  AbiCtlHeader* header_;
};

// "Sleeping" of expert_abi.h. ring: the writer of `bell` tells the peer to look.
void ring(AbiBell* bell, const AbiBell& peer_asleep);
// Sleeps on the peer's `bell` until it moves from `seen` or timeout_ns passed; `asleep` is the caller's own flag.
void sleep_on(const AbiBell& bell, uint32_t seen, AbiBell* asleep, int64_t timeout_ns);

}  // namespace glm53
