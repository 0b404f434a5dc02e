#include "tier/heat.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tier/error.h"

namespace glm53 {
namespace {

constexpr uint64_t kHeatMagic = UINT64_C(0x3174616568333547);  // "G53heat1"
constexpr uint32_t kHeatVersion = 2;
// What a worker that computes on a GPU writes (services/gpu_worker/backends/exl3/heat_file.py): of no use here, and ours.
constexpr char kGpuHeat[] = "glm53 gpu heat ";
constexpr int kMaxLeftovers = 1000;  // of processes that had our number and were killed while they wrote

struct HeatHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t num_layers;
  uint32_t experts_per_layer;
  uint32_t reserved;
  uint8_t checkpoint_hash[32];
  uint64_t checksum;  // of everything after the header, padded to 32 bytes
};

struct FileCloser {
  int fd;
  ~FileCloser() { ::close(fd); }
};

bool is_heat(const uint8_t* bytes, size_t size) {
  const auto begins = [bytes, size](const void* with, size_t length) { return size >= length && std::memcmp(bytes, with, length) == 0; };
  return begins(&kHeatMagic, sizeof kHeatMagic) || begins(kGpuHeat, sizeof kGpuHeat - 1);
}

bool is_blank(const uint8_t* bytes, size_t size) {
  return std::all_of(bytes, bytes + size, [](uint8_t byte) { return byte == 0; });
}

// True when an open file has what heat begins with, or NULs alone, as a loss of power may leave one that was just written.
// Throws kSystem when it cannot be read.
bool holds_heat(int fd, const std::string& path) {
  std::vector<uint8_t> piece(1 << 16);
  off_t at = 0;
  for (;;) {
    const ssize_t n = ::pread(fd, piece.data(), piece.size(), at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno("cannot read " + path);
    if (n == 0) return true;
    if (at == 0 && is_heat(piece.data(), static_cast<size_t>(n))) return true;
    if (!is_blank(piece.data(), static_cast<size_t>(n))) return false;
    at += n;
  }
}

// The mode of what lies at the path, for what will replace it; without anything there, what the process gives new files.
// Throws kSystem when it is neither empty nor heat.
mode_t mode_of_replaceable(const std::string& path, bool* exists) {
  struct stat found{};
  *exists = ::lstat(path.c_str(), &found) == 0;
  if (!*exists) {
    if (errno != ENOENT) throw_errno("cannot look at " + path);
    return 0644;
  }
  if (!S_ISREG(found.st_mode)) throw Error(GLM53_SYSTEM, path + " is not written over: it is no regular file");
  if (found.st_size != 0) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) throw_errno("cannot open " + path);
    const FileCloser closer{fd};
    if (!holds_heat(fd, path)) throw Error(GLM53_SYSTEM, path + " is not written over: it is no heat file");
  }
  return found.st_mode & 07777;
}

// Where a link leads to, so that it stays one; a path that leads nowhere yet as it is.
std::string resolved(const std::string& path) {
  char whole[PATH_MAX];
  return ::realpath(path.c_str(), whole) != nullptr ? std::string(whole) : path;
}

// A new file beside the path, under a name that nothing has: what lies there already is not ours to empty.
int open_new_beside(const std::string& path, std::string* name) {
  for (int leftover = 0; leftover < kMaxLeftovers; ++leftover) {
    *name = path + format(".tmp.%d.%d", static_cast<int>(getpid()), leftover);
    const int fd = ::open(name->c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd >= 0) return fd;
    if (errno != EEXIST) break;
  }
  throw_errno("cannot create " + *name);
}

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
      fast_gain_(1.0f - std::exp2(-1.0f / params.fast_half_life)),
      history_(num_layers),
      per_history_(num_layers),
      change_(params.forget_below) {
  for (uint32_t age = 0; age < kTable; ++age) {
    slow_table_[age] = std::exp2(-static_cast<float>(age) / params.slow_half_life);
    fast_table_[age] = std::exp2(-static_cast<float>(age) / params.fast_half_life);
  }
  for (uint32_t layer = 0; layer < num_layers; ++layer) set_history(layer, 0);
}

void HeatTable::set_history(uint32_t layer, float history) {
  history_[layer] = history;
  per_history_[layer] = 1.0f / (history + slow_gain_);
}

void HeatTable::advance(uint32_t layer) {
  if (layer <= last_layer_) end_round();
  last_layer_ = layer;
  ++clock_[layer];
  set_history(layer, history_[layer] * slow_table_[1] + slow_gain_);
}

void HeatTable::end_round() {
  if (round_touches_ == 0) return;
  const float chance = round_chance_ / static_cast<float>(round_touches_);
  round_chance_ = 0;
  round_touches_ = 0;
  if (change_.round(chance)) forget();
}

void HeatTable::forget() {
  for (Entry& e : entries_) e.slow = 0;
  for (uint32_t layer = 0; layer < history_.size(); ++layer) set_history(layer, 0);
}

bool SubjectChange::round(float chance) {
  if (below_ <= 0) return false;
  recent_.add(chance, kRecent);
  usual_.add(chance, kUsual);
  const float usual = usual_.get(), drop = usual - recent_.get(), noise = kRecentNoise * (rounds_ > 0 ? variance_.get() : 0);
  variance_.add((chance - usual) * (chance - usual), kUsual);
  if (++rounds_ < kLeast || recent_.get() >= below_ * usual || drop * drop <= kSigmas * kSigmas * noise) return false;
  *this = SubjectChange(below_);
  return true;
}

