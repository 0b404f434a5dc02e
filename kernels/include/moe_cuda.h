/* Routed experts on a CUDA GPU, for decode: docs/arithmetic.md on tensor cores, with the bits of the CPU kernel (moe_expert.h).
 *
 * Raw device addresses and a stream handle in, no torch, no Python. A call only enqueues kernels: it allocates nothing, never synchronises
 * and may be captured into a CUDA graph; what the addresses hold is read when the kernels run. The library is libglm53_cuda.so.
 */
#ifndef GLM53_MOE_CUDA_H_
#define GLM53_MOE_CUDA_H_

#include "moe_expert.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows (tokens) of one step, and picks of one token. */
#define MOE_CUDA_MAX_ROWS 8u
#define MOE_CUDA_MAX_TOP_K 16u

enum MoeCudaIndex { MOE_CUDA_INDEX_I32 = 0, MOE_CUDA_INDEX_I64 = 1 };

/* Bits of MoeCudaStep.flags. */
enum MoeCudaFlags {
  /* Never let a kernel of the step start before its predecessor has ended (programmatic dependent launch, compute capability 9.0 and up,
   * is on otherwise: it hides the launches and the first loads). */
  MOE_CUDA_SERIAL = 1,
  /* The stream's last operation before this step is a kernel (or nothing): the step's launch may be prepared while it ends. What it wrote
   * is waited for all the same. */
  MOE_CUDA_AFTER_KERNEL = 2,
  /* Every pick with a valid number is expected to be computed here: no other lane takes part in the step. This says which kernels are
   * quicker, never what the result is. A step of one row then runs as one launch instead of three, where the handle has that: compute
   * capability 9.x to 11.x, gate, up and down of one K, hidden and inter multiples of 512, top_k * inter / 128 no more than the device's
   * multiprocessors. One launch has a multiprocessor for each band of each pick; three share them out anew, which pays when picks are
   * elsewhere. */
  MOE_CUDA_ALL_HERE = 4
};

/* One decode step of one MoE layer: `rows` tokens, top_k picks each. Pick p = row * top_k + slot belongs to expert selected[p].
 *
 * A pick is computed here when its expert e lies in 0..num_experts-1 and records[e] is not 0; the others are left out: their rows of y are
 * not written and `out` does not contain them. That is how picks of another lane are masked.
 * All pointers are addresses that the device can read or write, 16-byte aligned. */
typedef struct MoeCudaStep {
  const uint64_t* records; /* [num_experts] address of the expert's record in VRAM or in mapped host memory, 64-byte aligned; 0: not here */
  const void* x;           /* [rows][hidden] of x_dtype */
  const void* selected;    /* [rows][top_k] expert numbers of selected_type */
  const void* weights;     /* [rows][top_k] routing weights of weights_dtype; may be NULL when out is NULL */
  float* y;                /* [rows * top_k][hidden] one row per computed pick, not weighted, output basis; NULL: rows stay inside */
  float* out;              /* [rows][hidden] out = fma(weight, y, out) over ascending slots from 0, then + shared; NULL: no sum */
  const float* shared;     /* [rows][hidden] added after the picks, or NULL */
  uint32_t num_experts;
  uint32_t rows;          /* 1..MOE_CUDA_MAX_ROWS */
  uint32_t top_k;         /* 1..MOE_CUDA_MAX_TOP_K */
  uint32_t x_dtype;       /* MoeDtype */
  uint32_t selected_type; /* MoeCudaIndex */
  uint32_t weights_dtype; /* MoeDtype */
  uint32_t flags;         /* MoeCudaFlags */
} MoeCudaStep;

/* Adds the rows of a step whose picks were computed in different places: the same sum as `out` above.
 * Pick p takes its row from y when its expert has a record, from other_y when it has none but its number is valid (0..num_experts-1), and
 * is left out when its number is not valid. */
typedef struct MoeCudaCombine {
  const uint64_t* records;    /* [num_experts], as the step had it */
  const void* selected;       /* [rows][top_k] */
  const void* weights;        /* [rows][top_k] */
  const float* y;             /* [rows * top_k][hidden] */
  const float* other_y;       /* [rows * top_k][hidden], mapped host memory for example; NULL: those picks are left out */
  const uint64_t* other_from; /* instead of other_y: the address of other_y's address, read when the kernel runs (mapped host memory) */
  const float* shared;        /* [rows][hidden] or NULL */
  float* out;                 /* [rows][hidden] */
  uint32_t hidden;
  uint32_t num_experts, rows, top_k;
  uint32_t selected_type, weights_dtype;
} MoeCudaCombine;

/* Tells the host about a step: picks and activations go to mapped host memory, then a word there gets its value. Who sees the value
 * (acquire) sees the rest. */
