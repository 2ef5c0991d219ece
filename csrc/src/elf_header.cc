#include "elf_header.h"

#include <elf.h>
#include <link.h>

#include <bit>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

// What the linker calls the header of the library or program that this code is in.
extern "C" [[gnu::visibility("hidden")]] const ElfW(Ehdr) __ehdr_start;

namespace torch_hybrid_backend {
namespace {

// Files hold numbers and weights as the processor computes with them.
static_assert(std::endian::native == std::endian::little && sizeof(void*) == 8,
              ".hybrid files are for little-endian processors of 64 bits");

constexpr std::pair<uint16_t, const char*> kNames[] = {
    {EM_386, "x86"},      {EM_X86_64, "x86_64"}, {EM_ARM, "Arm"},   {EM_AARCH64, "aarch64"},
    {EM_RISCV, "RISC-V"}, {EM_PPC64, "POWER"},   {EM_S390, "s390"},
};

// The word size, the byte order and the processor are at one place in headers of all kinds.
std::string ProcessorOf(std::span<const uint8_t> header) {
  const bool is_big = header[EI_DATA] == ELFDATA2MSB;
  const uint8_t* const machine = header.data() + offsetof(ElfW(Ehdr), e_machine);
  const auto number =
      static_cast<uint16_t>(is_big ? machine[0] << 8 | machine[1] : machine[1] << 8 | machine[0]);
  std::string name = "number " + std::to_string(number);
  for (const auto& [known, its_name] : kNames) {
    if (known == number) name = its_name;
  }
  return name + " (" + (is_big ? "big" : "little") + "-endian, " +
         (header[EI_CLASS] == ELFCLASS32 ? "32" : "64") + " bits)";
}

}  // namespace

void CheckIsForThisProcess(std::span<const uint8_t> library) {
  if (library.size() < sizeof(__ehdr_start) || std::memcmp(library.data(), ELFMAG, SELFMAG) != 0) {
    throw std::runtime_error("its library is no ELF library: export the model again");
  }
  const auto* const own = reinterpret_cast<const uint8_t*>(&__ehdr_start);
  const std::string there = ProcessorOf(library), here = ProcessorOf({own, sizeof(__ehdr_start)});
  if (there != here) {
    throw std::runtime_error("its library is for the processor " + there +
                             ", and this process is for " + here +
                             ": export the model for this processor");
  }
}

}  // namespace torch_hybrid_backend
