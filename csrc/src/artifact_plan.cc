#include "artifact_plan.h"

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "kernel_library.h"

namespace torch_hybrid_backend {
namespace {

// A plan with what it lives on. Destroyed in this order: plan, library, artifact.
struct HeldPlan {
  explicit HeldPlan(std::shared_ptr<const Artifact> of) : artifact(std::move(of)) {}
  HeldPlan(const HeldPlan&) = delete;
  HeldPlan& operator=(const HeldPlan&) = delete;
  ~HeldPlan() {
    plan.reset();
    // Other plans go on: their kernels keep the library. A later plan opens it again.
    if (!library_path.empty()) CloseLibrary(library_path);
  }

  const std::shared_ptr<const Artifact> artifact;
  std::string library_path;
  std::optional<Plan> plan;
};

std::string Replaced(std::string text, std::string_view what, std::string_view by) {
  if (what.empty()) return text;
  for (size_t at = text.find(what); at != text.npos; at = text.find(what, at + by.size())) {
    text.replace(at, what.size(), by);
  }
  return text;
}

}  // namespace

std::shared_ptr<Plan> PlanOf(std::shared_ptr<const Artifact> artifact, size_t segment) {
  auto held = std::make_shared<HeldPlan>(std::move(artifact));
  const Artifact& file = *held->artifact;
  try {
    if (file.manifest().segments[segment].kind != SegmentKind::kPlan) {
      throw std::runtime_error("segment " + Quoted(file.manifest().segments[segment].name) +
                               " is no plan");
    }
    const std::span<uint8_t> text = file.SegmentBytes(segment);
    held->plan.emplace(std::string_view(reinterpret_cast<const char*>(text.data()), text.size()),
                       [&](const std::string&) {
                         held->library_path = file.LibraryPath();
                         return held->library_path;
                       });
  } catch (const std::exception& error) {
    const std::string& path = held->library_path;
    const std::string why = path.empty()
                                ? error.what()
                                : Replaced(error.what(), path, Quoted(file.LibrarySegment().name));
    throw std::runtime_error(why.starts_with(file.path()) ? why : file.path() + ": " + why);
  }
  Plan* const plan = &*held->plan;
  return {std::move(held), plan};
}

}  // namespace torch_hybrid_backend
