#include "tier/heat.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "tier/error.h"

namespace glm53 {
namespace {

constexpr uint64_t kHeatMagic = UINT64_C(0x3174616568333547);  // "G53heat1"
constexpr uint32_t kHeatVersion = 1;

struct HeatHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t num_layers;
  uint32_t experts_per_layer;
  uint32_t reserved;
  uint8_t checkpoint_hash[32];
  uint64_t checksum;  // of everything after the header, padded to 32 bytes
};

uint64_t body_checksum(const std::vector<uint8_t>& bytes) {
  std::vector<uint8_t> padded(bytes.begin() + sizeof(HeatHeader), bytes.end());
  padded.resize((padded.size() + 31) / 32 * 32);
  return abi_checksum(padded.data(), padded.size());
}

}  // namespace

HeatTable::HeatTable(uint32_t num_layers, uint32_t experts_per_layer, const HeatParams& params)
    : params_(params),
      experts_per_layer_(experts_per_layer),
      clock_(num_layers, 0),
      entries_(static_cast<size_t>(num_layers) * experts_per_layer),
      slow_table_(kTable),
      fast_table_(kTable),
      slow_gain_(1.0f - std::exp2(-1.0f / params.slow_half_life)),
      fast_gain_(1.0f - std::exp2(-1.0f / params.fast_half_life)) {
  for (uint32_t age = 0; age < kTable; ++age) {
    slow_table_[age] = std::exp2(-static_cast<float>(age) / params.slow_half_life);
    fast_table_[age] = std::exp2(-static_cast<float>(age) / params.fast_half_life);
  }
}

void HeatTable::read(uint32_t id, float* slow, float* fast) const {
  const Entry& e = entries_[id];
  const uint32_t age = std::min(clock_[id / experts_per_layer_] - e.last, kTable - 1);
  *slow = e.slow * slow_table_[age];
  *fast = e.fast * fast_table_[age];
}

void HeatTable::write(uint32_t id, float slow, float fast) {
  Entry& e = entries_[id];
  e.slow = slow;
  e.fast = fast;
  e.last = clock_[id / experts_per_layer_];
}

void HeatTable::touch(uint32_t id) {
  Entry& e = entries_[id];
  const uint32_t now = clock_[id / experts_per_layer_];
  const uint32_t age = std::min(now - e.last, kTable - 1);
  e.slow = e.slow * slow_table_[age] + slow_gain_;
  e.fast = e.fast * fast_table_[age] + fast_gain_;
  e.last = now;
  if (e.touches != UINT32_MAX) ++e.touches;
}

std::vector<uint8_t> HeatTable::save(const uint8_t* checkpoint_hash) const {
  HeatHeader h{};
  h.magic = kHeatMagic;
  h.version = kHeatVersion;
  h.num_layers = static_cast<uint32_t>(clock_.size());
  h.experts_per_layer = experts_per_layer_;
  std::memcpy(h.checkpoint_hash, checkpoint_hash, sizeof h.checkpoint_hash);
  const size_t clock_bytes = clock_.size() * sizeof(uint32_t);
  const size_t entry_bytes = entries_.size() * sizeof(Entry);
  std::vector<uint8_t> bytes(sizeof h + clock_bytes + entry_bytes);
  std::memcpy(bytes.data() + sizeof h, clock_.data(), clock_bytes);
  std::memcpy(bytes.data() + sizeof h + clock_bytes, entries_.data(), entry_bytes);
  h.checksum = body_checksum(bytes);
  std::memcpy(bytes.data(), &h, sizeof h);
  return bytes;
}

bool HeatTable::load(const std::vector<uint8_t>& bytes, const uint8_t* checkpoint_hash, std::string* why) {
  HeatHeader h{};
  const size_t clock_bytes = clock_.size() * sizeof(uint32_t);
  const size_t entry_bytes = entries_.size() * sizeof(Entry);
  const auto refuse = [why](const std::string& text) {
    *why = text;
    return false;
  };
  if (bytes.size() < sizeof h) return refuse("it is truncated");
  std::memcpy(&h, bytes.data(), sizeof h);
  if (h.magic != kHeatMagic || h.version != kHeatVersion) return refuse(format("its version is %u, expected %u", h.version, kHeatVersion));
  if (std::memcmp(h.checkpoint_hash, checkpoint_hash, sizeof h.checkpoint_hash) != 0) return refuse("it belongs to another checkpoint");
  if (h.num_layers != clock_.size() || h.experts_per_layer != experts_per_layer_ || bytes.size() != sizeof h + clock_bytes + entry_bytes) {
    return refuse("it is of another shape");
  }
  if (h.checksum != body_checksum(bytes)) return refuse("its checksum is wrong");
  std::memcpy(clock_.data(), bytes.data() + sizeof h, clock_bytes);
  std::memcpy(entries_.data(), bytes.data() + sizeof h + clock_bytes, entry_bytes);
  return true;
}

void write_file_atomically(const std::string& path, const std::vector<uint8_t>& bytes) {
  const std::string temporary = path + ".tmp";
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) throw_errno("cannot create " + temporary);
  size_t written = 0;
  while (written < bytes.size()) {
    const ssize_t n = ::write(fd, bytes.data() + written, bytes.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    written += static_cast<size_t>(n);
  }
  const bool whole = written == bytes.size() && fsync(fd) == 0;
  const int error = errno;
  ::close(fd);
  if (!whole || rename(temporary.c_str(), path.c_str()) != 0) {
    if (!whole) errno = error;
    const int reason = errno;
    ::unlink(temporary.c_str());
    errno = reason;
    throw_errno("cannot write " + path);
  }
}

bool read_file(const std::string& path, std::vector<uint8_t>* bytes) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    if (errno == ENOENT) return false;
    throw_errno("cannot open " + path);
  }
  bytes->clear();
  uint8_t chunk[65536];
  for (;;) {
    const ssize_t n = ::read(fd, chunk, sizeof chunk);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int error = errno;
      ::close(fd);
      errno = error;
      throw_errno("cannot read " + path);
    }
    if (n == 0) break;
    bytes->insert(bytes->end(), chunk, chunk + n);
  }
  ::close(fd);
  return true;
}

}  // namespace glm53
