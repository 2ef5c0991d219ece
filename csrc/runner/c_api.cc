// hybrid_runner.h, over Model.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dlpack.h"
#include "hybrid_runner.h"
#include "model.h"

namespace {

using namespace torch_hybrid_backend;

// The same structs, as kernels take them and as callers give them.
using KernelTensor = torch_hybrid_backend::DLTensor;
static_assert(sizeof(KernelTensor) == sizeof(::DLTensor) &&
              offsetof(KernelTensor, device) == offsetof(::DLTensor, device) &&
              offsetof(KernelTensor, ndim) == offsetof(::DLTensor, ndim) &&
              offsetof(KernelTensor, dtype) == offsetof(::DLTensor, dtype) &&
              offsetof(KernelTensor, shape) == offsetof(::DLTensor, shape) &&
              offsetof(KernelTensor, strides) == offsetof(::DLTensor, strides) &&
              offsetof(KernelTensor, byte_offset) == offsetof(::DLTensor, byte_offset));
static_assert(sizeof(DLManagedTensorVersioned) == 80 &&
              offsetof(DLManagedTensorVersioned, manager_ctx) == 8 &&
              offsetof(DLManagedTensorVersioned, deleter) == 16 &&
              offsetof(DLManagedTensorVersioned, flags) == 24 &&
              offsetof(DLManagedTensorVersioned, dl_tensor) == 32);

thread_local std::string last_error;

// What an entry looks like to callers, and the strings and sizes in the manifest it points at.
struct Described {
  std::vector<HybridTensor> inputs;
  std::vector<HybridTensor> outputs;
};

}  // namespace

struct HybridModel {
  HybridModel(const char* path, const ModelOptions& options) : model(path, options) {
    for (const Entry& entry : model.manifest().entries)
      described.push_back({TensorsIn(entry.inputs), TensorsIn(entry.outputs)});
  }

  static std::vector<HybridTensor> TensorsIn(const std::vector<CallValue>& values) {
    std::vector<HybridTensor> tensors;
    for (const CallValue& value : values) {
      if (!value.tensor) continue;
      const TensorForm& form = *value.tensor;
      tensors.push_back(
          {value.name.c_str(), form.dtype.c_str(), ToCallersDtype(DtypeNamed(form.dtype)),
           static_cast<int32_t>(form.sizes.size()), form.sizes.data(), form.strides.data()});
    }
    return tensors;
  }

  // NULL: the first one.
  size_t EntryNamed(const char* name) const {
    const std::vector<Entry>& entries = model.manifest().entries;
    std::string known;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (name == nullptr || entries[i].name == name) return i;
      known += (i == 0 ? "" : ", ") + entries[i].name;
    }
    throw std::runtime_error("the model has no entry \"" + std::string(name) + "\": it has " +
                             known);
  }

  void Run(const char* name, const ::DLTensor* const* inputs, size_t input_count,
           DLManagedTensorVersioned** outputs, size_t output_count);

  Model model;
  std::vector<Described> described;  // one for each entry
};

