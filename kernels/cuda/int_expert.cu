/* The C interface of moe_cuda.h: checks, scratch memory, launches. */
#include <cuda_runtime.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <memory>
#include <new>
#include <string>

#include "cpu/error.h"
#include "cpu/shape.h"
#include "cuda/int_expert_kernels.cuh"
#include "cuda/int_expert_one_row.cuh"
#include "cuda/publish_step.cuh"
#include "moe_cuda.h"

#ifndef GLM53_CUDA_ARCHITECTURES
#error "the build states the architectures"
#endif

namespace {

using namespace glm53;

int check_cuda(cudaError_t code, const char* what) {
  return code == cudaSuccess ? 0 : fail("%s: %s (%s)", what, cudaGetErrorString(code), cudaGetErrorName(code));
}

/* Makes a device current and gives the caller's back. */
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    if (cudaGetDevice(&previous_) != cudaSuccess) previous_ = -1;
    if (previous_ == device) {
      previous_ = -1;
    } else {
      code_ = cudaSetDevice(device);
    }
  }
  ~DeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t code() const { return code_; }

 private:
  int previous_ = -1;
  cudaError_t code_ = cudaSuccess;
};

using InnerKernel = void (*)(StepArgs, uint32_t, uint32_t);
using OuterKernel = void (*)(StepArgs);

template <int Rows>
InnerKernel inner_kernel(uint32_t k) {
  return k == 2 ? inner_bands<2, Rows> : k == 3 ? inner_bands<3, Rows> : inner_bands<4, Rows>;
}
template <int Rows>
OuterKernel outer_kernel(uint32_t k) {
  return k == 2 ? outer_bands<2, Rows> : k == 3 ? outer_bands<3, Rows> : outer_bands<4, Rows>;
}
OuterKernel one_row_kernel(uint32_t k) { return k == 2 ? one_row_step<2> : k == 3 ? one_row_step<3> : one_row_step<4>; }

/* A kernel that loops over items. */
struct Looping {
  const void* function = nullptr;
  uint32_t shared_bytes = 0;
  uint32_t blocks_per_multiprocessor = 0;
};

int prepare_looping(Looping& kernel, const void* function, uint32_t k, uint32_t rows, const cudaDeviceProp& device) {
  const bool roomy = device.major >= 9 && device.major < 12;
  kernel.function = function;
  kernel.shared_bytes = block_memory(roomy, k, rows).bytes;
  /* A launch may ask for more than it uses: see launch_looping. */
  const size_t half = device.sharedMemPerMultiprocessor / 2u;
  const int bytes = static_cast<int>(kernel.shared_bytes > half ? kernel.shared_bytes : half);
  if (check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory of a kernel") != 0) {
    return -1;
  }
  if (check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, 100), "shared memory of a kernel") != 0)
    return -1;
  int blocks = 0;
  if (check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, kThreads, kernel.shared_bytes), "occupancy") != 0)
    return -1;
  if (blocks == 0) return fail("device %s: no block of a kernel fits a multiprocessor", device.name);
  kernel.blocks_per_multiprocessor = static_cast<uint32_t>(blocks);
  return 0;
}

