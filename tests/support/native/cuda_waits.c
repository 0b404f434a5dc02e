/* Counts CUDA driver calls that make the host wait, while a window is open. For tests: LD_PRELOAD=libcuda_waits.so.
 *
 * The CUDA runtime and everything that loads the driver by itself find driver functions with dlsym, most of them through one that they find
 * so: cuGetProcAddress. Both are interposed here, and what they give for a counted function is a wrapper that notes the call and goes on.
 * No NVIDIA header is needed: every counted function takes at most eight integers or pointers and returns an int.
 *
 * Kinds: 0 waits (context, stream, event), 1 memory calls that may synchronise with the device, 2 copies that return when they are done,
 * 3 loading of code. Not seen: an asynchronous copy from or to pageable memory, which may wait too.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define KINDS 4
#define LOG_LEN 256

typedef int (*Call)(intptr_t, intptr_t, intptr_t, intptr_t, intptr_t, intptr_t, intptr_t, intptr_t);

/* name as cuGetProcAddress is asked for it, kind. A suffix of dlsym's names (_v2, _ptsz, _ptds) is cut before looking. */
#define FUNCTIONS(X)            \
  X(cuCtxSynchronize, 0)        \
  X(cuStreamSynchronize, 0)     \
  X(cuEventSynchronize, 0)      \
  X(cuMemAlloc, 1)              \
  X(cuMemAllocPitch, 1)         \
  X(cuMemAllocManaged, 1)       \
  X(cuMemFree, 1)               \
  X(cuMemAllocHost, 1)          \
  X(cuMemHostAlloc, 1)          \
  X(cuMemFreeHost, 1)           \
  X(cuMemHostRegister, 1)       \
  X(cuMemHostUnregister, 1)     \
  X(cuMemCreate, 1)             \
  X(cuMemMap, 1)                \
  X(cuMemUnmap, 1)              \
  X(cuMemRelease, 1)            \
  X(cuMemSetAccess, 1)          \
  X(cuMemcpy, 2)                \
  X(cuMemcpyHtoD, 2)            \
  X(cuMemcpyDtoH, 2)            \
  X(cuMemcpyDtoD, 2)            \
  X(cuMemcpyPeer, 2)            \
  X(cuMemcpy2D, 2)              \
  X(cuMemcpy2DUnaligned, 2)     \
  X(cuMemcpy3D, 2)              \
  X(cuMemcpy3DPeer, 2)          \
  X(cuModuleLoad, 3)            \
  X(cuModuleLoadData, 3)        \
  X(cuModuleLoadDataEx, 3)      \
  X(cuModuleLoadFatBinary, 3)   \
  X(cuLibraryLoadData, 3)       \
  X(cuLibraryLoadFromFile, 3)   \
  X(cuModuleUnload, 3)          \
  X(cuLibraryUnload, 3)

enum {
#define X(name, kind) INDEX_##name,
  FUNCTIONS(X)
#undef X
      NUM_FUNCTIONS
};

static const char* const names[NUM_FUNCTIONS] = {
#define X(name, kind) #name,
    FUNCTIONS(X)
#undef X
};
static const int kinds[NUM_FUNCTIONS] = {
#define X(name, kind) kind,
    FUNCTIONS(X)
#undef X
};

static _Atomic(Call) real[NUM_FUNCTIONS];
static atomic_int hooked;            /* lookups that were given a wrapper */
static atomic_int window;            /* 1 while calls are counted */
static _Thread_local int owner;      /* 1 in the thread that opened the window */
static atomic_long counts[2][KINDS]; /* [0] of the owner, [1] of other threads */
static _Atomic(const char*) calls[LOG_LEN];
static atomic_int num_calls;

static void note(int index) {
  if (!atomic_load(&window)) return;
  atomic_fetch_add(&counts[owner ? 0 : 1][kinds[index]], 1);
  if (!owner) return;
  const int at = atomic_fetch_add(&num_calls, 1);
  if (at < LOG_LEN) atomic_store(&calls[at], names[index]);
}

