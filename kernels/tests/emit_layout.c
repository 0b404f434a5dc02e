/* Prints kernels/python/_layout.py: the ABI's structures as ctypes, for tests and tools. Run it, never edit its output:
 *
 *   build/kernels/emit_layout > kernels/python/_layout.py
 */
#include <stdio.h>
#include <string.h>

#include "expert_abi.h"

static const char* python_type(const char* type) {
  if (strcmp(type, "uint8_t") == 0) return "ctypes.c_uint8";
  if (strcmp(type, "uint32_t") == 0) return "ctypes.c_uint32";
  if (strcmp(type, "uint64_t") == 0) return "ctypes.c_uint64";
  return type; /* a structure printed earlier */
}

#define PRINT_FIELD(type, name) printf("        (\"%s\", %s),\n", #name, python_type(#type));
#define PRINT_ARRAY(type, name, count) printf("        (\"%s\", %s * %d),\n", #name, python_type(#type), (int)(count));
#define PRINT_OFFSET(type, name) \
  printf("        \"%s\": (%d, %d),\n", #name, (int)offsetof(PRINTED, name), (int)sizeof(((PRINTED*)0)->name));
#define PRINT_ARRAY_OFFSET(type, name, count) PRINT_OFFSET(type, name)

#define PRINT_STRUCT(struct_name, fields)                                                                                           \
  printf("\n\nclass %s(ctypes.Structure):\n    \"\"\"%s of expert_abi.h.\"\"\"\n\n    _fields_ = [\n", #struct_name, #struct_name); \
  fields(PRINT_FIELD, PRINT_ARRAY) printf("    ]\n");

#define PRINT_EXPECTED(struct_name, fields)                                            \
  {                                                                                    \
    typedef struct_name PRINTED;                                                       \
    printf("    %s: {\n        \"\": (0, %d),\n", #struct_name, (int)sizeof(PRINTED)); \
    fields(PRINT_OFFSET, PRINT_ARRAY_OFFSET) printf("    },\n");                       \
  }

int main(void) {
  printf("\"\"\"Generated from kernels/include/expert_abi.h by kernels/tests/emit_layout.c: do not edit.\"\"\"\n\n");
  printf("from __future__ import annotations\n\nimport ctypes\nfrom typing import Any\n\n");
  printf("ABI_VERSION = %u\n", ABI_VERSION);
  printf("LAYOUT_HASH = 0x%016llX\n", (unsigned long long)abi_layout_hash());
  ABI_STRUCTS(PRINT_STRUCT)
  printf("\n\n# (offset, size) of every field as the compiler has them; \"\" is the structure itself.\n");
  printf("EXPECTED: dict[type[Any], dict[str, tuple[int, int]]] = {\n");
  ABI_STRUCTS(PRINT_EXPECTED)
  printf("}\n");
  return 0;
}
