#include "tier/mapping.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "tier/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; C libraries know it later
#endif

extern "C" {

void abi_futex_wait(const uint32_t* word, uint32_t seen, int64_t timeout_ns) {
  if (timeout_ns <= 0) return;
  timespec timeout{static_cast<time_t>(timeout_ns / 1000000000), static_cast<long>(timeout_ns % 1000000000)};
  // Any outcome (woken, changed, timed out, interrupted) sends the caller back to look at the word.
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void abi_futex_wake(uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0); }

uint64_t abi_now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // extern "C"

namespace glm53 {

std::string format(const char* pattern, ...) {
  char text[768];
  va_list args;
  va_start(args, pattern);
  vsnprintf(text, sizeof text, pattern, args);
  va_end(args);
  return text;
}

void throw_errno(const std::string& what) { throw Error(GLM53_SYSTEM, what + ": " + std::strerror(errno)); }

uint64_t random_id() {
  uint64_t id = 0;
  while (id == 0) {
    if (getrandom(&id, sizeof id, 0) != static_cast<ssize_t>(sizeof id)) throw_errno("getrandom");
  }
  return id;
}

namespace {

// Bytes to pass as --shm-size: what is needed plus a little for the control region and page tables, in whole MiB.
uint64_t shm_size_mib(uint64_t bytes) { return (bytes + (64u << 20)) >> 20; }

// From here on pages are taken by several threads: one takes about a second for a GiB, which is minutes for the real model.
constexpr uint64_t kParallelBytes = 64u << 20;
constexpr uint64_t kPieceBytes = 32u << 20;
constexpr unsigned kMaxThreads = 16;

[[noreturn]] void throw_no_space(const std::string& path, uint64_t bytes) {
  struct statvfs fs{};
  const std::string dir = path.substr(0, path.find_last_of('/') + 1);
  const uint64_t available = statvfs(dir.c_str(), &fs) == 0 ? static_cast<uint64_t>(fs.f_bavail) * fs.f_frsize : 0;
  throw Error(
      GLM53_NO_SPACE,
      format("%s needs %llu bytes and %s has %llu free: make it at least %llu MiB (--shm-size=%llum, or sizeLimit of the memory volume)",
             path.c_str(), static_cast<unsigned long long>(bytes), dir.c_str(), static_cast<unsigned long long>(available),
             static_cast<unsigned long long>(shm_size_mib(bytes)), static_cast<unsigned long long>(shm_size_mib(bytes))));
}

// True when the file system says that it has less; one without a size says nothing.
bool too_small(const std::string& path, uint64_t bytes) {
  struct statvfs fs{};
  const std::string dir = path.substr(0, path.find_last_of('/') + 1);
  return statvfs(dir.c_str(), &fs) == 0 && fs.f_blocks > 0 && static_cast<uint64_t>(fs.f_bavail) * fs.f_frsize < bytes;
}

}  // namespace

Mapping Mapping::create(const std::string& path, uint64_t bytes) {
  Mapping m;
  m.path_ = path;
  m.temporary_ = format("%s.%016llx.tmp", path.c_str(), static_cast<unsigned long long>(random_id()));
  m.bytes_ = bytes;
  m.fd_ = ::open(m.temporary_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0660);
  if (m.fd_ < 0) {
    const std::string name = std::exchange(m.temporary_, "");
    throw_errno("cannot create " + name);
  }
  // Before memory is taken that would have to be given back.
  if (too_small(path, bytes)) throw_no_space(path, bytes);
  if (bytes >= kParallelBytes && m.populate()) return m;
  int rc;
  do {
    rc = posix_fallocate(m.fd_, 0, static_cast<off_t>(bytes));
  } while (rc == EINTR);
  if (rc == ENOSPC || rc == EFBIG) throw_no_space(path, bytes);
  if (rc != 0) {
    errno = rc;
    throw_errno(format("cannot reserve %llu bytes for %s", static_cast<unsigned long long>(bytes), path.c_str()));
  }
  if (m.data_ == nullptr) m.map();
  return m;
}

bool Mapping::populate() {
  if (ftruncate(fd_, static_cast<off_t>(bytes_)) != 0) throw_errno(format("cannot make %s as large as it must be", path_.c_str()));
  map();
  const uint64_t pieces = (bytes_ + kPieceBytes - 1) / kPieceBytes;
  std::atomic<uint64_t> next{0};
  std::atomic<int> failed{0};
  const auto take = [&] {
    for (uint64_t piece = next.fetch_add(1); piece < pieces && failed.load() == 0; piece = next.fetch_add(1)) {
      const uint64_t start = piece * kPieceBytes;
      int rc;
      do {
        rc = madvise(data_ + start, std::min(kPieceBytes, bytes_ - start), MADV_POPULATE_WRITE);
      } while (rc != 0 && (errno == EINTR || errno == EAGAIN));
      if (rc != 0) failed.store(errno);
    }
  };
  std::vector<std::thread> threads;
  const unsigned count = std::clamp(std::thread::hardware_concurrency(), 1u, kMaxThreads);
  // Each one has the memory policy of this thread, so that the pages come from where it was told.
  try {
    for (unsigned i = 1; i < count; ++i) threads.emplace_back(take);
  } catch (const std::system_error&) {
    // Fewer threads than wanted: those that there are do it.
  }
  take();
  for (std::thread& thread : threads) thread.join();
  switch (failed.load()) {
    case 0:
      return true;
    case EINVAL:
      return false;  // a kernel before 5.14: reserved by one thread
    case EFAULT:
    case ENOMEM:
    case ENOSPC:
      throw_no_space(path_, bytes_);
    default:
      errno = failed.load();
      throw_errno(format("cannot take %llu bytes for %s", static_cast<unsigned long long>(bytes_), path_.c_str()));
  }
}

Mapping Mapping::open(const std::string& path, uint64_t min_bytes) {
  Mapping m;
  m.path_ = path;
  m.fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (m.fd_ < 0) {
    if (errno == ENOENT) throw Error(GLM53_ABSENT, path + " does not exist");
    throw_errno("cannot open " + path);
  }
  struct stat st{};
  if (fstat(m.fd_, &st) != 0) throw_errno("cannot stat " + path);
  m.bytes_ = static_cast<uint64_t>(st.st_size);
  if (m.bytes_ < min_bytes) {
    throw Error(GLM53_MISMATCH, format("%s is truncated: it has %llu bytes and its header alone needs %llu", path.c_str(),
                                       static_cast<unsigned long long>(m.bytes_), static_cast<unsigned long long>(min_bytes)));
  }
  m.map();
  return m;
}

Mapping::Mapping(Mapping&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, "")),
      fd_(std::exchange(other.fd_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      inode_(other.inode_),
      device_(other.device_) {}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void Mapping::map() {
  struct stat st{};
  if (fstat(fd_, &st) != 0) throw_errno("cannot stat " + path_);
  inode_ = st.st_ino;
  device_ = st.st_dev;
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (p == MAP_FAILED) throw_errno(format("cannot map %llu bytes of %s", static_cast<unsigned long long>(bytes_), path_.c_str()));
  data_ = static_cast<uint8_t*>(p);
}

bool Mapping::try_lock() {
  if (flock(fd_, LOCK_EX | LOCK_NB) == 0) return true;
  if (errno == EWOULDBLOCK) return false;
  throw_errno("cannot lock " + path_);
}

void Mapping::unlock() { flock(fd_, LOCK_UN); }

void Mapping::publish() {
  if (temporary_.empty()) return;
  if (rename(temporary_.c_str(), path_.c_str()) != 0) throw_errno("cannot rename " + temporary_);
  temporary_.clear();
}

bool Mapping::current() const {
  struct stat st{};
  return stat(path_.c_str(), &st) == 0 && st.st_ino == inode_ && st.st_dev == device_;
}

void Mapping::unlink_if_current() {
  if (current()) ::unlink(path_.c_str());
}

}  // namespace glm53
