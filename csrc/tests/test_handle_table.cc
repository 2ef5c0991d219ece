#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "handle_table.h"

using torch_hybrid_backend::HandleTable;

int main() {
  HandleTable<const std::string> table("word");
  const int64_t one = table.Add(std::make_shared<const std::string>("one"));
  const int64_t two = table.Add(std::make_shared<const std::string>("two"));
  Check(one != two, "handles differ");
  Check(*table.Get(two) == "two", "a handle gives its object");

  const std::shared_ptr<const std::string> in_use = table.Get(one);
  table.Remove(one);
  Check(*in_use == "one", "an object in use outlives its handle");
  table.Remove(one);  // a second time is harmless

  std::string message;
  try {
    table.Get(one);
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  Check(message.find("no word has the handle") == 0, "a freed handle is an error with its noun");
  Check(table.Add(std::make_shared<const std::string>("three")) > two, "numbers are never reused");

  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&table, &wrong, t] {
      const std::string word(20, static_cast<char>('a' + t));
      for (int i = 0; i < 1000; ++i) {
        const int64_t handle = table.Add(std::make_shared<const std::string>(word));
        if (*table.Get(handle) != word) ++wrong;
        table.Remove(handle);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Check(wrong == 0, "threads see their own objects");
}
