#include "model.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "artifact_plan.h"
#include "checked.h"
#include "difference.h"
#include "dlpack.h"
#include "torch_library.h"
#include "value.h"
#include "worker_threads.h"

namespace torch_hybrid_backend {
namespace {

[[noreturn]] void Refuse(const std::string& why) { throw std::runtime_error(why); }

// Slice `position` of the tensor along `dim`.
Tensor SliceOf(const Tensor& tensor, size_t dim, int64_t position) {
  Layout layout{tensor.dtype(), tensor.sizes(), tensor.strides(), Device::Host()};
  layout.sizes[dim] = 1;
  return Reinterpret(tensor, layout, position * tensor.strides()[dim]);
}

// The positions that an update by rows writes to, from 0 on.
std::vector<int64_t> PositionsIn(const Tensor& index, int64_t size) {
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < index.sizes()[0]; ++i) {
    const int64_t position = static_cast<const int64_t*>(index.data_ptr())[i * index.strides()[0]];
    if (position < -size || position >= size) {
      Refuse("position " + std::to_string(position) + " is not within a tensor of " +
             std::to_string(size) + " positions");
    }
    positions.push_back(position < 0 ? position + size : position);
  }
  return positions;
}

// A text of a file for people, without what a terminal would obey.
std::string Printable(std::string text) {
  std::replace_if(
      text.begin(), text.end(),
      [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, '?');
  return text;
}

// Why the runner cannot run an entry with parts that only Python can.
std::string WhyPython(const Entry& entry) {
  std::string why = Quoted(entry.name) +
                    " has parts that only Python can run (not_exportable); open the file by "
                    "torch_hybrid_backend.load, or change these:";
  for (const std::string& part : entry.python_parts) why += "\n  " + Printable(part);
  return why;
}

// The names of the operators of PyTorch that a plan calls, each once.
std::string OperatorsOf(const Artifact& artifact, size_t plan) {
  const std::span<uint8_t> text = artifact.SegmentBytes(plan);
  Json json = Json::ParseUntrusted({reinterpret_cast<const char*>(text.data()), text.size()});
  std::vector<std::string> names;
  json.Visit([&](const Json& part) {  // plans have plans within them
    const Json* const kind = part.IsObject() ? part.Find("kind") : nullptr;
    if (kind == nullptr || !kind->IsString() || kind->AsString() != "operator") return;
    const std::string& name = part["name"].AsString();
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  });
  std::string shown;
  for (const std::string& name : names) shown += (shown.empty() ? "" : ", ") + Printable(name);
  return shown;
}

bool IsSamePlace(const Tensor& one, const Tensor& other) {
  return one.data_ptr() == other.data_ptr() && one.strides() == other.strides();
}

// The addresses that a tensor lies between; of none, where it is empty.
std::pair<const char*, const char*> SpanOfMemory(const Tensor& tensor) {
  const auto* const start = static_cast<const char*>(tensor.data_ptr());
  return {start, start + SpanOf(tensor.sizes(), tensor.strides()) * ElementBytes(tensor.dtype())};
}

bool ShareMemory(const Tensor& one, const Tensor& other) {
  const auto [start, end] = SpanOfMemory(one);
  const auto [first, last] = SpanOfMemory(other);
  return first < end && start < last;
}

std::string Number(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

}  // namespace

// One running call. `outputs`: of its plan.
struct Model::Call {
  const Entry& entry;
  const CallTensors& inputs;
  std::vector<Tensor> outputs;
};

Model::Model(const std::string& path, const ModelOptions& options)
    : threads_(ThreadsFor(options.threads)), artifact_(Artifact::Open(path, options.share)) {
  try {
    if (options.keys) CheckSigned(*artifact_, *options.keys);
    artifact_->Read(static_cast<unsigned>(threads_));
    for (const Entry& entry : manifest().entries) {
      if (entry.functions) Refuse(WhyPython(entry));
      if (entry.needs_torch) {
        OpenTorch(manifest().torch, options.torch_folder,
                  [&] { return OperatorsOf(*artifact_, entry.plan); });
      }
      Functions functions;
      std::vector<int64_t> slots;
      std::vector<int64_t> addresses;
      for (const size_t constant : entry.slots) {
        slots.push_back(static_cast<int64_t>(slots.size()));
        addresses.push_back(reinterpret_cast<int64_t>(artifact_->ConstantAddress(constant)));
      }
      functions.binding = std::make_unique<Binding>(nullptr, static_cast<int64_t>(slots.size()),
                                                    std::vector<int64_t>{}, std::vector<Tensor>{},
                                                    slots, addresses);
      if (entry.any_sizes) {
        functions.plans = std::make_unique<SizedPlans>(artifact_, functions_.size());
      } else {
        functions.kept.emplace_back(
            std::vector<int64_t>{},
            std::make_shared<const Function>(
                Function{entry, PlanOf(artifact_, entry.plan), functions.binding.get()}));
      }
      functions_.push_back(std::move(functions));
    }
    for (const State& state : manifest().states)
      states_.push_back(Empty(LayoutOf(manifest().constants[state.constant].form)));
    Reset();
    if (options.skip_sample) return;
    for (const Sample& sample : manifest().samples) CheckSample(sample);
  } catch (const std::runtime_error& error) {
    const std::string why = error.what();
    Refuse(why.starts_with(path) ? why : path + ": " + why);
  }
}

void Model::Reset() {
  const std::lock_guard<std::mutex> lock(states_mutex_);
  for (size_t i = 0; i < states_.size(); ++i)
    CopyElements(ConstantTensor(manifest().states[i].constant), states_[i]);
}

std::shared_ptr<const Model::Function> Model::At(
    size_t entry, const std::function<std::span<const int64_t>(size_t input)>& sizes_of) {
  Functions& functions = functions_[entry];
  if (!functions.plans) return functions.kept.front().second;
  std::vector<int64_t> values = SymbolsIn(manifest().entries[entry], sizes_of);
  const std::lock_guard<std::mutex> lock(functions_mutex_);
  auto& kept = functions.kept;
  const auto found = std::find_if(kept.begin(), kept.end(),
                                  [&](const auto& each) { return each.first == values; });
  if (found != kept.end()) {
    kept.splice(kept.begin(), kept, found);
  } else {
    auto [at_sizes, plan] = functions.plans->At(values);
    kept.emplace_front(std::move(values),
                       std::make_shared<const Function>(Function{
                           std::move(at_sizes), std::move(plan), functions.binding.get()}));
    if (kept.size() > kMostKept) kept.pop_back();
  }
  return kept.front().second;
}

void Model::Run(const Function& function, const CallTensors& inputs,
                const std::function<void(const CallTensors&)>& use) {
  const ThreadsOfCall threads(threads_);
  std::unique_lock<std::mutex> lock(states_mutex_, std::defer_lock);
  if (!states_.empty()) lock.lock();
  Call call{function.entry, inputs, {}};
  CheckApart(call);
  std::vector<Tensor> sources;
  sources.reserve(call.entry.sources.size());
  for (const Origin& source : call.entry.sources) sources.push_back(TensorOf(call, source));
  call.outputs = function.plan->Run(/*key=*/0, *function.binding, sources).outputs;
  ApplyUpdates(call);
  CallTensors results;
  results.reserve(call.entry.results.size());
  for (const CallResult& result : call.entry.results) results.push_back(Result(call, result));
  use(results);
}

Tensor Model::ConstantTensor(size_t number) const {
  return Borrowed(artifact_->ConstantAddress(number), LayoutOf(manifest().constants[number].form));
}

Tensor Model::TensorOf(const Call& call, const Origin& origin) const {
  switch (origin.kind) {
    case Origin::Kind::kInput:
      return *call.inputs[origin.number];
    case Origin::Kind::kConstant:
      return ConstantTensor(origin.number);
    case Origin::Kind::kState: {
      // Borrowed: what is a view of it changes with the next call.
      const Tensor& state = states_[origin.number];
      return Tensor(nullptr, state.data_ptr(), state.dtype(), state.sizes(), state.strides());
    }
    case Origin::Kind::kOutput:
      break;
  }
  return call.outputs[origin.number];
}

void Model::CheckApart(const Call& call) const {
  for (const Update& update : call.entry.updates) {
    const bool is_input = update.target.kind == Origin::Kind::kInput;
    const Tensor target = TensorOf(call, update.target);
    for (size_t i = 0; i < call.inputs.size(); ++i) {
      if (!call.inputs[i] || (is_input && i == update.target.number)) continue;
      if (!ShareMemory(*call.inputs[i], target)) continue;
      const std::vector<CallValue>& named = call.entry.inputs;
      const std::string what = is_input ? Quoted(named[update.target.number].name) : "a state";
      Refuse(Quoted(named[i].name) + " shares memory with " + what +
             ", which the call changes: pass a copy of it");
    }
  }
}

void Model::ApplyUpdates(const Call& call) const {
  const auto positions = [&](const Update& update) {
    return PositionsIn(TensorOf(call, *update.index),
                       TensorOf(call, update.target).sizes()[update.dim]);
  };
  // All are read before anything changes: a call that fails leaves things as they were.
  for (const Update& update : call.entry.updates) {
    if (update.index) positions(update);
  }
  for (const Update& update : call.entry.updates) {
    const Tensor target = TensorOf(call, update.target);
    const Tensor source = TensorOf(call, update.source);
    if (!update.index) {
      if (!IsSamePlace(source, target)) CopyElements(source, target);
      continue;
    }
    int64_t slice = 0;
    for (const int64_t position : positions(update)) {
      CopyElements(SliceOf(source, update.dim, slice++), SliceOf(target, update.dim, position));
    }
  }
}

std::optional<Tensor> Model::Result(const Call& call, const CallResult& result) const {
  if (!result.origin) return std::nullopt;
  Tensor tensor = TensorOf(call, *result.origin);
  if (!result.view) return tensor;
  const View& view = *result.view;
  if (result.origin->kind == Origin::Kind::kInput) {
    // The view is one of an input with the strides that it was exported with.
    const TensorForm& form = *call.entry.inputs[result.origin->number].tensor;
    if (tensor.strides() != form.strides) tensor = Restride(tensor, LayoutOf(form));
  }
  tensor = Reinterpret(tensor, Layout{tensor.dtype(), view.sizes, view.strides, Device::Host()},
                       view.offset);
  if (!view.conjugate && !view.negative) return tensor;
  tensor = RowMajorCopy(tensor);
  InvertSigns(tensor, view.conjugate, view.negative);
  return tensor;
}

void Model::CheckSample(const Sample& sample) {
  const Entry& entry = manifest().entries[sample.entry];
  CallTensors inputs;
  for (const auto& constant : sample.inputs) {
    inputs.emplace_back();
    // A copy: a call may change its inputs.
    if (constant) inputs.back() = RowMajorCopy(ConstantTensor(*constant));
  }
  const auto sizes_of = [&](size_t input) -> std::span<const int64_t> {
    return inputs[input]->sizes();
  };
  Run(*At(sample.entry, sizes_of), inputs, [&](const CallTensors& results) {
    for (size_t i = 0; i < results.size(); ++i) {
      if (!sample.outputs[i]) continue;
      const Difference difference = DifferenceOf(*results[i], ConstantTensor(*sample.outputs[i]));
      const double allowed = sample.tolerance * difference.largest_value;
      if (difference.largest <= allowed) continue;
      Refuse("output " + std::to_string(i) + " of the sample of \"" + entry.name + "\" is " +
             Number(difference.largest) + " off, and " + Number(allowed) +
             " are allowed: this machine computes something else than the one that exported the "
             "model; export it here, or open it without its samples");
    }
  });
  Reset();
}

}  // namespace torch_hybrid_backend
