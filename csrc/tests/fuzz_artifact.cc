// Reads .hybrid files of any bytes: each is read or refused with a std::runtime_error, and the
// sanitisers have nothing to say. `make fuzz` runs it, by libFuzzer where there is clang.
//
// An input begins with a letter. F: a whole file follows. M: the texts of a manifest and of its
// plan, behind a line with the size of the file and on both sides of a zero byte; no checksum then
// keeps a change from being read.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "artifact.h"
#include "size_table.h"

using namespace torch_hybrid_backend;

namespace {

void OpenWhole(std::string_view bytes) {
  static const int file = memfd_create("fuzz", MFD_CLOEXEC);
  if (ftruncate(file, 0) != 0 || pwrite(file, bytes.data(), bytes.size(), 0) < 0) std::abort();
  const auto artifact = Artifact::Open("/proc/self/fd/" + std::to_string(file), /*share=*/false);
  artifact->Read(/*threads=*/2);
  for (size_t i = 0; i < artifact->manifest().constants.size(); ++i) artifact->ConstantAddress(i);
}

// As a plan of many sizes is checked, at one value of each symbol.
void CheckAt(const Manifest& manifest, const Entry& entry, const Json& plan,
             int64_t SizeSymbol::* value) {
  const std::vector<std::string> names = NamesIn(plan["symbols"]);
  std::vector<int64_t> all;
  std::vector<int64_t> own;
  for (const SizeSymbol& symbol : entry.symbols) all.push_back(symbol.*value);
  for (const std::string& name : names) {
    for (const SizeSymbol& symbol : entry.symbols) {
      if (symbol.name == name) own.push_back(symbol.*value);
    }
  }
  const SizeTable table(names, plan["sizes"]);
  SizedText text(plan, table.size());
  text.Fill(table.At(own));
  CheckEntry(manifest, EntryAt(manifest, entry, all), OutlineOf(text.json()));
}

void ReadTexts(std::string_view bytes) {
  const size_t line = bytes.find('\n');
  const size_t zero = bytes.find('\0');
  if (line >= zero || zero == bytes.npos) throw std::runtime_error("not in three parts");
  const uint64_t size = std::strtoull(std::string(bytes.substr(0, line)).c_str(), nullptr, 10);
  const Json plan = Json::ParseUntrusted(bytes.substr(zero + 1));
  const ManifestText text(bytes.substr(line + 1, zero - line - 1), size);
  for (size_t variant = 0; variant < text.variants(); ++variant) {
    const Manifest manifest = ReadManifest(text, variant);
    for (const Entry& entry : manifest.entries) {
      if (entry.any_sizes) {
        for (const auto value : {&SizeSymbol::example, &SizeSymbol::least, &SizeSymbol::most})
          CheckAt(manifest, entry, plan, value);
      } else {
        CheckEntry(manifest, entry, OutlineOf(plan));
      }
    }
    manifest.UsedSegments();
  }
  ChooseVariant(text, ThisProcessor());
}

// True if the input was read, not refused.
bool Reads(std::string_view input) {
  try {
    if (input.starts_with('F')) OpenWhole(input.substr(1));
    if (input.starts_with('M')) ReadTexts(input.substr(1));
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reads({reinterpret_cast<const char*>(data), size});
  return 0;
}

#ifndef LIBFUZZER

// fuzz_artifact FOLDER SECONDS: the inputs of the folder, which must be read, then changed ones. An
// input that ends the process is left in the file fuzz_artifact.last.
namespace {

using Random = std::mt19937_64;

std::string Changed(std::string text, Random& random) {
  static const std::vector<std::string> pieces = {"-1",
                                                  "9223372036854775807",
                                                  "288230376151711744",
                                                  "1e308",
                                                  "NaN",
                                                  "null",
                                                  "\"constant\"",
                                                  "[]",
                                                  "[[[[[[[[",
                                                  "{\"value\":0}",
                                                  "0",
                                                  ",",
                                                  "]",
                                                  "\"library\"",
                                                  "\xc0"};
  const auto below = [&](size_t limit) { return limit == 0 ? 0 : random() % limit; };
  for (size_t changes = 1 + below(4); changes > 0; --changes) {
    const size_t at = 1 + below(text.size() - 1);
    switch (below(5)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(random());
        break;
      case 1:
        text.erase(at, below(8));
        break;
      case 2:
        text.insert(at, pieces[below(pieces.size())]);
        break;
      case 3:  // a number of it by another
        if (const size_t digit = text.find_first_of("0123456789", at); digit != text.npos) {
          const size_t end = text.find_first_not_of("0123456789", digit);
          text.replace(digit, end == text.npos ? end : end - digit, pieces[below(7)]);
        }
        break;
      default:  // a part of it again
        text.insert(at, text.substr(1 + below(text.size() - 1), below(64)));
    }
  }
  return text;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  std::vector<std::string> seeds;
  for (const auto& entry : std::filesystem::directory_iterator(arguments[1])) {
    std::ifstream file(entry.path(), std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (!Reads(seeds.back())) {
      std::fprintf(stderr, "%s is refused\n", entry.path().c_str());
      return 1;
    }
  }
  Random random(std::random_device{}());
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(arguments[2]));
  size_t runs = 0, read = 0;
  for (; std::chrono::steady_clock::now() < end; ++runs) {
    const std::string text = Changed(seeds[random() % seeds.size()], random);
    static const int last = open("fuzz_artifact.last", O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (ftruncate(last, 0) != 0 || pwrite(last, text.data(), text.size(), 0) < 0) return 2;
    read += Reads(text) ? 1 : 0;
  }
  std::printf("%zu changed inputs, of which %zu were read\n", runs, read);
  std::filesystem::remove("fuzz_artifact.last");
}

#endif
