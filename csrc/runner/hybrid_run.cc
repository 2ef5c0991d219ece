// hybrid-run: runs a .hybrid file from the command line, by hybrid_runner.h alone.
#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "hybrid_runner.h"
#include "hybrid_runner.hpp"
#include "npy.h"

namespace {

using torch_hybrid_backend::Array;
using torch_hybrid_backend::ReadNpy;
using torch_hybrid_backend::WriteNpy;

constexpr const char* kUsage =
    "usage: hybrid-run MODEL.hybrid [--entry NAME] [--input X.npy]... [--output Y.npy]...\n"
    "                  [--threads N] [--bench [SECONDS]] [--inspect] [--skip-sample] [--copy]\n"
    "                  [--key PUBLIC.pem]... [--torch FOLDER]\n"
    "\n"
    "Runs a model that torch_hybrid_backend.export wrote, without Python.\n"
    "\n"
    "  --entry NAME       run this function of the model; by default its first\n"
    "  --input X.npy      an input, in order; without any, zeros\n"
    "  --output Y.npy     write an output, in order\n"
    "  --threads N        threads of a call, at most 256 or 4 times the processors;\n"
    "                     by default OMP_NUM_THREADS, or all processors\n"
    "  --bench [SECONDS]  call it for so long (3), and print how long a call takes\n"
    "  --inspect          print its kernels, what it takes and gives, and run nothing\n"
    "  --skip-sample      do not run the file's samples first\n"
    "  --copy             read the file to memory instead of mapping it\n"
    "  --key PUBLIC.pem   refuse the file unless this key, or another one given, signed it\n"
    "  --torch FOLDER     where libtorch_cpu.so is, for a file with operators of PyTorch\n";

struct Arguments {
  std::string path;
  std::string entry;
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
  std::vector<std::string> keys;
  std::string torch_folder;
  std::optional<double> bench;
  bool inspect = false;
  HybridOptions options = HYBRID_OPTIONS_DEFAULT;
};

[[noreturn]] void Refuse(const std::string& why) {
  throw std::runtime_error(why + "; hybrid-run --help shows how it is used");
}

double ReadNumber(const std::string& text, const std::string& option) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(number >= 0 && number <= 1e6))
    Refuse(option + " takes a number, not \"" + text + "\"");
  return number;
}

int32_t ReadThreads(const std::string& text) {
  int32_t threads = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, threads);
  if (error != std::errc() || stop != end || threads < 0) {
    Refuse("--threads takes a whole number, at most 256 or 4 times the processors, not \"" + text +
           "\"");
  }
  return threads;
}

Arguments Parse(const std::vector<std::string>& words) {
  Arguments arguments;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    const auto value = [&]() -> const std::string& {
      if (i + 1 == words.size()) Refuse(word + " takes a value");
      return words[++i];
    };
    if (word == "--entry") {
      arguments.entry = value();
    } else if (word == "--input") {
      arguments.inputs.push_back(value());
    } else if (word == "--output") {
      arguments.outputs.push_back(value());
    } else if (word == "--threads") {
      arguments.options.threads = ReadThreads(value());
    } else if (word == "--bench") {
      const bool is_number = i + 1 < words.size() &&
                             words[i + 1].find_first_not_of("0123456789.") == std::string::npos;
      arguments.bench = is_number ? ReadNumber(value(), word) : 3;
    } else if (word == "--inspect") {
      arguments.inspect = true;
      arguments.options.skip_sample = 1;
    } else if (word == "--skip-sample") {
      arguments.options.skip_sample = 1;
    } else if (word == "--copy") {
      arguments.options.share = 0;
    } else if (word == "--key") {
      arguments.keys.push_back(value());
    } else if (word == "--torch") {
      arguments.torch_folder = value();
    } else if (word.starts_with("--") || !arguments.path.empty()) {
      Refuse("it has no \"" + word + "\"");
    } else {
      arguments.path = word;
    }
  }
  if (arguments.path.empty()) Refuse("name a .hybrid file");
  return arguments;
}

std::string Shown(const HybridTensor& tensor) {
  std::string text = std::string(tensor.dtype) + "(";
  for (int32_t d = 0; d < tensor.ndim; ++d)
    text += (d == 0 ? "" : ", ") + std::to_string(tensor.sizes[d]);
  return text + ")";
}

void Inspect(const hybrid::Model& model) {
  const std::string library = hybrid_library(model.get());
  if (!library.empty()) std::printf("kernels: %s\n", library.c_str());
  for (size_t i = 0; i < hybrid_entry_count(model.get()); ++i) {
    const HybridEntry entry = model.Describe(hybrid_entry_name(model.get(), i));
    std::printf("%s\n", entry.name);
    for (size_t k = 0; k < entry.input_count; ++k)
      std::printf("  takes %s: %s\n", entry.inputs[k].name, Shown(entry.inputs[k]).c_str());
    for (size_t k = 0; k < entry.output_count; ++k)
      std::printf("  gives %s: %s\n", entry.outputs[k].name, Shown(entry.outputs[k]).c_str());
  }
}