typedef struct MoeCudaPublish {
  const void* selected; /* int64 [rows][top_k] */
  const void* x;        /* fp16 [rows][hidden], or NULL: nobody on the host needs it */
  void* selected_to;    /* int64 [rows][top_k], mapped */
  void* x_to;           /* fp16 [rows][hidden], mapped; NULL when x is */
  uint32_t* arrivals;   /* VRAM, 0 before the first step; steps that share it are ordered by their streams */
  uint32_t* word;       /* mapped */
  uint32_t value;
  uint32_t hidden; /* a multiple of 128 */
  uint32_t rows;   /* 1..MOE_CUDA_MAX_ROWS */
  uint32_t top_k;  /* 1..MOE_CUDA_MAX_TOP_K */
} MoeCudaPublish;

/* One range of a gather: device addresses, 16-byte aligned; source is mapped host memory. */
typedef struct MoeCudaCopy {
  uint64_t to;
  uint64_t source;
} MoeCudaCopy;

/* Kernels, scratch memory and launch sizes for experts of one shape on one device. Steps that use the same handle must be ordered by their
 * streams: they share its scratch memory. */
typedef struct MoeCudaExperts MoeCudaExperts;

/* 0 when the shape can run on GPUs: native layout, MUL1, K = 2, 3 or 4 for each matrix. Otherwise -1 and a message that names the field. */
MOE_API int moe_cuda_shape_check(const MoeExpertShape* shape);
/* NULL with a message when the shape is not supported, there is no such device, it is older than compute capability 8.0, or its memory is
 * short. max_picks: the largest rows * top_k of a step. */
MOE_API MoeCudaExperts* moe_cuda_create(const MoeExpertShape* shape, uint32_t max_picks, int32_t device);
/* Waits for the device. No step of the handle may be outstanding in a captured graph that will run again. */
MOE_API void moe_cuda_destroy(MoeCudaExperts* experts);
/* Enqueues a step on the stream (cudaStream_t; 0 = the default stream). 0, or -1 and a message. */
MOE_API int moe_cuda_run(MoeCudaExperts* experts, const MoeCudaStep* step, void* stream);
MOE_API int moe_cuda_combine(const MoeCudaCombine* combine, void* stream);
MOE_API int moe_cuda_publish(const MoeCudaPublish* publish, void* stream);
/* Enqueues a copy of `count` ranges of `bytes` bytes each, read by the multiprocessors: one launch for up to 64 of them, of a block
 * for every fourth multiprocessor and 32 at most, so that kernels of other streams keep theirs. The sources must not change meanwhile. The
 * first call in a process loads the kernel's code: nothing on the device may be waiting for this thread then. */
MOE_API int moe_cuda_gather(const MoeCudaCopy* copies, uint32_t count, uint64_t bytes, void* stream);
/* Measurements: the way from the device to the host and back. request and reply are words of mapped host memory, in cache lines of their
 * own, with other values than the rounds': round i has the number first + i. A round that takes longer than limit_ns ends everything.
 *
 * spin_rounds enqueues a kernel of one thread that raises request and waits for the same number in reply, once a round. cycles [rounds] and
 * total_ns (device memory, zeroed before): clock cycles of each round, and nanoseconds of all; total_ns stays 0 when a round was too long.
 * stamp enqueues a kernel that notes the device's time at ns and then, with a word, raises that one to value.
 * answer_rounds is the host's side, in whichever thread or process calls it: it polls as the pager does, and answers each round at once. */
MOE_API int moe_cuda_spin_rounds(uint32_t* request, const uint32_t* reply, uint64_t* cycles, uint64_t* total_ns, uint32_t first,
                                 uint32_t rounds, uint64_t limit_ns, void* stream);
MOE_API int moe_cuda_stamp(uint64_t* ns, uint32_t* word, uint32_t value, void* stream);
MOE_API int moe_cuda_answer_rounds(const uint32_t* request, uint32_t* reply, uint32_t first, uint32_t rounds, uint64_t limit_ns);
/* What the handle runs with: device name, blocks per multiprocessor, launches of a step of one row, scratch bytes. Owned by the handle. */
MOE_API const char* moe_cuda_describe(const MoeCudaExperts* experts);
MOE_API const char* moe_cuda_last_error(void);
MOE_API uint32_t moe_cuda_arithmetic_version(void);
/* The architectures that the library holds machine code for, for example "86,89,90,120". */
MOE_API const char* moe_cuda_architectures(void);
/* As moe_struct_layout, for the structs of this header. */
MOE_API const char* moe_cuda_struct_layout(void);

#ifdef __cplusplus
}
#endif

#endif /* GLM53_MOE_CUDA_H_ */
