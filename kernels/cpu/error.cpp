#include "cpu/error.h"

#include <stdarg.h>
#include <stdio.h>

#include "moe_expert.h"

namespace {
thread_local char last_error[256] = "";
}

int glm53::fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return -1;
}

extern "C" const char* moe_last_error(void) { return last_error; }