namespace {

void CheckCount(const std::string& entry, size_t given, size_t expected, const char* noun) {
  if (given == expected) return;
  throw std::runtime_error("\"" + entry + "\" has " + std::to_string(expected) + " " + noun +
                           (expected == 1 ? "" : "s") + ", not " + std::to_string(given));
}

// The options of a caller whose struct may be shorter or longer than ours.
HybridOptions OptionsOf(const HybridOptions* given) {
  HybridOptions options = HYBRID_OPTIONS_DEFAULT;
  if (given == nullptr) return options;
  constexpr size_t kFirst = offsetof(HybridOptions, key_count) + sizeof(size_t);
  if (given->struct_size < kFirst) {
    throw std::runtime_error(
        "struct_size of the options is " + std::to_string(given->struct_size) +
        ": it must be sizeof(HybridOptions); begin with HYBRID_OPTIONS_DEFAULT");
  }
  const auto* const bytes = reinterpret_cast<const char*>(given);
  if (std::any_of(bytes + std::min(sizeof(options), given->struct_size), bytes + given->struct_size,
                  [](char byte) { return byte != 0; })) {
    throw std::runtime_error("an option is of a newer version of the runner than this one");
  }
  std::memcpy(&options, given, std::min(sizeof(options), given->struct_size));
  if (options.keys == nullptr && options.key_count != 0)
    throw std::runtime_error("keys is NULL, and key_count is not 0");
  return options;
}

// The model or the struct that a caller gives.
template <typename T>
T& Given(T* pointer, const char* name) {
  if (pointer == nullptr) throw std::runtime_error("the " + std::string(name) + " is NULL");
  return *pointer;
}

// 0, or 1 and an error where the function throws.
template <typename Function>
int32_t Status(const Function& function) {
  try {
    function();
    return 0;
  } catch (const std::bad_alloc&) {
    last_error = "there is too little memory";
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return 1;
}

}  // namespace

void HybridModel::Run(const char* name, const ::DLTensor* const* inputs, size_t input_count,
                      DLManagedTensorVersioned** outputs, size_t output_count) {
  if ((inputs == nullptr && input_count > 0) || (outputs == nullptr && output_count > 0))
    throw std::runtime_error("the list of inputs or of outputs is NULL");
  const size_t number = EntryNamed(name);
  const Entry& any = model.manifest().entries[number];
  CheckCount(any.name, input_count, described[number].inputs.size(), "input");
  CheckCount(any.name, output_count, described[number].outputs.size(), "output");
  const auto which = [&](size_t tensor) {
    return "input " + std::to_string(tensor) + " (\"" + described[number].inputs[tensor].name +
           "\")";
  };
  for (size_t i = 0; i < input_count; ++i) {
    if (inputs[i] == nullptr) throw std::runtime_error(which(i) + " is NULL");
    if (inputs[i]->ndim < 0 || (inputs[i]->ndim > 0 && inputs[i]->shape == nullptr)) {
      throw std::runtime_error(which(i) + " has no sizes: its ndim is " +
                               std::to_string(inputs[i]->ndim) + ", and its shape is " +
                               (inputs[i]->shape == nullptr ? "NULL" : "not NULL"));
    }
  }
  const auto sizes_of = [&](size_t input) -> std::span<const int64_t> {
    const auto before = std::count_if(  // tensors alone are given
        any.inputs.begin(), any.inputs.begin() + static_cast<ptrdiff_t>(input),
        [](const CallValue& each) { return each.tensor.has_value(); });
    return {inputs[before]->shape, static_cast<size_t>(inputs[before]->ndim)};
  };
  const std::shared_ptr<const Model::Function> function = model.At(number, sizes_of);
  const Entry& entry = function->entry;
  CallTensors tensors;
  size_t next = 0;
  for (const CallValue& input : entry.inputs) {
    tensors.emplace_back();
    if (!input.tensor) continue;
    tensors.back() = FromDlpack(*inputs[next], *input.tensor, which(next));
    ++next;
  }
  model.Run(*function, tensors, [&](const CallTensors& results) {
    struct Delete {
      void operator()(DLManagedTensorVersioned* tensor) const { tensor->deleter(tensor); }
    };
    std::vector<std::unique_ptr<DLManagedTensorVersioned, Delete>> managed;
    for (const auto& result : results) {
      if (result) managed.emplace_back(ToManaged(*result));
    }
    for (size_t i = 0; i < managed.size(); ++i) outputs[i] = managed[i].release();
  });
}

extern "C" {

int32_t hybrid_api_version(void) { return HYBRID_API_VERSION; }

HybridModel* hybrid_open(const char* path, const HybridOptions* options) {
  HybridModel* model = nullptr;
  Status([&] {
    const HybridOptions given = OptionsOf(options);
    if (path == nullptr) throw std::runtime_error("the path is NULL");
    ModelOptions open{given.threads, given.share != 0, given.skip_sample != 0, {}, {}};
    if (given.keys != nullptr) {
      open.keys.emplace();
      for (size_t i = 0; i < given.key_count; ++i)
        open.keys->push_back(std::to_array(given.keys[i]));
    }
    if (given.torch_folder != nullptr) open.torch_folder = given.torch_folder;
    model = new HybridModel(path, open);
  });
  return model;
}

void hybrid_close(HybridModel* model) { delete model; }

size_t hybrid_entry_count(const HybridModel* model) {
  size_t count = 0;
  Status([&] { count = Given(model, "model").described.size(); });
  return count;
}

const char* hybrid_entry_name(const HybridModel* model, size_t index) {
  const char* name = nullptr;
  Status([&] {
    const std::vector<Entry>& entries = Given(model, "model").model.manifest().entries;
    if (index >= entries.size()) {
      throw std::runtime_error("the model has no entry of index " + std::to_string(index) +
                               ": their number is " + std::to_string(entries.size()));
    }
    name = entries[index].name.c_str();
  });
  return name;
}

int32_t hybrid_describe(const HybridModel* model, const char* name, HybridEntry* entry) {
  return Status([&] {
    if (Given(entry, "entry").struct_size < sizeof(HybridEntry))
      throw std::runtime_error("struct_size of the entry must be sizeof(HybridEntry)");
    const size_t number = Given(model, "model").EntryNamed(name);
    const Described& described = model->described[number];
    entry->name = model->model.manifest().entries[number].name.c_str();
    entry->input_count = described.inputs.size();
    entry->inputs = described.inputs.data();
    entry->output_count = described.outputs.size();
    entry->outputs = described.outputs.data();
  });
}

const char* hybrid_manifest(const HybridModel* model) {
  const char* text = nullptr;
  Status([&] { text = Given(model, "model").model.artifact().manifest_text().c_str(); });
  return text;
}

const char* hybrid_library(const HybridModel* model) {
  const char* name = nullptr;
  Status([&] {
    const Artifact& artifact = Given(model, "model").model.artifact();
    name = artifact.HasLibrary() ? artifact.LibrarySegment().name.c_str() : "";
  });
  return name;
}

int32_t hybrid_run(HybridModel* model, const char* entry, const ::DLTensor* const* inputs,
                   size_t input_count, DLManagedTensorVersioned** outputs, size_t output_count) {
  return Status([&] {
    if (outputs != nullptr) std::fill_n(outputs, output_count, nullptr);
    Given(model, "model").Run(entry, inputs, input_count, outputs, output_count);
  });
}

int32_t hybrid_reset(HybridModel* model) {
  return Status([&] { Given(model, "model").model.Reset(); });
}

int32_t hybrid_read_key(const char* path, uint8_t key[32]) {
  return Status([&] {
    if (path == nullptr || key == nullptr) throw std::runtime_error("the path or the key is NULL");
    const PublicKey read = ReadPublicKey(path);
    std::copy(read.begin(), read.end(), key);
  });
}

const char* hybrid_error(void) { return last_error.c_str(); }
}
