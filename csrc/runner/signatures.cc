#include "signatures.h"

#include <dlfcn.h>

#include <cstddef>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>

namespace torch_hybrid_backend {
namespace {

constexpr int kEd25519 = 1087;  // EVP_PKEY_ED25519

struct Bio;
struct Context;
struct Key;

// The functions of libcrypto that are called here, by the names that they have there.
struct Crypto {
  Key* (*EVP_PKEY_new_raw_public_key)(int type, void* engine, const uint8_t* key, size_t size);
  int (*EVP_PKEY_get_raw_public_key)(const Key* key, uint8_t* bytes, size_t* size);
  int (*EVP_PKEY_is_a)(const Key* key, const char* name);
  void (*EVP_PKEY_free)(Key* key);
  Context* (*EVP_MD_CTX_new)();
  void (*EVP_MD_CTX_free)(Context* context);
  int (*EVP_DigestVerifyInit)(Context* context, void*, const void* digest, void* engine, Key* key);
  int (*EVP_DigestVerify)(Context* context, const uint8_t* signature, size_t signature_size,
                          const uint8_t* text, size_t size);
  Bio* (*BIO_new_mem_buf)(const void* text, int size);
  int (*BIO_free)(Bio* bio);
  Key* (*PEM_read_bio_PUBKEY)(Bio* bio, Key** key, void* password, void* context);
};

const Crypto& OfSystem() {
  static const std::optional<Crypto> crypto = []() -> std::optional<Crypto> {
    void* const library = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) return std::nullopt;
    Crypto found{};
    bool has_all = true;
    const auto find = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      has_all = has_all && function != nullptr;
    };
    find("EVP_PKEY_new_raw_public_key", found.EVP_PKEY_new_raw_public_key);
    find("EVP_PKEY_get_raw_public_key", found.EVP_PKEY_get_raw_public_key);
    find("EVP_PKEY_is_a", found.EVP_PKEY_is_a);
    find("EVP_PKEY_free", found.EVP_PKEY_free);
    find("EVP_MD_CTX_new", found.EVP_MD_CTX_new);
    find("EVP_MD_CTX_free", found.EVP_MD_CTX_free);
    find("EVP_DigestVerifyInit", found.EVP_DigestVerifyInit);
    find("EVP_DigestVerify", found.EVP_DigestVerify);
    find("BIO_new_mem_buf", found.BIO_new_mem_buf);
    find("BIO_free", found.BIO_free);
    find("PEM_read_bio_PUBKEY", found.PEM_read_bio_PUBKEY);
    return has_all ? std::optional(found) : std::nullopt;
  }();
  if (!crypto) {
    throw std::runtime_error(
        "OpenSSL's library, libcrypto.so.3, is not there, and signatures are verified with it: "
        "install it (Debian and Ubuntu: libssl3, Fedora: openssl-libs), or give no keys");
  }
  return *crypto;
}

// True if the signature is the key's, of the text.
bool IsRight(const Signature& signature, const std::string& text) {
  const Crypto& crypto = OfSystem();
  const std::unique_ptr<Key, decltype(crypto.EVP_PKEY_free)> key(
      crypto.EVP_PKEY_new_raw_public_key(kEd25519, nullptr, signature.key.data(),
                                         signature.key.size()),
      crypto.EVP_PKEY_free);
  const std::unique_ptr<Context, decltype(crypto.EVP_MD_CTX_free)> context(crypto.EVP_MD_CTX_new(),
                                                                           crypto.EVP_MD_CTX_free);
  return key && context &&
         crypto.EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
         crypto.EVP_DigestVerify(context.get(), signature.signature.data(),
                                 signature.signature.size(),
                                 reinterpret_cast<const uint8_t*>(text.data()), text.size()) == 1;
}

std::string InHexadecimal(const PublicKey& key) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : key) text += {kDigits[byte >> 4], kDigits[byte & 15]};
  return text;
}

}  // namespace

void CheckSigned(const Artifact& artifact, std::span<const PublicKey> keys) {
  const std::set<PublicKey> trusted(keys.begin(), keys.end());
  bool is_signed = false;
  for (const Signature& signature : artifact.signatures()) {
    if (!trusted.contains(signature.key)) continue;
    if (!IsRight(signature, artifact.manifest_text())) {
      throw std::runtime_error("it has a wrong signature for the key " +
                               InHexadecimal(signature.key) + ": do not use the file");
    }
    is_signed = true;
  }
  if (is_signed) return;
  const size_t others = artifact.signatures().size();
  throw std::runtime_error(
      "it is signed by " + (others == 0 ? "nobody" : std::to_string(others) + " other keys") +
      ", and by none of the " + std::to_string(trusted.size()) +
      " keys that were given: use a file that one of them signed, or give the key that you trust");
}

PublicKey ReadPublicKey(const std::string& path) {
  const Crypto& crypto = OfSystem();
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": it cannot be opened");
  std::string text;
  constexpr size_t kMostBytes = 1 << 16;
  for (char c = 0; text.size() < kMostBytes && file.get(c);) text += c;
  const std::unique_ptr<Bio, decltype(crypto.BIO_free)> bio(
      crypto.BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), crypto.BIO_free);
  const std::unique_ptr<Key, decltype(crypto.EVP_PKEY_free)> key(
      bio ? crypto.PEM_read_bio_PUBKEY(bio.get(), nullptr, nullptr, nullptr) : nullptr,
      crypto.EVP_PKEY_free);
  PublicKey bytes{};
  size_t size = bytes.size();
  if (!key || crypto.EVP_PKEY_is_a(key.get(), "ED25519") != 1 ||
      crypto.EVP_PKEY_get_raw_public_key(key.get(), bytes.data(), &size) != 1) {
    throw std::runtime_error(path +
                             ": it holds no public key of Ed25519 in PEM; `openssl pkey -in "
                             "key.pem -pubout` makes one");
  }
  return bytes;
}

}  // namespace torch_hybrid_backend