/* Hands out parts of one allocation; with a NULL base it only counts. */
class Layout {
 public:
  explicit Layout(uint8_t* base) : base_(base) {}
  template <typename T>
  T* take(size_t count, size_t more_bytes = 0) {
    T* part = reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + more_bytes + 255u) / 256u * 256u;
    return part;
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

/* What a stream of activations reads ahead of its end. */
constexpr size_t kReadAhead = kStageActivationBytes;

Workspace lay_out(const MoeExpertShape& s, uint32_t picks, uint32_t projections, Layout& layout) {
  const size_t rows = size_t{picks} * projections;
  Workspace work;
  work.inner_arrivals = layout.take<uint32_t>(size_t{picks} * (s.inter / kBlock));
  work.outer_arrivals = layout.take<uint32_t>(size_t{MOE_CUDA_MAX_ROWS} * (s.hidden / kBlock));
  work.runs = layout.take<RunTable>(1);
  work.handed_out = layout.take<uint32_t>(kLoopingKernels);
  work.inputs.bytes = layout.take<uint8_t>(rows * 2u * s.hidden, kReadAhead);
  work.inputs.blocks = layout.take<uint2>(rows * (s.hidden / kBlock), kReadAhead);
  work.inner_rows.bytes = layout.take<uint8_t>(size_t{picks} * 2u * s.inter, kReadAhead);
  work.inner_rows.blocks = layout.take<uint2>(size_t{picks} * (s.inter / kBlock), kReadAhead);
  work.projections = layout.take<float>(rows * s.inter);
  work.y = layout.take<float>(size_t{picks} * s.hidden);
  return work;
}

int check_bits(const char* name, uint32_t k) {
  return k >= 2 && k <= 4 ? 0 : fail("%s = %u bits per weight: the GPU kernel has 2, 3 and 4", name, k);
}

int check_pointer(const char* name, const void* pointer, bool required) {
  if (pointer == nullptr) return required ? fail("%s must not be NULL", name) : 0;
  return reinterpret_cast<uintptr_t>(pointer) % 16u == 0 ? 0 : fail("%s is not 16-byte aligned", name);
}

int check_choice(const char* name, uint32_t value, uint32_t last) {
  return value <= last ? 0 : fail("%s = %u is not known (0..%u)", name, value, last);
}

int check_selection(const void* records, const void* selected, uint32_t num_experts, uint32_t rows, uint32_t top_k,
                    uint32_t selected_type) {
  if (check_pointer("records", records, true) != 0 || check_pointer("selected", selected, true) != 0) return -1;
  if (num_experts < 1 || num_experts > 0x7FFFFFFFu) return fail("num_experts = %u is not in 1..2^31-1", num_experts);
  if (rows < 1 || rows > MOE_CUDA_MAX_ROWS) return fail("rows = %u is not in 1..%u", rows, MOE_CUDA_MAX_ROWS);
  if (top_k < 1 || top_k > MOE_CUDA_MAX_TOP_K) return fail("top_k = %u is not in 1..%u", top_k, MOE_CUDA_MAX_TOP_K);
  return check_choice("selected_type", selected_type, MOE_CUDA_INDEX_I64);
}

uint32_t blocks_for_warps(uint32_t warps) { return (warps + kWarps - 1) / kWarps; }

}  // namespace

struct MoeCudaExperts {
  MoeExpertShape shape;
  cudaDeviceProp properties;
  int device = 0;
  uint32_t max_picks = 0, projections = 0;
  uint8_t* memory = nullptr;
  Workspace work;
  /* [0]: runs of up to 4 rows, [1]: of up to 8. */
  Looping gate[2], up[2], down[2];
  Looping one_row; /* no function: not for this shape or device */
  std::string description;

  int open(const MoeExpertShape& expert_shape, uint32_t picks, int32_t on_device);
  int run(const MoeCudaStep& step, cudaStream_t stream) const;
  ~MoeCudaExperts();

 private:
  int prepare_kernels();
  int prepare_one_row();
  int allocate();
  int check_step(const MoeCudaStep& step) const;
  int launch(const Looping& kernel, uint32_t blocks, bool overlap, void** arguments, cudaStream_t stream,
             uint32_t threads = kThreads) const;
  int launch_looping(const Looping& kernel, uint32_t items, bool overlap, void** arguments, cudaStream_t stream) const;
  int launch_inner(StepArgs& args, uint32_t wide, bool overlap, cudaStream_t stream) const;
};

MoeCudaExperts::~MoeCudaExperts() {
  if (memory == nullptr) return;
  const DeviceGuard guard(device);
  cudaFree(memory); /* waits for the device */
}

int MoeCudaExperts::prepare_kernels() {
  for (uint32_t wide = 0; wide < 2; ++wide) {
    const uint32_t rows = wide == 0 ? 4 : 8;
    const auto inner = [&](uint32_t k) { return reinterpret_cast<const void*>(wide == 0 ? inner_kernel<4>(k) : inner_kernel<8>(k)); };
    const void* outer = reinterpret_cast<const void*>(wide == 0 ? outer_kernel<4>(shape.k_down) : outer_kernel<8>(shape.k_down));
    if (projections == 2 && prepare_looping(gate[wide], inner(shape.k_gate), shape.k_gate, rows, properties) != 0) return -1;
    if (prepare_looping(up[wide], inner(shape.k_up), shape.k_up, rows, properties) != 0) return -1;
    if (prepare_looping(down[wide], outer, shape.k_down, rows, properties) != 0) return -1;
  }
  return 0;
}

