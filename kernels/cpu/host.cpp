#include <errno.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cpu/error.h"
#include "moe_host.h"

namespace {

using namespace glm53;

constexpr uint32_t kCoresForOthers = 2; /* left free when there are more than twice as many cores */
/* While tokens are decoded a job comes every 0.3 to 1 ms, and 1 to 3 ms after the last layer's the next token's first: threads that are
 * still awake then save a wake-up, which takes 50 us and more on a CPU that the host of a virtual machine has put to sleep. */
constexpr int64_t kHotNs = 4'000'000;
constexpr int64_t kBriefNs = 20'000; /* a poll that takes a CPU from who computes the next job is worth no more than the sleep it saves */
constexpr size_t kHugePage = size_t{2} << 20;
constexpr int32_t kMaxNode = 1023;

struct CloseFile {
  void operator()(FILE* file) const { fclose(file); }
};
using File = std::unique_ptr<FILE, CloseFile>;

/* The lowest CPU that shares a core with this one; the CPU itself when the system does not tell. */
int first_sibling(int cpu) {
  const std::string path = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list";
  const File file(fopen(path.c_str(), "r"));
  int first = cpu;
  if (file != nullptr && fscanf(file.get(), "%d", &first) != 1) first = cpu;
  return first;
}

/* The CPUs that this thread may use. The set grows until the kernel's fits. */
std::vector<int> allowed_cpus() {
  for (int count = CPU_SETSIZE; count <= 64 * CPU_SETSIZE; count *= 2) {
    cpu_set_t* set = CPU_ALLOC(count);
    if (set == nullptr) return {};
    const size_t bytes = CPU_ALLOC_SIZE(count);
    std::vector<int> cpus;
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    for (int cpu = 0; known && cpu < count; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
    if (known) return cpus;
  }
  return {};
}

std::string text_of(const std::string& path) {
  const File file(fopen(path.c_str(), "r"));
  char text[4096] = "";
  if (file != nullptr) text[fread(text, 1, sizeof text - 1, file.get())] = 0;
  return text;
}

/* What this process's control group (version 2) may use; a container may see its own as the mount itself. */
uint32_t quota_cpus() {
  const std::string groups = "\n" + text_of("/proc/self/cgroup");
  const size_t at = groups.find("\n0::/");
  if (at == std::string::npos) return UINT32_MAX;
  const std::string folder = groups.substr(at + 4, groups.find('\n', at + 1) - at - 4);
  const std::string own = text_of("/sys/fs/cgroup" + folder + "/cpu.max");
  return moe_quota_cpus(own.empty() ? text_of("/sys/fs/cgroup/cpu.max").c_str() : own.c_str());
}

}  // namespace

extern "C" uint32_t moe_quota_cpus(const char* cpu_max) {
  double quota, period;
  if (sscanf(cpu_max, "%lf %lf", &quota, &period) != 2 || period <= 0) return UINT32_MAX; /* "max", or no such file */
  return static_cast<uint32_t>(std::min(quota / period, 4294967295.0));
}

extern "C" int moe_physical_cpus(int32_t* cpus, uint32_t capacity) try {
  if (cpus == nullptr && capacity > 0) return fail("cpus must not be NULL");
  std::vector<int> chosen, cores;
  for (const int cpu : allowed_cpus()) {
    const int core = first_sibling(cpu);
    bool seen = false;
    for (const int other : cores) seen = seen || other == core;
    if (seen) continue;
    cores.push_back(core);
    chosen.push_back(cpu);
  }
  if (chosen.empty()) return fail("the CPUs of this thread are not known: sched_getaffinity failed");
  const size_t skipped = chosen.size() > 2 * kCoresForOthers ? kCoresForOthers : 0;
  for (size_t i = skipped; i < chosen.size() && i - skipped < capacity; ++i) cpus[i - skipped] = chosen[i];
  return static_cast<int>(chosen.size() - skipped);
} catch (const std::bad_alloc&) {
  return fail("out of memory in moe_physical_cpus");
}

extern "C" int64_t moe_hot_ns(uint32_t num_threads) try {
  /* A quota of CPU time is spent by polling too, and then all threads stand still until the next period. */
  const size_t usable = std::min<size_t>(allowed_cpus().size(), quota_cpus());
  return num_threads + kCoresForOthers <= usable ? kHotNs : kBriefNs;
} catch (const std::bad_alloc&) {
  return kBriefNs;
}

extern "C" int moe_prefer_node(int32_t node) {
  if (node < -1 || node > kMaxNode) return fail("node %d is not in -1..%d", node, kMaxNode);
  constexpr uint32_t kWordBits = 8 * sizeof(unsigned long);
  unsigned long mask[(kMaxNode + 1) / kWordBits] = {};
  if (node >= 0) mask[node / kWordBits] = 1ul << (node % kWordBits);
  /* The system reads one bit less than it is told. */
  const long code = node < 0 ? syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0ul)
                             : syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask, static_cast<unsigned long>(kMaxNode + 2));
  if (code == 0) return 0;
  return fail("memory cannot be taken from node %d: %s", node, strerror(errno));
}

extern "C" void moe_meet_pages(const void* memory, size_t bytes) {
  const auto* start = static_cast<const volatile uint8_t*>(memory);
  for (size_t at = 0; at < bytes; at += kHugePage) (void)start[at];
}

extern "C" int moe_advise_huge(void* memory, size_t bytes) {
  const uintptr_t start = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kHugePage * kHugePage;
  if (start >= end) return 0; /* no whole page in it */
  if (madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE) == 0) return 0;
  return fail("the system refuses huge pages: %s", strerror(errno));
}

extern "C" int64_t moe_huge_bytes(const void* memory, size_t bytes) {
  const File file(fopen("/proc/self/smaps", "r"));
  if (file == nullptr) return fail("/proc/self/smaps cannot be read: %s", strerror(errno));
  const uintptr_t start = reinterpret_cast<uintptr_t>(memory);
  char line[512];
  bool overlaps = false;
  int64_t huge_bytes = 0;
  while (fgets(line, sizeof line, file.get()) != nullptr) {
    unsigned long first, last, kib;
    char name[64];
    if (sscanf(line, "%lx-%lx ", &first, &last) == 2) {
      overlaps = first < start + bytes && start < last;
    } else if (overlaps && sscanf(line, "%63[A-Za-z]: %lu kB", name, &kib) == 2) {
      const bool huge = strcmp(name, "AnonHugePages") == 0 || strcmp(name, "ShmemPmdMapped") == 0 || strcmp(name, "FilePmdMapped") == 0;
      if (huge) huge_bytes += static_cast<int64_t>(kib) * 1024;
    }
  }
  return huge_bytes;
}
