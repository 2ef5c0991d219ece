// Check: ends the test with the place and the condition where the condition is false, in every
// build type.
#ifndef TORCH_HYBRID_BACKEND_TESTS_CHECK_H_
#define TORCH_HYBRID_BACKEND_TESTS_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <source_location>
#include <stdexcept>
#include <string>

inline void Check(bool holds, const char* what,
                  std::source_location where = std::source_location::current()) {
  if (holds) return;
  std::fprintf(stderr, "%s:%u: not so: %s\n", where.file_name(), where.line(), what);
  std::exit(1);
}

// That `run` throws an error whose text has `part`.
template <typename Action>
void CheckThrows(const Action& run, const std::string& part,
                 std::source_location where = std::source_location::current()) {
  std::string said = "nothing is thrown";
  try {
    run();
  } catch (const std::runtime_error& error) {
    said = error.what();
  }
  Check(said.find(part) != said.npos, ("\"" + said + "\" has \"" + part + "\"").c_str(), where);
}

#endif  // TORCH_HYBRID_BACKEND_TESTS_CHECK_H_
