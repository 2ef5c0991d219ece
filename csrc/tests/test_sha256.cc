#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "sha256.h"

using torch_hybrid_backend::HasSha256Instructions;
using torch_hybrid_backend::Hexadecimal;
using torch_hybrid_backend::Sha256;
using torch_hybrid_backend::Sha256Digest;
using torch_hybrid_backend::Sha256Form;
using torch_hybrid_backend::Sha256Of;

namespace {

std::span<const uint8_t> BytesOf(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

void KnownAnswers(Sha256Form form) {
  const auto digest = [&](std::string_view text) {
    return Hexadecimal(Sha256Of(BytesOf(text), form));
  };
  Check(digest("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "of no bytes");
  Check(digest("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        "FIPS 180-4's example of one block");
  Check(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
        "its example of two blocks");
  Check(digest(std::string(1000000, 'a')) ==
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
        "its example of many blocks");
}

// Every length around the ends of blocks, in one piece and in pieces of odd sizes. The answer is
// that of Python's hashlib, as a digest of all digests.
void EveryLength(Sha256Form form) {
  std::vector<uint8_t> bytes(1000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * i + i / 7);
  Sha256 digests(form);
  for (size_t size = 0; size <= bytes.size(); ++size) {
    // From memory of exactly the size: the address sanitiser sees whatever is read behind it.
    const std::vector<uint8_t> exact(bytes.begin(), bytes.begin() + size);
    const Sha256Digest digest = Sha256Of(exact, form);
    digests.Update(digest);
    Sha256 pieces(form);
    for (size_t at = 0, piece = size % 7; at < size; at += piece, piece = piece * 5 % 131 + 1) {
      piece = std::min(piece, size - at);
      pieces.Update(std::span(exact).subspan(at, piece));
    }
    Check(pieces.Finish() == digest, "pieces give the digest of the whole");
  }
  Check(Hexadecimal(digests.Finish()) ==
            "926f942745a82eb2ad050be8a0f0611eaadb2e3cbe7c7cfd6ac9943ca09638d6",
        "every length has the digest that hashlib gives it");
}

}  // namespace

int main() {
  for (const Sha256Form form : {Sha256Form::kPortable, Sha256Form::kFastest}) {
    KnownAnswers(form);
    EveryLength(form);
  }
  if (!HasSha256Instructions()) std::puts("test_sha256: without the processor's instructions");
}