#define X(name, kind)                                                                                                       \
  static int wrapped_##name(intptr_t a, intptr_t b, intptr_t c, intptr_t d, intptr_t e, intptr_t f, intptr_t g, intptr_t h) { \
    note(INDEX_##name);                                                                                                     \
    return atomic_load(&real[INDEX_##name])(a, b, c, d, e, f, g, h);                                                        \
  }
FUNCTIONS(X)
#undef X

static const Call wrappers[NUM_FUNCTIONS] = {
#define X(name, kind) wrapped_##name,
    FUNCTIONS(X)
#undef X
};

static int find(const char* name) {
  size_t length = strlen(name);
  static const char* const suffixes[] = {"_ptsz", "_ptds", "_v2", "_v3"};
  for (int round = 0; round < 2; ++round) {
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; ++i) {
      const size_t n = strlen(suffixes[i]);
      if (length > n && strncmp(name + length - n, suffixes[i], n) == 0) length -= n;
    }
  }
  for (int i = 0; i < NUM_FUNCTIONS; ++i) {
    if (strlen(names[i]) == length && strncmp(names[i], name, length) == 0) return i;
  }
  return -1;
}

/* The wrapper for a function that was found, or what was found. Versions of one function differ in their arguments' widths alone: the last one
 * that was asked for is called, which is right as long as a process uses one of them. */
static void* hook(const char* name, void* found) {
  const int index = find(name);
  if (index < 0 || found == NULL || found == (void*)wrappers[index]) return found;
  atomic_store(&real[index], (Call)found);
  atomic_fetch_add(&hooked, 1);
  return (void*)wrappers[index];
}

typedef int (*GetProcAddressV2)(const char*, void**, int, uint64_t, void*);
typedef int (*GetProcAddress)(const char*, void**, int, uint64_t);
static _Atomic(GetProcAddressV2) real_get_v2;
static _Atomic(GetProcAddress) real_get;

static int wrapped_get_v2(const char* name, void** out, int version, uint64_t flags, void* status);

static int wrapped_get(const char* name, void** out, int version, uint64_t flags) {
  const int code = atomic_load(&real_get)(name, out, version, flags);
  if (code == 0 && out != NULL) *out = hook(name, *out);
  return code;
}

static int wrapped_get_v2(const char* name, void** out, int version, uint64_t flags, void* status) {
  const int code = atomic_load(&real_get_v2)(name, out, version, flags, status);
  if (code != 0 || out == NULL || *out == NULL) return code;
  if (strcmp(name, "cuGetProcAddress") == 0) { /* from version 12 on the five-argument one is given under this name */
    if (*out != (void*)wrapped_get_v2) atomic_store(&real_get_v2, (GetProcAddressV2)*out);
    *out = (void*)wrapped_get_v2;
  } else {
    *out = hook(name, *out);
  }
  return code;
}

typedef void* (*Dlsym)(void*, const char*);

static Dlsym real_dlsym(void) {
  static _Atomic(Dlsym) cached;
  Dlsym found = atomic_load(&cached);
  if (found == NULL) {
    found = (Dlsym)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (found == NULL) found = (Dlsym)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    atomic_store(&cached, found);
  }
  return found;
}

__attribute__((visibility("default"))) void* dlsym(void* handle, const char* name) {
  void* found = real_dlsym()(handle, name);
  if (found == NULL || strncmp(name, "cu", 2) != 0) return found;
  if (strcmp(name, "cuGetProcAddress_v2") == 0) {
    if (found != (void*)wrapped_get_v2) atomic_store(&real_get_v2, (GetProcAddressV2)found);
    return (void*)wrapped_get_v2;
  }
  if (strcmp(name, "cuGetProcAddress") == 0) {
    if (found != (void*)wrapped_get) atomic_store(&real_get, (GetProcAddress)found);
    return (void*)wrapped_get;
  }
  return hook(name, found);
}

/* Begins to count; the calling thread's calls are told apart from all others'. */
__attribute__((visibility("default"))) void cuda_waits_open(void) {
  atomic_store(&window, 0);
  for (int who = 0; who < 2; ++who) {
    for (int kind = 0; kind < KINDS; ++kind) atomic_store(&counts[who][kind], 0);
  }
  atomic_store(&num_calls, 0);
  owner = 1;
  atomic_store(&window, 1);
}

__attribute__((visibility("default"))) void cuda_waits_close(void) {
  atomic_store(&window, 0);
  owner = 0;
}

/* Calls of a kind since the window was opened: of the thread that opened it (0), or of all others (1). -1: no such kind. */
__attribute__((visibility("default"))) long cuda_waits_count(int others, int kind) {
  return kind < 0 || kind >= KINDS ? -1 : atomic_load(&counts[others ? 1 : 0][kind]);
}

/* The name of the i-th counted call of the owner, or NULL. */
__attribute__((visibility("default"))) const char* cuda_waits_call(int i) {
  return i < 0 || i >= atomic_load(&num_calls) || i >= LOG_LEN ? NULL : atomic_load(&calls[i]);
}

/* How many lookups were answered with a wrapper: 0 means that nobody's calls are seen. */
__attribute__((visibility("default"))) int cuda_waits_hooked(void) { return atomic_load(&hooked); }
