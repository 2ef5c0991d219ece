#include "profiler_range.h"

namespace torch_hybrid_backend {

ProfilerRange::ProfilerRange(const std::string& name) {
  if (aoti_record_function_start(name.c_str(), nullptr, nullptr, 0, &record_) != AOTI_TORCH_SUCCESS)
    record_ = nullptr;
}

ProfilerRange::~ProfilerRange() {
  if (record_ != nullptr) aoti_record_function_end(record_);
}

}  // namespace torch_hybrid_backend
