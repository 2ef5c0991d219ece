// Manifest: what a .hybrid file says of itself (docs/hybrid_format.md), read and checked.
//
// A file has one variant or several, each for some targets. Their targets, kernels, entries and
// samples differ; all the rest is theirs in common. A Manifest is what the file says of one
// variant.
//
// Use: ChooseVariant, ReadManifest, then OutlineOf each plan that an entry names and CheckEntry.
// Entries for many sizes have plans of many sizes: they are checked at each set of sizes, by
// EntryAt, OutlineOf and CheckEntry. What then is in a manifest holds: every number names something
// that is there, every tensor lies within its segment, and sums and products of sizes fit in 64
// bits. Names are for people or to be compared; nothing is known of their characters.
//
// Ownership: plain data; it refers to nothing of the text it was read from.
//
// Failure: all throw std::runtime_error that says what is wrong and where.
#ifndef TORCH_HYBRID_BACKEND_MANIFEST_H_
#define TORCH_HYBRID_BACKEND_MANIFEST_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "json.h"
#include "processor.h"
#include "sha256.h"

namespace torch_hybrid_backend {

inline constexpr int64_t kHybridFormat = 1;
// Of the header, and what segments begin at multiples of.
inline constexpr uint64_t kHybridPage = 4096;

enum class SegmentKind { kPlan, kLibrary, kWeights, kFunctions, kReport };

// `offset` and `size` in bytes of the file, which the digest is of. `decoded`: how many bytes it
// has decoded, as many as in the file unless it is coded (coded_segment.h).
struct Segment {
  std::string name;
  SegmentKind kind;
  uint64_t offset;
  uint64_t size;
  Sha256Digest digest;
  bool is_coded = false;
  uint64_t decoded = 0;
};

// Machines that the library of that segment is for: those with all the features.
struct LibraryTarget {
  std::string system;
  std::string processor;
  std::vector<std::string> features;
  size_t library;
};

// How a kernel of the libraries is called: with tensors of at least so many bytes each, then with
// so many sizes.
struct Kernel {
  std::string name;
  std::vector<int64_t> bytes;
  size_t sizes;
};

// Sizes and strides in elements; no stride is negative.
struct TensorForm {
  std::string dtype;  // as torch names it: "float32"
  int64_t element_bytes;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t span;  // elements from the first to the last one; 0 when empty

  int64_t Bytes() const { return span * element_bytes; }
};

// `offset` in bytes of its segment.
struct Constant {
  size_t segment;
  uint64_t offset;
  TensorForm form;
};

// A tensor that calls change; it begins as the constant.
struct State {
  std::string name;
  size_t constant;
};

// Where a tensor of a call comes from.
struct Origin {
  enum class Kind { kInput, kConstant, kState, kOutput };  // kOutput: of the plan
  Kind kind;
  size_t number;
};

// An input or a result of a call: a tensor of the form, or a value that is a number, a truth
// value, a text or null.
struct CallValue {
  std::string name;
  std::optional<TensorForm> tensor;
  Json value;
};

// After the plan has run, `source` is copied over `target`; where there is an `index`, slices of it
// along `dim` are, to the positions that the index has. A position outside is an error of the call.
struct Update {
  Origin target;
  Origin source;
  std::optional<Origin> index;
  size_t dim = 0;
};

// Elements of another tensor, from the one `offset` elements behind its first one on; of its dtype.
struct View {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;
  bool conjugate;
  bool negative;
  int64_t span = 0;  // as of a TensorForm
};

// The tensor of that origin, or a view of it; the value where there is no origin.
struct CallResult {
  std::optional<Origin> origin;
  std::optional<View> view;
  Json value;
};

// A size of calls: dimension `dim` of input `input` has `factor` times its value plus `offset`
// elements. `example`: its value in the entry's sample.
struct SizeSymbol {
  std::string name;
  size_t input;
  size_t dim;
  int64_t factor;
  int64_t offset;
  int64_t least;
  int64_t most;
  int64_t example;
};

// A function of the model. `plan`, `functions`: segments. `sources`: the plan's inputs. `slots`:
// constants. `inputs` and `outputs` are those of the caller; `results` make the outputs.
// `python_parts`: what only Python can run, in words, with the user's lines. `symbols`: of an entry
// for many sizes, whose other members are those at one set of sizes, the examples where it is read;
// `any_sizes` is its text.
struct Entry {
  std::string name;
  size_t plan;
  std::optional<size_t> functions;
  std::vector<std::string> python_parts;
  bool needs_torch;
  std::vector<CallValue> inputs;
  std::vector<Origin> sources;
  std::vector<size_t> slots;
  std::vector<Update> updates;
  std::vector<CallResult> results;
  std::vector<CallValue> outputs;
  std::vector<SizeSymbol> symbols;
  std::shared_ptr<const Json> any_sizes;
};

// Inputs of a call and the outputs it then had, as constants; nothing for what is no tensor.
// `tolerance`: how far an output may be off, as a share of the largest absolute value in it.
struct Sample {
  size_t entry;
  std::vector<std::optional<size_t>> inputs;
  std::vector<std::optional<size_t>> outputs;
  double tolerance;
};

struct Manifest {
  std::string package;  // versions that wrote the file
  std::string torch;
  std::string model;
  std::vector<Segment> segments;
  std::vector<LibraryTarget> targets;
  // By name; nothing where the file does not tell, as it was written by an earlier version.
  std::optional<std::unordered_map<std::string, Kernel>> kernels;
  std::vector<Constant> constants;
  std::vector<State> states;
  std::vector<Entry> entries;
  std::vector<Sample> samples;
  size_t report;  // a segment, for Python