/* The kernel of MOE_CUDA_ALL_HERE, where the shape and the device let it run. */
int MoeCudaExperts::prepare_one_row() {
  const bool roomy = properties.major >= 9 && properties.major < 12;
  const bool one_k = projections == 2 && shape.k_gate == shape.k_up && shape.k_up == shape.k_down;
  if (!roomy || !one_k || shape.hidden / kBlock % kGroups != 0 || shape.inter / kBlock % kGroups != 0) return 0;
  const uint32_t bytes = one_row_bytes(shape.k_up, shape.hidden);
  if (bytes + 1024u > properties.sharedMemPerBlockOptin) return 0;
  one_row.function = reinterpret_cast<const void*>(one_row_kernel(shape.k_up));
  one_row.shared_bytes = bytes;
  one_row.blocks_per_multiprocessor = 1;
  const cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
  return check_cuda(cudaFuncSetAttribute(one_row.function, most, static_cast<int>(bytes)), "shared memory of a kernel");
}

int MoeCudaExperts::allocate() {
  Layout count(nullptr);
  lay_out(shape, max_picks, projections, count);
  void* address = nullptr;
  if (check_cuda(cudaMalloc(&address, count.used()), "scratch memory of the expert kernels") != 0) return -1;
  memory = static_cast<uint8_t*>(address);
  Layout layout(memory);
  work = lay_out(shape, max_picks, projections, layout);
  if (check_cuda(cudaMemset(memory, 0, count.used()), "scratch memory of the expert kernels") != 0) return -1;
  if (check_cuda(cudaDeviceSynchronize(), "scratch memory of the expert kernels") != 0) return -1;
  description = std::string(properties.name) + ", compute capability " + std::to_string(properties.major) + "." +
                std::to_string(properties.minor) + ", " + std::to_string(up[0].blocks_per_multiprocessor) + " + " +
                std::to_string(down[0].blocks_per_multiprocessor) + " blocks per multiprocessor, " +
                (one_row.function != nullptr ? "one launch for one row" : "three launches for one row") + ", scratch " +
                std::to_string(count.used()) + " bytes";
  return 0;
}

int MoeCudaExperts::open(const MoeExpertShape& expert_shape, uint32_t picks, int32_t on_device) {
  if (moe_cuda_shape_check(&expert_shape) != 0) return -1;
  if (picks < 1 || picks > kMaxPicks) return fail("max_picks = %u is not in 1..%u", picks, kMaxPicks);
  int devices = 0;
  if (check_cuda(cudaGetDeviceCount(&devices), "CUDA") != 0) return -1;
  if (on_device < 0 || on_device >= devices) return fail("device %d does not exist: there are %d", on_device, devices);
  shape = expert_shape;
  max_picks = picks;
  projections = is_gateless(shape) ? 1 : 2;
  device = on_device;
  const DeviceGuard guard(device);
  if (check_cuda(guard.code(), "device") != 0) return -1;
  if (check_cuda(cudaGetDeviceProperties(&properties, device), "device properties") != 0) return -1;
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(prepare_rows)) != cudaSuccess) {
    cudaGetLastError(); /* it is reported here, not at the next launch */
    return fail("device %s has compute capability %d.%d, the library has code for %s", properties.name, properties.major, properties.minor,
                GLM53_CUDA_ARCHITECTURES);
  }
  return prepare_kernels() == 0 && prepare_one_row() == 0 ? allocate() : -1;
}

int MoeCudaExperts::check_step(const MoeCudaStep& step) const {
  if (check_selection(step.records, step.selected, step.num_experts, step.rows, step.top_k, step.selected_type) != 0) return -1;
  if (step.rows * step.top_k > max_picks)
    return fail("rows = %u x top_k = %u: the handle has room for %u picks", step.rows, step.top_k, max_picks);
  if (check_pointer("x", step.x, true) != 0 || check_pointer("y", step.y, false) != 0 || check_pointer("out", step.out, false) != 0 ||
      check_pointer("shared", step.shared, false) != 0 || check_pointer("weights", step.weights, step.out != nullptr) != 0) {
    return -1;
  }
  if (step.y == nullptr && step.out == nullptr) return fail("y and out are both NULL: the step has no result");
  if (check_choice("x_dtype", step.x_dtype, MOE_DTYPE_F16) != 0) return -1;
  return check_choice("weights_dtype", step.weights_dtype, MOE_DTYPE_F16);
}

