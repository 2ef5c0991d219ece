// Signatures of files: Ed25519 over the manifest, by OpenSSL's libcrypto.so.3, which is opened when
// keys are first given (docs/hybrid_format.md).
//
// Failure: throws std::runtime_error.
#ifndef TORCH_HYBRID_BACKEND_SIGNATURES_H_
#define TORCH_HYBRID_BACKEND_SIGNATURES_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "artifact.h"

namespace torch_hybrid_backend {

using PublicKey = std::array<uint8_t, 32>;

// Throws unless one of the keys, and no key of them wrongly, signed the file's manifest.
void CheckSigned(const Artifact& artifact, std::span<const PublicKey> keys);

// The public key of Ed25519 in a file in PEM.
PublicKey ReadPublicKey(const std::string& path);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_SIGNATURES_H_
