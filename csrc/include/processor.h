// The machine as .hybrid files name it: its operating system, its processor, and what that can do.
//
// Failure: none; a machine that does not say what it can do has no features.
#ifndef TORCH_HYBRID_BACKEND_PROCESSOR_H_
#define TORCH_HYBRID_BACKEND_PROCESSOR_H_

#include <istream>
#include <set>
#include <string>

namespace torch_hybrid_backend {

struct Processor {
  std::string system;              // "linux"
  std::string name;                // "x86_64", as `uname -m`
  std::set<std::string> features;  // by Linux's names
};

// This machine. Read once, by the first call.
const Processor& ThisProcessor();

// The features of the first x86 processor in a text of the form of /proc/cpuinfo: the words behind
// "flags". Reads no further: the text is long where processors are many.
std::set<std::string> FeaturesIn(std::istream& cpuinfo);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_PROCESSOR_H_
