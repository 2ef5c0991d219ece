// SharedValue: a value that threads read while another one replaces it as a whole.
//
// It is std::atomic<std::shared_ptr<const T>>, which libc++ does not have.
#ifndef TORCH_HYBRID_BACKEND_SHARED_VALUE_H_
#define TORCH_HYBRID_BACKEND_SHARED_VALUE_H_

#include <memory>
#include <mutex>
#include <utility>

namespace torch_hybrid_backend {

template <typename T>
class SharedValue {
 public:
  SharedValue() = default;
  explicit SharedValue(std::shared_ptr<const T> value) : value_(std::move(value)) {}

  std::shared_ptr<const T> Get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return value_;
  }

  void Set(std::shared_ptr<const T> value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    value_.swap(value);  // the old value is destroyed after the lock is released
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const T> value_;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_SHARED_VALUE_H_
