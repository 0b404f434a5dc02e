/* Stands where PyTorch's header stands for exllamav3's CPU expert kernel. */
#include <ATen/Tensor.h>