int MoeCudaExperts::launch(const Looping& kernel, uint32_t blocks, bool overlap, void** arguments, cudaStream_t stream,
                           uint32_t threads) const {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = kernel.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return check_cuda(cudaLaunchKernelExC(&config, kernel.function, arguments), "launch of an expert kernel");
}

/* As many blocks as the device holds at once, or as there are items at most (runs with several picks make them fewer). When fewer blocks a
 * multiprocessor are enough, each takes so much shared memory that no more fit: otherwise some multiprocessors would get more than others.
 */
int MoeCudaExperts::launch_looping(const Looping& kernel, uint32_t items, bool overlap, void** arguments, cudaStream_t stream) const {
  const uint32_t multiprocessors = static_cast<uint32_t>(properties.multiProcessorCount);
  const uint32_t enough = (items + multiprocessors - 1u) / multiprocessors;
  Looping spread = kernel;
  if (enough < kernel.blocks_per_multiprocessor) {
    const uint32_t share = static_cast<uint32_t>(properties.sharedMemPerMultiprocessor) / (enough + 1u);
    if (share > spread.shared_bytes) spread.shared_bytes = share;
    spread.blocks_per_multiprocessor = enough;
  }
  const uint32_t resident = spread.blocks_per_multiprocessor * multiprocessors;
  return launch(spread, items < resident ? items : resident, overlap, arguments, stream);
}

int MoeCudaExperts::launch_inner(StepArgs& args, uint32_t wide, bool overlap, cudaStream_t stream) const {
  const uint32_t items = args.selection.picks * (shape.inter / kBlock);
  uint32_t first = 0, launched = projections;
  void* arguments[] = {&args, &first, &launched};
  if (projections == 1 || shape.k_gate == shape.k_up) return launch_looping(up[wide], items * projections, overlap, arguments, stream);
  launched = 1;
  if (launch_looping(gate[wide], items, overlap, arguments, stream) != 0) return -1;
  first = 1;
  return launch_looping(up[wide], items, overlap, arguments, stream);
}

int MoeCudaExperts::run(const MoeCudaStep& step, cudaStream_t stream) const {
  if (check_step(step) != 0) return -1;
  const DeviceGuard guard(device);
  if (check_cuda(guard.code(), "device") != 0) return -1;
  StepArgs args = {};
  args.selection = {step.records, step.selected, step.num_experts, step.rows * step.top_k, step.top_k, step.selected_type};
  args.shape = shape;
  args.x = step.x;
  args.weights = step.weights;
  args.shared = step.shared;
  args.y = step.y != nullptr ? step.y : work.y;
  args.out = step.out;
  args.work = work;
  args.rows = step.rows;
  args.run_rows = step.rows > 4 ? 8 : 4;
  args.projections = projections;
  args.x_dtype = step.x_dtype;
  args.weights_dtype = step.weights_dtype;
  args.inner_bands = Divisor(shape.inter / kBlock);
  args.outer_bands = Divisor(shape.hidden / kBlock);
  for (uint32_t i = 0; i < 17; ++i) args.powers.v[i] = 1u << i;

  const bool overlap = properties.major >= 9 && (step.flags & MOE_CUDA_SERIAL) == 0;
  const uint32_t wide = args.run_rows > 4 ? 1 : 0;
  const uint32_t warps = (args.selection.picks * projections + (step.out != nullptr ? step.rows : 0u)) * (shape.hidden / kBlock);
  void* arguments[] = {&args};
  const bool after_kernel = overlap && (step.flags & MOE_CUDA_AFTER_KERNEL) != 0;
  const uint32_t inner_items = args.selection.picks * (shape.inter / kBlock), outer_items = args.selection.picks * (shape.hidden / kBlock);
  const uint32_t most = static_cast<uint32_t>(properties.multiProcessorCount);
  if ((step.flags & MOE_CUDA_ALL_HERE) != 0 && step.rows == 1 && one_row.function != nullptr && inner_items <= most) {
    const uint32_t halves = (outer_items + kHalves - 1u) / kHalves;
    const uint32_t blocks = inner_items > halves ? inner_items : halves < most ? halves : most;
    return launch(one_row, blocks, after_kernel, arguments, stream, kOneRowThreads);
  }
  Looping prepare;
  prepare.function = reinterpret_cast<const void*>(prepare_rows);
  if (launch(prepare, blocks_for_warps(warps) + 1, after_kernel, arguments, stream) != 0) return -1;
  if (launch_inner(args, wide, overlap, stream) != 0) return -1;
  return launch_looping(down[wide], outer_items, overlap, arguments, stream);
}

