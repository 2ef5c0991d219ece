// The operators of the namespace torch_hybrid_backend: nothing here but translation between numbers
// and objects.
//
// Python loads this library with torch.ops.load_library and uses it through runtime/native/ops.py.
// The operators run_segment, which callbacks go through, and warn are defined there.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "arena.h"
#include "artifact.h"
#include "artifact_plan.h"
#include "binding.h"
#include "cuda_driver.h"
#include "guard.h"
#include "handle_tables.h"
#include "huffman.h"
#include "kernel_library.h"
#include "plan.h"

namespace torch_hybrid_backend {
namespace {

using Numbers = std::vector<int64_t>;

// Texts come and go as an address and a size: LibTorch's C interface never frees the strings of a
// call (torch 2.13).
std::string TextAt(int64_t address, int64_t size) {
  return std::string(reinterpret_cast<const char*>(address), static_cast<size_t>(size));
}

int64_t PlanNew(int64_t description, int64_t size) {
  return Plans().Add(std::make_shared<Plan>(TextAt(description, size)));
}

int64_t PlanTemplateNew(int64_t description, int64_t size) {
  return PlanTemplates().Add(
      std::make_shared<PlanTemplate>(Json::Parse(TextAt(description, size))));
}

std::tuple<int64_t, int64_t> PlanTemplateAt(int64_t plan_template, Numbers values) {
  std::shared_ptr<Plan> plan = PlanTemplates().Get(plan_template)->At(values);
  const int64_t arena_bytes = plan->ArenaBytes();
  return {Plans().Add(std::move(plan)), arena_bytes};
}

int64_t SizeTableNew(int64_t description, int64_t size) {
  const Json json = Json::Parse(TextAt(description, size));
  return SizeTables().Add(
      std::make_shared<const SizeTable>(NamesIn(json["symbols"]), json["sizes"]));
}

Numbers SizeTableAt(int64_t table, Numbers values) { return SizeTables().Get(table)->At(values); }

// The offsets, and last the size of the arena. `ranges`: of each buffer the bytes, the first and
// the last step.
Numbers PlanArenaOf(Numbers ranges, int64_t alignment) {
  std::vector<LiveRange> buffers;
  for (size_t i = 0; i + 2 < ranges.size(); i += 3)
    buffers.push_back({ranges[i], ranges[i + 1], ranges[i + 2]});
  ArenaLayout layout = PlanArena(buffers, alignment, kPairsAhead);
  layout.offsets.push_back(layout.size_bytes);
  return std::move(layout.offsets);
}

void OpenKernelLibrary(int64_t path, int64_t size) { OpenLibrary(TextAt(path, size)); }

void UseCudaDriver(int64_t path, int64_t size) { UseDriver(TextAt(path, size)); }

void OpenDeviceModule(int64_t path, int64_t size) { OpenModule(TextAt(path, size)); }

std::tuple<std::vector<Tensor>, int64_t> PlanRun(int64_t plan, int64_t binding,
                                                 std::vector<Tensor> inputs, bool profiled) {
  const std::shared_ptr<Plan> running = Plans().Get(plan);
  const std::shared_ptr<const Binding> bound = Bindings().Get(binding);
  RunResult result =
      profiled ? running->RunProfiled(plan, *bound, inputs) : running->Run(plan, *bound, inputs);
  return {std::move(result.outputs), static_cast<int64_t>(result.status)};
}

std::tuple<std::vector<Tensor>, int64_t, Numbers> PlanTime(int64_t plan, int64_t binding,
                                                           std::vector<Tensor> inputs,
                                                           bool in_teams) {
  TimedResult timed = Plans().Get(plan)->Time(plan, *Bindings().Get(binding), inputs, in_teams);
  return {std::move(timed.result.outputs), static_cast<int64_t>(timed.result.status),
          std::move(timed.nanoseconds)};
}

int64_t GuardNew(std::vector<Tensor> tensors, int64_t kind) {
  if (kind < 0 || kind > static_cast<int64_t>(GuardKind::kLiveUnwatched)) {
    throw std::runtime_error("no kind of guard has the number " + std::to_string(kind));
  }
  return Guards().Add(std::make_shared<const Guard>(tensors, static_cast<GuardKind>(kind)));
}

bool GuardIsStale(int64_t guard) { return Guards().Get(guard)->IsStale(); }

bool WatchesWrites() { return WriteWatch::IsSupported(); }

bool GuardIsLate(int64_t guard) { return Guards().Get(guard)->IsLate(); }

int64_t BindingNew(int64_t plan, int64_t guard, Numbers owned_slots, std::vector<Tensor> owned,
                   Numbers borrowed_slots, Numbers borrowed) {
  return Bindings().Add(
      std::make_shared<const Binding>(Guards().Get(guard), Plans().Get(plan)->constants(),
                                      owned_slots, std::move(owned), borrowed_slots, borrowed));
}

int64_t ArtifactOpen(int64_t path, int64_t size, bool share) {
  return Artifacts().Add(Artifact::Open(TextAt(path, size), share));
}

void ArtifactRead(int64_t artifact, int64_t threads, bool runs) {
  Artifacts().Get(artifact)->Read(static_cast<unsigned>(std::clamp<int64_t>(threads, 1, 1024)),
                                  runs);
}

Numbers Range(const void* begin, size_t size_bytes) {
  return {reinterpret_cast<int64_t>(begin), static_cast<int64_t>(size_bytes)};
}

Numbers ArtifactManifest(int64_t artifact) {
  const auto file = Artifacts().Get(artifact);
  return Range(file->manifest_text().data(), file->manifest_text().size());
}

Numbers ArtifactSignatures(int64_t artifact) {
  const auto file = Artifacts().Get(artifact);
  return Range(file->signatures().data(), file->signatures().size() * sizeof(Signature));
}

int64_t ArtifactVariant(int64_t artifact) {
  return static_cast<int64_t>(Artifacts().Get(artifact)->variant());
}

Numbers ArtifactSegment(int64_t artifact, int64_t name, int64_t size) {
  const auto file = Artifacts().Get(artifact);
  const std::span<uint8_t> bytes =
      file->SegmentBytes(file->manifest().SegmentNamed(TextAt(name, size)));
  return Range(bytes.data(), bytes.size());
}

int64_t ArtifactConstant(int64_t artifact, int64_t number) {
  const auto file = Artifacts().Get(artifact);
  if (number < 0 || number >= static_cast<int64_t>(file->manifest().constants.size())) {
    throw std::runtime_error(file->path() + ": there is no constant " + std::to_string(number));
  }
  return reinterpret_cast<int64_t>(file->ConstantAddress(number));
}

int64_t ArtifactPlan(int64_t artifact, int64_t segment, int64_t size) {
  auto file = Artifacts().Get(artifact);
  const size_t number = file->manifest().SegmentNamed(TextAt(segment, size));
  return Plans().Add(PlanOf(std::move(file), number));
}

int64_t SizedPlansNew(int64_t artifact, int64_t entry) {
  return SizedPlansOfFiles().Add(
      std::make_shared<const SizedPlans>(Artifacts().Get(artifact), static_cast<size_t>(entry)));
}

int64_t SizedPlansAt(int64_t plans, Numbers values) {
  return Plans().Add(SizedPlansOfFiles().Get(plans)->At(values).second);
}

// The functions that Python's finalizers call, by address: the garbage collector runs finalizers
// wherever it likes, also while the thread traces, and an operator would then become a node of
// somebody else's graph.
Numbers Finalizers() {
  void (*const free_plan)(int64_t) = [](int64_t plan) noexcept { Plans().Remove(plan); };
  void (*const free_guard)(int64_t) = [](int64_t guard) noexcept { Guards().Remove(guard); };
  void (*const free_binding)(int64_t) = [](int64_t binding) noexcept {
    Bindings().Remove(binding);
  };
  void (*const free_artifact)(int64_t) = [](int64_t artifact) noexcept {
    Artifacts().Remove(artifact);
  };
  void (*const free_template)(int64_t) = [](int64_t plan_template) noexcept {
    PlanTemplates().Remove(plan_template);
  };
  void (*const free_sized)(int64_t) = [](int64_t plans) noexcept {
    SizedPlansOfFiles().Remove(plans);
  };
  void (*const free_sizes)(int64_t) = [](int64_t table) noexcept { SizeTables().Remove(table); };
  void (*const close_library)(const char*) = [](const char* path) noexcept { CloseLibrary(path); };
  void (*const close_module)(const char*) = [](const char* path) noexcept { CloseModule(path); };
  return {reinterpret_cast<int64_t>(free_plan),     reinterpret_cast<int64_t>(free_guard),
          reinterpret_cast<int64_t>(free_binding),  reinterpret_cast<int64_t>(free_artifact),
          reinterpret_cast<int64_t>(free_template), reinterpret_cast<int64_t>(free_sizes),
          reinterpret_cast<int64_t>(free_sized),    reinterpret_cast<int64_t>(close_library),
          reinterpret_cast<int64_t>(close_module)};
}

void GiveBackFreedMemory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

std::span<uint8_t> BytesOf(const Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.scalar_type() != torch::headeronly::ScalarType::Byte ||
      !tensor.is_contiguous()) {
    throw std::runtime_error("bytes must be a contiguous tensor of uint8 on the CPU");
  }
  return {static_cast<uint8_t*>(tensor.data_ptr()), static_cast<size_t>(tensor.numel())};
}

WordLengths WordLengthsOf(const Tensor& tensor) {
  const std::span<uint8_t> bytes = BytesOf(tensor);
  if (bytes.size() != WordLengths::extent) {
    throw std::runtime_error("each of the 256 symbols must have a length");
  }
  return WordLengths(bytes);
}

void Encode(Tensor symbols, Tensor lengths, Tensor coded) {
  HuffmanEncode(BytesOf(symbols), WordLengthsOf(lengths), BytesOf(coded));
}

void Decode(Tensor coded, Tensor lengths, Tensor symbols) {
  HuffmanDecode(BytesOf(coded), WordLengthsOf(lengths), BytesOf(symbols));
}

using BoxedFunction = void (*)(StableIValue*, uint64_t, uint64_t);

// The message of what the function threw, kept until the next on this thread; nullptr if nothing.
[[gnu::noinline]] const char* MessageThrownBy(BoxedFunction function, StableIValue* stack,
                                              uint64_t arguments, uint64_t results) {
  static thread_local std::string message;
  try {
    function(stack, arguments, results);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

// TORCH_BOX, but exceptions are raised by libtorch itself: ours may be of another C++ runtime
// library, which it could not catch. Nothing in this frame may need destruction, and no exception
// be caught here: unwinding it must not call the C++ runtime library of this one.
template <auto function>
void Boxed(StableIValue* stack, uint64_t arguments, uint64_t results) {
  if (const char* message = MessageThrownBy(TORCH_BOX(function), stack, arguments, results)) {
    aoti_torch_check(false, __func__, __FILE__, __LINE__, message);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY(torch_hybrid_backend, m) {
  m.def("plan_new(int description, int size) -> int");
  m.def("plan_template_new(int description, int size) -> int");
  m.def("plan_template_at(int plan_template, int[] values) -> (int plan, int arena_bytes)");
  m.def("size_table_new(int description, int size) -> int");
  m.def("size_table_at(int table, int[] values) -> int[]");
  m.def("plan_arena(int[] ranges, int alignment) -> int[]");
  m.def("open_library(int path, int size) -> ()");
  m.def("open_module(int path, int size) -> ()");
  m.def("use_cuda_driver(int path, int size) -> ()");
  m.def(
      "plan_run(int plan, int binding, Tensor[] inputs, bool profiled) -> (Tensor[] outputs, int "
      "status)");
  m.def(
      "plan_time(int plan, int binding, Tensor[] inputs, bool in_teams) -> (Tensor[] outputs, int "
      "status, int[] nanoseconds)");
  m.def("guard_new(Tensor[] tensors, int kind) -> int");
  m.def("guard_is_stale(int guard) -> bool");
  m.def("guard_is_late(int guard) -> bool");
  m.def("watches_writes() -> bool");
  m.def(
      "binding_new(int plan, int guard, int[] owned_slots, Tensor[] owned, "
      "int[] borrowed_slots, int[] borrowed) -> int");
  m.def("artifact_open(int path, int size, bool share) -> int");
  m.def("artifact_read(int artifact, int threads, bool runs) -> ()");
  m.def("artifact_manifest(int artifact) -> int[]");
  m.def("artifact_signatures(int artifact) -> int[]");
  m.def("artifact_variant(int artifact) -> int");
  m.def("artifact_segment(int artifact, int name, int size) -> int[]");
  m.def("artifact_constant(int artifact, int number) -> int");
  m.def("artifact_plan(int artifact, int segment, int size) -> int");
  m.def("sized_plans_new(int artifact, int entry) -> int");
  m.def("sized_plans_at(int plans, int[] values) -> int");
  m.def("finalizers() -> int[]");
  m.def("give_back_freed_memory() -> ()");
  m.def("huffman_encode(Tensor symbols, Tensor lengths, Tensor(a!) coded) -> ()");
  m.def("huffman_decode(Tensor coded, Tensor lengths, Tensor(a!) symbols) -> ()");
}

// One kernel for every backend and for calls without any tensor.
STABLE_TORCH_LIBRARY_IMPL(torch_hybrid_backend, CompositeExplicitAutograd, m) {
  m.impl("plan_new", Boxed<&PlanNew>);
  m.impl("plan_template_new", Boxed<&PlanTemplateNew>);
  m.impl("plan_template_at", Boxed<&PlanTemplateAt>);
  m.impl("size_table_new", Boxed<&SizeTableNew>);
  m.impl("size_table_at", Boxed<&SizeTableAt>);
  m.impl("plan_arena", Boxed<&PlanArenaOf>);
  m.impl("open_library", Boxed<&OpenKernelLibrary>);
  m.impl("open_module", Boxed<&OpenDeviceModule>);
  m.impl("use_cuda_driver", Boxed<&UseCudaDriver>);
  m.impl("plan_run", Boxed<&PlanRun>);
  m.impl("plan_time", Boxed<&PlanTime>);
  m.impl("guard_new", Boxed<&GuardNew>);
  m.impl("guard_is_stale", Boxed<&GuardIsStale>);
  m.impl("guard_is_late", Boxed<&GuardIsLate>);
  m.impl("watches_writes", Boxed<&WatchesWrites>);
  m.impl("binding_new", Boxed<&BindingNew>);
  m.impl("artifact_open", Boxed<&ArtifactOpen>);
  m.impl("artifact_read", Boxed<&ArtifactRead>);
  m.impl("artifact_manifest", Boxed<&ArtifactManifest>);
  m.impl("artifact_signatures", Boxed<&ArtifactSignatures>);
  m.impl("artifact_variant", Boxed<&ArtifactVariant>);
  m.impl("artifact_segment", Boxed<&ArtifactSegment>);
  m.impl("artifact_constant", Boxed<&ArtifactConstant>);
  m.impl("artifact_plan", Boxed<&ArtifactPlan>);
  m.impl("sized_plans_new", Boxed<&SizedPlansNew>);
  m.impl("sized_plans_at", Boxed<&SizedPlansAt>);
  m.impl("finalizers", Boxed<&Finalizers>);
  m.impl("give_back_freed_memory", Boxed<&GiveBackFreedMemory>);
  m.impl("huffman_encode", Boxed<&Encode>);
  m.impl("huffman_decode", Boxed<&Decode>);
}

}  // namespace torch_hybrid_backend
