/* What the kernel threads want to know of the machine: which CPUs to run on, and whether memory lies in huge pages. Linux. */
#ifndef GLM53_MOE_HOST_H_
#define GLM53_MOE_HOST_H_

#include <stddef.h>
#include <stdint.h>

#include "moe_expert.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One logical CPU of each physical core that the calling thread may run on, in ascending order, for MoePool's threads. The first two cores
 * are left to the other processes when there are more than four. Writes at most `capacity` numbers and returns how many there are, or -1.
 */
MOE_API int moe_physical_cpus(int32_t* cpus, uint32_t capacity);
/* How long a thread of a pool of num_threads polls for the next job before it sleeps, in nanoseconds: milliseconds when the calling
 * thread's CPU mask (and quota of CPU time) has CPUs to spare for that, else about as long as a system call takes. num_pinned: CPUs that
 * the threads but the first one are pinned to, 0 for none; fewer than such threads are no CPUs to spare. */
MOE_API int64_t moe_hot_ns(uint32_t num_threads, uint32_t num_pinned);
/* CPUs' worth of time, rounded down, that the text of a control group's cpu.max grants, or of version 1's two files in a row;
 * UINT32_MAX: it sets no limit. */
MOE_API uint32_t moe_quota_cpus(const char* cpu_max);
/* The same of this process's control group and of those around it, of version 1 and 2, whichever grants least. root: "", or what stands in
 * the place of the file system's root. */
MOE_API uint32_t moe_own_quota_cpus(const char* root);
/* Where the calling thread's memory comes from, from now on: this NUMA node as long as it has any (threads started later inherit it), -1:
 * where the thread runs. 0, or -1 when the system refuses. */
MOE_API int moe_prefer_node(int32_t node);
/* Asks for 2 MiB pages in this memory (whole pages inside it). 0, or -1 when the system refuses. Whether it gave any: moe_huge_bytes. */
MOE_API int moe_advise_huge(void* memory, size_t bytes);
/* Reads a byte of every 2 MiB page of this memory: a huge page counts as one only once it has been met through this process's mapping. */
MOE_API void moe_meet_pages(const void* memory, size_t bytes);
/* Bytes of this memory's mappings that lie in huge pages now (AnonHugePages, ShmemPmdMapped and FilePmdMapped of every mapping that
 * overlaps it), or -1 when the system does not tell. */
MOE_API int64_t moe_huge_bytes(const void* memory, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif /* GLM53_MOE_HOST_H_ */