  // Throws where there is none of that name.
  size_t SegmentNamed(std::string_view name) const;
  // The form of what a call of the entry has there; not for outputs of a plan.
  const TensorForm& FormOf(const Entry& entry, const Origin& origin) const;
  // True by segment if a call of the variant reads the segment.
  std::vector<bool> UsedSegments() const;
};

// A text that is a manifest's, of a file of `file_bytes`. Parsed, and nothing of it checked.
struct ManifestText {
  ManifestText(std::string_view text, uint64_t file_bytes);
  // The variants of the file, at least one. The last one is that of the manifest's own members.
  size_t variants() const;
  // The member of that name of a variant.
  const Json& Of(size_t variant, std::string_view name) const;

  Json json;
  uint64_t text_bytes;
  uint64_t file_bytes;
};

Manifest ReadManifest(const ManifestText& text, size_t variant);

// The first variant with a target that the machine has all features of, and that target's number;
// or the first variant that has no targets, as it needs none. `refusal`: where none fits, what each
// lacks; else "".
struct VariantChoice {
  size_t variant = 0;
  std::optional<size_t> target;
  std::string refusal;
};
VariantChoice ChooseVariant(const ManifestText& text, const Processor& machine);

// The sides of a plan that a caller sees, without its steps.
struct PlanOutline {
  size_t inputs;
  std::vector<int64_t> slot_bytes;  // by slot: how many bytes the plan may read of its constant
  std::vector<TensorForm> values;
  std::vector<size_t> outputs;                      // values
  std::unordered_map<size_t, size_t> input_values;  // of each input that is read, a value
  std::vector<Kernel> kernels;  // as they are called, by the plans within it too
  bool has_operators = false;
  bool has_callbacks = false;
};

// The values of an entry's symbols in a call. `sizes_of`: the sizes of an input. Throws for a size
// outside of its range.
std::vector<int64_t> SymbolsIn(
    const Entry& entry, const std::function<std::span<const int64_t>(size_t input)>& sizes_of);

// An entry for many sizes at these values of its symbols. Throws for those that it is not for.
Entry EntryAt(const Manifest& manifest, const Entry& entry, const std::vector<int64_t>& values);

// Of the text of a plan (plan.h), whose steps give each other and the plans that they run tensors
// of the dtypes and sizes that these take. Refuses what no file may have: steps that are addresses
// in a process, or on other devices, and libraries other than "library".
PlanOutline OutlineOf(const Json& plan);

// Checks an entry against its plan.
void CheckEntry(const Manifest& manifest, const Entry& entry, const PlanOutline& plan);

// A text of a file for a message: not too long, and without what a terminal would obey.
std::string Quoted(std::string_view text);

}  // namespace torch_hybrid_backend

#endif  // TORCH_HYBRID_BACKEND_MANIFEST_H_
