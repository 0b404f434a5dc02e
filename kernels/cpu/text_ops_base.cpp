// The dense operations with the compiler's baseline instruction set.
#define TEXT_NS text_base
#include "cpu/text_ops_impl.h"