extern "C" int moe_cuda_shape_check(const MoeExpertShape* shape) {
  if (shape == nullptr) return fail("shape must not be NULL");
  if (check_shape(*shape) != 0) return -1;
  if (shape->layout != MOE_LAYOUT_NATIVE) return fail("layout planar is for the CPU: the GPU kernel reads native tiles");
  if (shape->codebook != MOE_CODEBOOK_MUL1) return fail("codebook %u: the GPU kernel has MUL1 (2) alone", shape->codebook);
  if (!is_gateless(*shape) && check_bits("k_gate", shape->k_gate) != 0) return -1;
  return check_bits("k_up", shape->k_up) == 0 ? check_bits("k_down", shape->k_down) : -1;
}

extern "C" MoeCudaExperts* moe_cuda_create(const MoeExpertShape* shape, uint32_t max_picks, int32_t device) {
  if (shape == nullptr) {
    fail("shape must not be NULL");
    return nullptr;
  }
  std::unique_ptr<MoeCudaExperts> experts(new (std::nothrow) MoeCudaExperts());
  if (experts == nullptr) {
    fail("memory is short");
    return nullptr;
  }
  return experts->open(*shape, max_picks, device) == 0 ? experts.release() : nullptr;
}

extern "C" void moe_cuda_destroy(MoeCudaExperts* experts) { delete experts; }

extern "C" int moe_cuda_run(MoeCudaExperts* experts, const MoeCudaStep* step, void* stream) {
  if (experts == nullptr || step == nullptr) return fail("experts and step must not be NULL");
  return experts->run(*step, static_cast<cudaStream_t>(stream));
}

extern "C" int moe_cuda_combine(const MoeCudaCombine* combine, void* stream) {
  if (combine == nullptr) return fail("combine must not be NULL");
  const MoeCudaCombine& c = *combine;
  if (check_selection(c.records, c.selected, c.num_experts, c.rows, c.top_k, c.selected_type) != 0) return -1;
  if (check_pointer("weights", c.weights, true) != 0 || check_pointer("y", c.y, true) != 0 || check_pointer("out", c.out, true) != 0 ||
      check_pointer("other_y", c.other_y, false) != 0 || check_pointer("shared", c.shared, false) != 0) {
    return -1;
  }
  if (c.other_y != nullptr && c.other_from != nullptr) return fail("other_y and other_from are both given");
  if (reinterpret_cast<uintptr_t>(c.other_from) % 8u != 0) return fail("other_from is not 8-byte aligned");
  if (c.hidden == 0 || c.hidden % kBlock != 0) return fail("hidden = %u is not a positive multiple of 128", c.hidden);
  if (check_choice("weights_dtype", c.weights_dtype, MOE_DTYPE_F16) != 0) return -1;
  const Selection selection = {c.records, c.selected, c.num_experts, c.rows * c.top_k, c.top_k, c.selected_type};
  const CombineArgs args = {selection, c.weights, c.y, c.other_y, c.other_from, c.shared, c.out, c.hidden, c.rows, c.weights_dtype};
  const uint32_t threads = c.rows * (c.hidden / 4u);
  combine_picks<<<(threads + kThreads - 1) / kThreads, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return check_cuda(cudaPeekAtLastError(), "launch of the combining kernel");
}

