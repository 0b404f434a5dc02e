/* Entry points of the routed-expert kernels: docs/arithmetic.md, computed on the CPU.
 *
 * Raw pointers in, no torch, no Python. Everything here gives the same bits for every variant, thread count, grouping of rows and
 * order of tasks: that is what makes an answer independent of where an expert happened to be evaluated.
 */
#ifndef GLM53_MOE_EXPERT_H_
#define GLM53_MOE_EXPERT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOE_API __attribute__((visibility("default")))

/* Bumped when any bit of any result may change; part of the arena's hash and of Info. */
#define MOE_ARITHMETIC_VERSION 1u

enum MoeCodebook { MOE_CODEBOOK_3INST = 0, MOE_CODEBOOK_MCG = 1, MOE_CODEBOOK_MUL1 = 2 };
enum MoeActivation { MOE_ACT_SILU = 0, MOE_ACT_GELU = 1, MOE_ACT_SWIGLU_OAI = 2, MOE_ACT_RELU2 = 3 };
enum MoeDtype { MOE_DTYPE_F32 = 0, MOE_DTYPE_F16 = 1 };
/* NATIVE: tiles as a checkpoint has them, row of tiles after row of tiles. PLANAR: tiles rearranged for the CPU (moe_shape_planar). */
enum MoeLayout { MOE_LAYOUT_NATIVE = 0, MOE_LAYOUT_PLANAR = 1 };
enum MoeVariant {
  MOE_VARIANT_AUTO = 0,
  MOE_VARIANT_SCALAR = 1,
  MOE_VARIANT_AVX2 = 2,
  MOE_VARIANT_AVX512BW = 3,
  MOE_VARIANT_AVX512VBMI = 4,
  MOE_VARIANT_AVXVNNI = 5
};

/* Offset value of a part that the record does not have (a bias). */
#define MOE_ABSENT 0xFFFFFFFFu
#define MOE_MAX_ROWS 8u

/* Where the parts of one expert lie inside its record and how they are to be read. Fixed width: it is stored in shared memory.
 * Trellis parts are uint16 [in/16][out/16][16*K] in native tile order; scale parts fp16 [in] (suh) and [out] (svh); biases fp16 [out]. */
typedef struct MoeExpertShape {
  uint32_t hidden;              /* model width, a multiple of 128 */
  uint32_t inter;               /* expert width, a multiple of 128 */
  uint32_t record_bytes;        /* stride of a record, a multiple of 4096 */
  uint8_t k_gate, k_up, k_down; /* bits per weight, 1..8 */
  uint8_t codebook;             /* MoeCodebook */
  uint8_t activation;           /* MoeActivation */
  uint8_t layout;               /* MoeLayout of the trellis parts */
  uint8_t reserved[2];
  float act_limit;                                 /* 0 = no clamp */
  uint32_t gate_trellis, up_trellis, down_trellis; /* byte offsets in the record; gate_* = MOE_ABSENT when gateless */
  uint32_t gate_suh, gate_svh, up_suh, up_svh, down_suh, down_svh;
  uint32_t gate_bias, up_bias, down_bias; /* MOE_ABSENT when there is none */
} MoeExpertShape;

/* One expert evaluated for some rows: y[out_rows[i]] = expert(x[x_rows[i]]), i < num_rows, unweighted, fp32, output basis. */
typedef struct MoeTask {
  const MoeExpertShape* shape;
  const void* record;       /* 64-byte aligned */
  const void* x;            /* [*][hidden] of x_dtype, row stride = hidden */
  const uint32_t* x_rows;   /* [num_rows] row numbers in x */
  float* out;               /* [*][hidden] fp32, row stride = hidden */
  const uint32_t* out_rows; /* [num_rows] row numbers in out */
  uint32_t num_rows;        /* any number; evaluated in groups of up to MOE_MAX_ROWS per decode of the weights */
  uint32_t x_dtype;         /* MoeDtype */
} MoeTask;

/* Fills record offsets and record_bytes for an expert of the given dims (trellis parts first, then scales, then biases), 0 on success,
 * -1 when a dimension, K or codebook is not supported. */
MOE_API int moe_shape_init(MoeExpertShape* shape, uint32_t hidden, uint32_t inter, uint32_t k_gate, uint32_t k_up, uint32_t k_down,
                           uint32_t codebook, uint32_t activation, float act_limit, uint32_t gateless, uint32_t has_bias);
/* The same record with planar trellis parts: same size and offsets. A GPU cannot read it. 0, or -1 when the codebook is not MUL1. */
MOE_API int moe_shape_planar(MoeExpertShape* planar, const MoeExpertShape* native);
/* Copies a native record into a planar one. The two may not overlap. 0, or -1 on a shape that is not native. */
MOE_API int moe_repack_planar(const MoeExpertShape* native, const void* record, void* planar_record);
/* 0 when the shape's fields are known and its parts lie 64-byte aligned inside the record, else -1: for a shape read from shared memory. */
MOE_API int moe_shape_check(const MoeExpertShape* shape);
/* "struct.field=offset:size" a line for the structs above ("struct.=0:size" is the whole): bindings compare their mirror with it. */
MOE_API const char* moe_struct_layout(void);
MOE_API uint32_t moe_arithmetic_version(void);
/* Why the last call of this thread that returned -1 or NULL did so, naming the field. */
MOE_API const char* moe_last_error(void);

/* A pool of worker threads. num_threads >= 1 counts the caller: 1 means that moe_pool_run computes in the calling thread alone.
 * cpus: logical CPUs to pin the extra threads to, or NULL. Returns NULL when a variant is not available on this host. */
typedef struct MoePool MoePool;
MOE_API MoePool* moe_pool_create(uint32_t variant, uint32_t num_threads, const int32_t* cpus, uint32_t num_cpus);
MOE_API void moe_pool_destroy(MoePool* pool);
/* Evaluates all tasks and returns when every output row is written. One caller at a time. 0 on success, -1 on a malformed task. */
MOE_API int moe_pool_run(MoePool* pool, const MoeTask* tasks, uint32_t num_tasks);
/* Times the eligible variants on a band of this shape and takes the fastest for each number of rows (only for MOE_VARIANT_AUTO; the reason
 * changes with it). Not while the pool runs. About 0.1 s. 0, or -1 on a malformed shape. */
MOE_API int moe_pool_tune(MoePool* pool, const MoeExpertShape* shape);
/* The variant that runs (for one row) and why it was chosen (a static or pool-owned string). */
MOE_API uint32_t moe_pool_variant(const MoePool* pool);
MOE_API const char* moe_pool_reason(const MoePool* pool);
/* 1 when this host can run the variant. */
MOE_API int moe_variant_available(uint32_t variant);
MOE_API const char* moe_variant_name(uint32_t variant);

/* EXL3 trellis -> fp32 weights [in][out] (what the GPU decodes, fp16 values widened), no scales. */
MOE_API int exl3_decode(const uint16_t* trellis, uint32_t in_features, uint32_t out_features, uint32_t k, uint32_t codebook, float* out);
/* The dense weight diag(suh) H W H diag(svh) as fp32 [in][out]. suh, svh: fp16 bits. */
MOE_API int exl3_dequantize(const uint16_t* trellis, const uint16_t* suh, const uint16_t* svh, uint32_t in_features, uint32_t out_features,
                            uint32_t k, uint32_t codebook, float* out);

#ifdef __cplusplus
}
#endif

#endif /* GLM53_MOE_EXPERT_H_ */