// Throws where `option` was given more often than the entry has such tensors, or less often than
// `least`.
void CheckCount(const std::string& option, size_t given, size_t least, const HybridEntry& entry,
                const char* noun, const HybridTensor* tensors, size_t count) {
  if (given >= least && given <= count) return;
  std::string names;
  for (size_t i = 0; i < count; ++i) names += (i == 0 ? ": " : ", ") + std::string(tensors[i].name);
  Refuse(option + " is given " + std::to_string(given) + " times, and \"" + entry.name + "\" has " +
         std::to_string(count) + " " + noun + (count == 1 ? "" : "s") + names);
}

std::vector<Array> ReadInputs(const Arguments& arguments, const HybridEntry& entry) {
  if (!arguments.inputs.empty()) {
    CheckCount("--input", arguments.inputs.size(), entry.input_count, entry, "input", entry.inputs,
               entry.input_count);
  }
  std::vector<Array> arrays;
  for (size_t i = 0; i < entry.input_count; ++i) {
    const HybridTensor& input = entry.inputs[i];
    if (!arguments.inputs.empty()) {
      arrays.push_back(ReadNpy(arguments.inputs[i], input.dlpack_dtype));
      continue;
    }
    Array zeros{{}, input.dlpack_dtype, {input.sizes, input.sizes + input.ndim}, {}};
    size_t bytes = (size_t{input.dlpack_dtype.bits} * input.dlpack_dtype.lanes + 7) / 8;
    for (const int64_t size : zeros.sizes) bytes *= static_cast<size_t>(size);
    zeros.bytes.resize(bytes);
    arrays.push_back(std::move(zeros));
  }
  return arrays;
}

void Bench(double seconds, hybrid::Model& model, const std::vector<hybrid::Input>& inputs,
           const std::string& entry) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> milliseconds;
  const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                   std::chrono::duration<double>(seconds));
  do {
    const Clock::time_point start = Clock::now();
    model.Run(inputs, entry);
    milliseconds.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  } while (Clock::now() < end);
  std::sort(milliseconds.begin(), milliseconds.end());
  const size_t count = milliseconds.size();
  std::printf("%zu calls: median %.3f ms, least %.3f ms, 90%% within %.3f ms\n", count,
              milliseconds[count / 2], milliseconds[0], milliseconds[count * 9 / 10]);
}

hybrid::Model Open(const Arguments& arguments) {
  HybridOptions options = arguments.options;
  std::vector<std::array<uint8_t, 32>> keys(arguments.keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    if (hybrid_read_key(arguments.keys[i].c_str(), keys[i].data()) != 0) throw hybrid::Error();
  }
  if (!keys.empty()) options.keys = reinterpret_cast<const uint8_t (*)[32]>(keys.data());
  options.key_count = keys.size();
  if (!arguments.torch_folder.empty()) options.torch_folder = arguments.torch_folder.c_str();
  return hybrid::Model(arguments.path, options);
}

void Run(const Arguments& arguments) {
  hybrid::Model model = Open(arguments);
  if (arguments.inspect) return Inspect(model);
  const HybridEntry entry = model.Describe(arguments.entry);
  CheckCount("--output", arguments.outputs.size(), 0, entry, "output", entry.outputs,
             entry.output_count);
  std::vector<Array> arrays = ReadInputs(arguments, entry);
  std::vector<hybrid::Input> inputs;
  for (Array& array : arrays)
    inputs.emplace_back(array.bytes.data(), array.dtype, array.sizes, array.strides);
  const std::vector<hybrid::Output> outputs = model.Run(inputs, arguments.entry);
  for (size_t i = 0; i < arguments.outputs.size(); ++i)
    WriteNpy(arguments.outputs[i], outputs[i].dlpack());
  if (arguments.outputs.empty() && !arguments.bench) {
    for (size_t i = 0; i < entry.output_count; ++i)
      std::printf("%s: %s\n", entry.outputs[i].name, Shown(entry.outputs[i]).c_str());
  }
  if (arguments.bench) Bench(*arguments.bench, model, inputs, arguments.entry);
}

}  // namespace

int main(int count, char** values) {
  const std::vector<std::string> words(values + 1, values + count);
  if (words.empty() || words[0] == "--help" || words[0] == "-h") {
    std::fputs(kUsage, stdout);
    return 0;
  }
  try {
    Run(Parse(words));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hybrid-run: %s\n", error.what());
    return 1;
  }
}