extern "C" int moe_cuda_publish(const MoeCudaPublish* publish, void* stream) {
  if (publish == nullptr) return fail("publish must not be NULL");
  const MoeCudaPublish& p = *publish;
  if (check_pointer("selected", p.selected, true) != 0 || check_pointer("selected_to", p.selected_to, true) != 0 ||
      check_pointer("x", p.x, p.x_to != nullptr) != 0 || check_pointer("x_to", p.x_to, p.x != nullptr) != 0) {
    return -1;
  }
  if (p.arrivals == nullptr || p.word == nullptr) return fail("arrivals and word must not be NULL");
  if (p.rows < 1 || p.rows > MOE_CUDA_MAX_ROWS) return fail("rows = %u is not in 1..%u", p.rows, MOE_CUDA_MAX_ROWS);
  if (p.top_k < 1 || p.top_k > MOE_CUDA_MAX_TOP_K) return fail("top_k = %u is not in 1..%u", p.top_k, MOE_CUDA_MAX_TOP_K);
  if (p.hidden == 0 || p.hidden % kBlock != 0) return fail("hidden = %u is not a positive multiple of 128", p.hidden);
  publish_step<<<p.rows, kPublishThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return check_cuda(cudaPeekAtLastError(), "launch of the publishing kernel");
}

extern "C" const char* moe_cuda_describe(const MoeCudaExperts* experts) { return experts == nullptr ? "" : experts->description.c_str(); }
extern "C" const char* moe_cuda_last_error(void) { return moe_last_error(); }
extern "C" uint32_t moe_cuda_arithmetic_version(void) { return MOE_ARITHMETIC_VERSION; }
extern "C" const char* moe_cuda_architectures(void) { return GLM53_CUDA_ARCHITECTURES; }

namespace {

struct Field {
  const char* name;
  size_t offset, size;
};
#define FIELD(type, name) \
  Field { #type "." #name, offsetof(type, name), sizeof(type::name) }

constexpr Field kLayout[] = {
    FIELD(MoeCudaStep, records),
    FIELD(MoeCudaStep, x),
    FIELD(MoeCudaStep, selected),
    FIELD(MoeCudaStep, weights),
    FIELD(MoeCudaStep, y),
    FIELD(MoeCudaStep, out),
    FIELD(MoeCudaStep, shared),
    FIELD(MoeCudaStep, num_experts),
    FIELD(MoeCudaStep, rows),
    FIELD(MoeCudaStep, top_k),
    FIELD(MoeCudaStep, x_dtype),
    FIELD(MoeCudaStep, selected_type),
    FIELD(MoeCudaStep, weights_dtype),
    FIELD(MoeCudaStep, flags),
    Field{"MoeCudaStep.", 0, sizeof(MoeCudaStep)},
    FIELD(MoeCudaCombine, records),
    FIELD(MoeCudaCombine, selected),
    FIELD(MoeCudaCombine, weights),
    FIELD(MoeCudaCombine, y),
    FIELD(MoeCudaCombine, other_y),
    FIELD(MoeCudaCombine, other_from),
    FIELD(MoeCudaCombine, shared),
    FIELD(MoeCudaCombine, out),
    FIELD(MoeCudaCombine, hidden),
    FIELD(MoeCudaCombine, num_experts),
    FIELD(MoeCudaCombine, rows),
    FIELD(MoeCudaCombine, top_k),
    FIELD(MoeCudaCombine, selected_type),
    FIELD(MoeCudaCombine, weights_dtype),
    Field{"MoeCudaCombine.", 0, sizeof(MoeCudaCombine)},
    FIELD(MoeCudaPublish, selected),
    FIELD(MoeCudaPublish, x),
    FIELD(MoeCudaPublish, selected_to),
    FIELD(MoeCudaPublish, x_to),
    FIELD(MoeCudaPublish, arrivals),
    FIELD(MoeCudaPublish, word),
    FIELD(MoeCudaPublish, value),
    FIELD(MoeCudaPublish, hidden),
    FIELD(MoeCudaPublish, rows),
    FIELD(MoeCudaPublish, top_k),
    Field{"MoeCudaPublish.", 0, sizeof(MoeCudaPublish)},
    FIELD(MoeCudaCopy, to),
    FIELD(MoeCudaCopy, source),
    Field{"MoeCudaCopy.", 0, sizeof(MoeCudaCopy)},
};
#undef FIELD

std::string describe_layout() {
  std::string text;
  for (const Field& field : kLayout) {
    text += std::string(field.name) + "=" + std::to_string(field.offset) + ":" + std::to_string(field.size) + "\n";
  }
  return text;
}

}  // namespace

extern "C" const char* moe_cuda_struct_layout(void) {
  static const std::string layout = describe_layout();
  return layout.c_str();
}
