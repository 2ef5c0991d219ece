// Runs an image model from several threads, in C++: each image is one colour.
//
//   c++ -std=c++17 run.cpp -lhybrid_runner -pthread -o run && ./run model.hybrid 4
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <hybrid_runner.hpp>
#include <thread>
#include <vector>

int main(int argc, char** argv) try {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s model.hybrid THREADS\n", argv[0]);
    return 1;
  }
  hybrid::Model model(argv[1]);
  const HybridEntry entry = model.Describe();
  const HybridTensor& image = entry.inputs[0];
  const std::vector<int64_t> sizes(image.sizes, image.sizes + image.ndim);
  size_t elements = 1;
  for (const int64_t size : sizes) elements *= static_cast<size_t>(size);

  const int count = std::atoi(argv[2]);
  std::vector<float> first(static_cast<size_t>(count));  // element of each output
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      const std::vector<float> pixels(elements, 0.1F * static_cast<float>(i));
      const auto outputs = model.Run({hybrid::Input(pixels.data(), sizes)});
      first[static_cast<size_t>(i)] = outputs.at(0).data<float>()[0];
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const float value : first) std::printf("%g\n", value);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
