/* The message behind a call that returned -1 or NULL. */
#ifndef GLM53_CPU_ERROR_H_
#define GLM53_CPU_ERROR_H_

namespace glm53 {

/* Stores a printf-formatted message for moe_last_error() of this thread and returns -1. */
int fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace glm53

#endif /* GLM53_CPU_ERROR_H_ */
