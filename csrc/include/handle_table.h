// HandleTable: objects that Python refers to by number.
//
// Ownership: the table shares each object with whoever is using it, so removing one while another
// thread runs it is safe: it dies with its last user. Numbers are never reused.
//
// Failure: Get throws std::runtime_error for a number that is not there; Remove ignores one (a
// finaliser may run late).
#ifndef TORCH_HYBRID_BACKEND_HANDLE_TABLE_H_
#define TORCH_HYBRID_BACKEND_HANDLE_TABLE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

namespace torch_hybrid_backend {

template <typename T>
class HandleTable {
 public:
  explicit HandleTable(std::string noun) : noun_(std::move(noun)) {}

  int64_t Add(std::shared_ptr<T> object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t handle = ++last_;
    objects_.emplace(handle, std::move(object));
    return handle;
  }

  std::shared_ptr<T> Get(int64_t handle) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) {
      throw std::runtime_error("no " + noun_ + " has the handle " + std::to_string(handle) +
                               ": it was freed or never made");
    }
    return found->second;
  }

  void Remove(int64_t handle) {
    std::shared_ptr<T> last;  // destroyed after the lock is given back
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return;
    last = std::move(found->second);
    objects_.erase(found);
  }

 private:
  const std::string noun_;
  mutable std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<T>> objects_;
  int64_t last_ = 0;
};

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_HANDLE_TABLE_H_
