// A file of a tmpfs mapped into memory, and the rules of its life: temporary name, lock, rename, unlink by the creator alone.
#pragma once

#include <cstdint>
#include <string>

namespace glm53 {

class Mapping {
 public:
  // Makes the file under a temporary name next to `path` and reserves every byte of it, so that no later access can raise SIGBUS.
  // Throws kNoSpace with the size to pass when the tmpfs is too small.
  static Mapping create(const std::string& path, uint64_t bytes);
  // Maps an existing file whole. Throws kAbsent when there is none, kMismatch when it is shorter than min_bytes.
  static Mapping open(const std::string& path, uint64_t min_bytes);

  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&&) = delete;
  Mapping(const Mapping&) = delete;
  ~Mapping();  // unmaps, closes, and removes the temporary name if it was never published

  uint8_t* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }

  // Takes the file's exclusive lock, which the kernel gives back when this process dies. False: another process holds it.
  bool try_lock();
  void unlock();
  // Renames the temporary name to `path`, over whatever is there.
  void publish();
  // True while `path` names this very file.
  bool current() const;
  // Removes `path` if it names this file. A successor's file is left alone.
  void unlink_if_current();

 private:
  Mapping() = default;
  void map();
  // Takes every page of the file, with several threads, and maps it. False: this kernel cannot, nothing was taken. Throws kNoSpace.
  bool populate();

  std::string path_;
  std::string temporary_;  // empty once published or when opened
  int fd_ = -1;
  uint8_t* data_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t inode_ = 0;
  uint64_t device_ = 0;
};

// 64 random bits, never 0.
uint64_t random_id();

}  // namespace glm53
