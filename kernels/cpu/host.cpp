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
#include "moe_trace.h"

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
  std::string text;
  char part[4096];
  for (size_t size; file != nullptr && (size = fread(part, 1, sizeof part, file.get())) > 0;) text.append(part, size);
  return text;
}

uint32_t quota_in(const std::string& folder, bool version_1) {
  const std::string text =
      version_1 ? text_of(folder + "/cpu.cfs_quota_us") + " " + text_of(folder + "/cpu.cfs_period_us") : text_of(folder + "/cpu.max");
  return moe_quota_cpus(text.c_str());
}

}  // namespace

extern "C" uint32_t moe_quota_cpus(const char* cpu_max) {
  double quota, period;
  /* "max", -1 (version 1), or no such file */
  if (sscanf(cpu_max, "%lf %lf", &quota, &period) != 2 || quota < 0 || period <= 0) return UINT32_MAX;
  return static_cast<uint32_t>(std::min(quota / period, 4294967295.0));
}

extern "C" uint32_t moe_own_quota_cpus(const char* root) try {
  const std::string at = root;
  const std::string groups = text_of(at + "/proc/self/cgroup");
  uint32_t cpus = UINT32_MAX;
  for (size_t start = 0, end; start < groups.size(); start = end + 1) {
    end = std::min(groups.find('\n', start), groups.size());
    const std::string line = groups.substr(start, end - start); /* number:controllers:folder */
    const size_t first = line.find(':'), second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool version_1 = controllers.find(",cpu,") != std::string::npos;
    if (!version_1 && controllers != ",,") continue;
    const std::string mount = at + "/sys/fs/cgroup" + (version_1 ? "/cpu" : "");
    /* A group gets no more than those around it; the outermost is the mount itself, which may be a container's own group. */
    for (std::string folder = line.substr(second + 1);; folder.resize(folder.rfind('/'))) {
      cpus = std::min(cpus, quota_in(mount + folder, version_1));
      if (folder.rfind('/') == std::string::npos) break;
    }
  }
  return cpus;
} catch (const std::bad_alloc&) {
  return UINT32_MAX;
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

extern "C" int64_t moe_hot_ns_among(uint32_t num_threads, uint32_t num_pinned, uint32_t usable) {
  /* Two threads on one CPU: one polls for the rest of its time slice, milliseconds, while the other has what the call waits for. */
  if (num_pinned != 0 && num_threads > num_pinned + 1) return kBriefNs;
  return uint64_t{num_threads} + kCoresForOthers <= usable ? kHotNs : kBriefNs;
}

extern "C" int64_t moe_hot_ns(uint32_t num_threads, uint32_t num_pinned) try {
  /* A quota of CPU time is spent by polling too, and then all threads stand still until the next period. */
  const size_t usable = std::min<size_t>(allowed_cpus().size(), moe_own_quota_cpus(""));
  return moe_hot_ns_among(num_threads, num_pinned, static_cast<uint32_t>(usable));
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