void SubjectChange::Mean::add(float value, float half_life) {
  const float kept = std::exp2(-1.0f / half_life);
  sum = sum * kept + value * (1.0f - kept);
  weight = weight * kept + 1.0f - kept;
}

void HeatTable::read(float* popularity, float* fast) const {
  for (size_t id = 0; id < entries_.size(); ++id) {
    const Entry& e = entries_[id];
    const size_t layer = id / experts_per_layer_;
    const uint32_t age = std::min(clock_[layer] - e.last, kTable - 1);
    popularity[id] = e.slow * slow_table_[age] * per_history_[layer];
    fast[id] = e.fast * fast_table_[age];
  }
}

void HeatTable::write(const float* popularity, const float* fast) {
  for (uint32_t layer = 0; layer < history_.size(); ++layer) {
    const size_t first = static_cast<size_t>(layer) * experts_per_layer_;
    bool known = false;
    for (size_t id = first; id < first + experts_per_layer_; ++id) {
      Entry& e = entries_[id];
      e.slow = popularity[id] * kEarlier;
      e.fast = fast[id];
      e.last = clock_[layer];
      known |= e.slow > 0;
    }
    set_history(layer, known ? std::max(0.0f, kEarlier - slow_gain_) : 0);
    if (known) per_history_[layer] = 1.0f / kEarlier;  // to the bit
  }
  round_chance_ = 0;
  round_touches_ = 0;
  change_ = SubjectChange(params_.forget_below);
}

void HeatTable::touch(uint32_t id) {
  Entry& e = entries_[id];
  const uint32_t layer = id / experts_per_layer_, now = clock_[layer];
  const uint32_t age = std::min(now - e.last, kTable - 1);
  const float slow = e.slow * slow_table_[age];
  round_chance_ += slow * per_history_[layer];
  ++round_touches_;
  e.slow = slow + slow_gain_;
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
  const size_t history_bytes = history_.size() * sizeof(float);
  std::vector<uint8_t> bytes(sizeof h + clock_bytes + entry_bytes + history_bytes);
  std::memcpy(bytes.data() + sizeof h, clock_.data(), clock_bytes);
  std::memcpy(bytes.data() + sizeof h + clock_bytes, entries_.data(), entry_bytes);
  std::memcpy(bytes.data() + sizeof h + clock_bytes + entry_bytes, history_.data(), history_bytes);
  h.checksum = body_checksum(bytes);
  std::memcpy(bytes.data(), &h, sizeof h);
  return bytes;
}

bool HeatTable::load(const std::vector<uint8_t>& bytes, const uint8_t* checkpoint_hash, std::string* why) {
  HeatHeader h{};
  const size_t clock_bytes = clock_.size() * sizeof(uint32_t);
  const size_t entry_bytes = entries_.size() * sizeof(Entry);
  const size_t history_bytes = history_.size() * sizeof(float);
  const auto refuse = [why](const std::string& text) {
    *why = text;
    return false;
  };
  if (is_blank(bytes.data(), bytes.size())) return refuse("it is empty");
  if (!is_heat(bytes.data(), bytes.size())) return refuse("it is no heat file, and will not be written over");
  if (bytes.size() < sizeof h) return refuse("it is truncated");
  std::memcpy(&h, bytes.data(), sizeof h);
  if (h.magic != kHeatMagic || h.version != kHeatVersion) return refuse(format("its version is %u, expected %u", h.version, kHeatVersion));
  if (std::memcmp(h.checkpoint_hash, checkpoint_hash, sizeof h.checkpoint_hash) != 0) return refuse("it belongs to another checkpoint");
  if (h.num_layers != clock_.size() || h.experts_per_layer != experts_per_layer_ ||
      bytes.size() != sizeof h + clock_bytes + entry_bytes + history_bytes) {
    return refuse("it is of another shape");
  }
  if (h.checksum != body_checksum(bytes)) return refuse("its checksum is wrong");
  std::memcpy(clock_.data(), bytes.data() + sizeof h, clock_bytes);
  std::memcpy(entries_.data(), bytes.data() + sizeof h + clock_bytes, entry_bytes);
  std::memcpy(history_.data(), bytes.data() + sizeof h + clock_bytes + entry_bytes, history_bytes);
  for (uint32_t layer = 0; layer < history_.size(); ++layer) set_history(layer, history_[layer]);
  change_ = SubjectChange(params_.forget_below);
  return true;
}

void write_heat_file(const std::string& path, const std::vector<uint8_t>& bytes) {
  const std::string target = resolved(path);
  bool exists = false;
  const mode_t mode = mode_of_replaceable(target, &exists);
  std::string temporary;
  const int fd = open_new_beside(target, &temporary);
  size_t written = 0;
  while (written < bytes.size()) {
    const ssize_t n = ::write(fd, bytes.data() + written, bytes.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    written += static_cast<size_t>(n);
  }
  const bool whole = written == bytes.size() && (!exists || fchmod(fd, mode) == 0) && fsync(fd) == 0;
  const int error = errno;
  ::close(fd);
  if (!whole || rename(temporary.c_str(), target.c_str()) != 0) {
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
