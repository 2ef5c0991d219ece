// Check: ends the test with the place and the condition where the condition is false, in every
// build type.
#ifndef TORCH_HYBRID_BACKEND_TESTS_CHECK_H_
#define TORCH_HYBRID_BACKEND_TESTS_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <source_location>

inline void Check(bool holds, const char* what,
                  std::source_location where = std::source_location::current()) {
  if (holds) return;
  std::fprintf(stderr, "%s:%u: not so: %s\n", where.file_name(), where.line(), what);
  std::exit(1);
}

#endif  // TORCH_HYBRID_BACKEND_TESTS_CHECK_H_
