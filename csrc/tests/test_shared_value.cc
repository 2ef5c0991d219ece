#include <memory>
#include <string>
#include <thread>

#include "check.h"
#include "shared_value.h"

using torch_hybrid_backend::SharedValue;

int main() {
  SharedValue<std::string> value;
  Check(value.Get() == nullptr, "there is none at first");
  value.Set(std::make_shared<const std::string>(20, 'a'));
  const std::shared_ptr<const std::string> before = value.Get();

  std::thread writer([&] {
    for (int i = 0; i < 1000; ++i) {
      value.Set(std::make_shared<const std::string>(20, static_cast<char>('a' + i % 26)));
    }
  });
  bool whole = true;
  for (int i = 0; i < 1000; ++i) {
    const std::shared_ptr<const std::string> read = value.Get();
    whole = whole && *read == std::string(20, read->front());
  }
  writer.join();
  Check(whole, "a reader sees one value or another, whole");
  Check(*before == std::string(20, 'a'), "a value in use outlives its place");
}
