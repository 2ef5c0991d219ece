#include <elf.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "check.h"
#include "elf_header.h"

using torch_hybrid_backend::CheckIsForThisProcess;

int main() {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::vector<uint8_t> own{std::istreambuf_iterator<char>(file), {}};
  CheckIsForThisProcess(own);
  const auto refuses = [&](auto change, const std::string& why) {
    std::vector<uint8_t> other = own;
    change(other);
    CheckThrows([&] { CheckIsForThisProcess(other); }, why);
  };
  constexpr size_t kMachine = offsetof(Elf64_Ehdr, e_machine);
  refuses([](auto& bytes) { bytes.resize(sizeof(Elf64_Ehdr) - 1); }, "no ELF library");
  refuses([](auto& bytes) { bytes[0] = 0; }, "no ELF library");
  refuses([](auto& bytes) { bytes[EI_CLASS] = ELFCLASS32; }, "(little-endian, 32 bits), and this");
  refuses(
      [](auto& bytes) {
        bytes[EI_DATA] = ELFDATA2MSB;
        bytes[kMachine] = 0;
        bytes[kMachine + 1] = EM_S390;
      },
      "for the processor s390 (big-endian, 64 bits), and this process is for ");
  refuses([](auto& bytes) { bytes[kMachine] = EM_RISCV; }, "for the processor RISC-V (little-");
  refuses([](auto& bytes) { bytes[kMachine] = 255; }, "for the processor number 255 (");
}
