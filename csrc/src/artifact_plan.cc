#include "artifact_plan.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "kernel_library.h"
#include "plan_template.h"

namespace torch_hybrid_backend {
namespace {

// A plan, or a template of plans, with what it lives on. Destroyed in this order: plan, library,
// artifact.
template <typename Made>
struct Holder {
  explicit Holder(std::shared_ptr<const Artifact> of) : artifact(std::move(of)) {}
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;
  ~Holder() {
    made.reset();
    // Other plans go on: their kernels keep the library. A later plan opens it again.
    if (!library_path.empty()) CloseLibrary(library_path);
  }

  LibraryPaths Library() {
    return [this](const std::string&) {
      const std::lock_guard<std::mutex> lock(mutex);
      library_path = artifact->LibraryPath();
      return library_path;
    };
  }

  Json TextOf(size_t segment) const {
    if (artifact->manifest().segments[segment].kind != SegmentKind::kPlan) {
      throw std::runtime_error("segment " + Quoted(artifact->manifest().segments[segment].name) +
                               " is no plan");
    }
    const std::span<uint8_t> text = artifact->SegmentBytes(segment);
    return Json::ParseUntrusted({reinterpret_cast<const char*>(text.data()), text.size()});
  }

  const std::shared_ptr<const Artifact> artifact;
  std::mutex mutex;
  std::string library_path;
  std::optional<Made> made;
};

std::string Replaced(std::string text, std::string_view what, std::string_view by) {
  if (what.empty()) return text;
  for (size_t at = text.find(what); at != text.npos; at = text.find(what, at + by.size())) {
    text.replace(at, what.size(), by);
  }
  return text;
}

// What `make` makes; errors begin with the file's path, and have the library's name for its own.
template <typename Made, typename Make>
auto Making(Holder<Made>& holder, const Make& make) {
  const Artifact& file = *holder.artifact;
  try {
    return make();
  } catch (const std::exception& error) {
    const std::lock_guard<std::mutex> lock(holder.mutex);
    const std::string& path = holder.library_path;
    const std::string why = path.empty()
                                ? error.what()
                                : Replaced(error.what(), path, Quoted(file.LibrarySegment().name));
    throw std::runtime_error(why.starts_with(file.path()) ? why : file.path() + ": " + why);
  }
}

}  // namespace

std::shared_ptr<Plan> PlanOf(std::shared_ptr<const Artifact> artifact, size_t segment) {
  auto held = std::make_shared<Holder<Plan>>(std::move(artifact));
  Making(*held, [&] { held->made.emplace(held->TextOf(segment), held->Library()); });
  Plan* const plan = &*held->made;
  return {std::move(held), plan};
}

struct SizedPlans::Held : Holder<PlanTemplate> {
  using Holder::Holder;
  Entry entry;
  std::vector<size_t> symbols;  // of the entry, in the order of the plan's
};

SizedPlans::SizedPlans(std::shared_ptr<const Artifact> artifact, size_t entry)
    : held_(std::make_shared<Held>(std::move(artifact))) {
  Making(*held_, [&] {
    const std::vector<Entry>& entries = held_->artifact->manifest().entries;
    if (entry >= entries.size())
      throw std::runtime_error("there is no entry " + std::to_string(entry));
    held_->entry = entries[entry];
    if (!held_->entry.any_sizes) {
      throw std::runtime_error("entry " + Quoted(held_->entry.name) + " is for one set of sizes");
    }
    held_->made.emplace(held_->TextOf(held_->entry.plan), held_->Library());
    const std::vector<SizeSymbol>& known = held_->entry.symbols;
    for (const std::string& name : held_->made->symbols()) {
      const auto found = std::find_if(known.begin(), known.end(), [&](const SizeSymbol& symbol) {
        return symbol.name == name;
      });
      if (found == known.end())
        throw std::runtime_error("its plan depends on " + Quoted(name) + ", which is no symbol");
      held_->symbols.push_back(found - known.begin());
    }
  });
}

std::pair<Entry, std::shared_ptr<Plan>> SizedPlans::At(const std::vector<int64_t>& values) const {
  return Making(*held_, [&]() -> std::pair<Entry, std::shared_ptr<Plan>> {
    const Manifest& manifest = held_->artifact->manifest();
    Entry entry = EntryAt(manifest, held_->entry, values);
    std::vector<int64_t> own;
    for (const size_t symbol : held_->symbols) own.push_back(values[symbol]);
    std::unique_ptr<Plan> plan = held_->made->At(
        own, [&](const Json& text) { CheckEntry(manifest, entry, OutlineOf(text)); });
    // It lives on what the template does.
    std::shared_ptr<Plan> kept(plan.release(), [held = held_](Plan* made) { delete made; });
    return {std::move(entry), std::move(kept)};
  });
}

}  // namespace torch_hybrid_backend
