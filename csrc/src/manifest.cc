#include "manifest.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "coded_segment.h"
#include "size_table.h"

namespace torch_hybrid_backend {
namespace {

// Of elements of a tensor and of offsets: what is computed with them then fits in 64 bits.
constexpr int64_t kMost = int64_t{1} << 58;
constexpr size_t kMostDimensions = 64;
constexpr uint64_t kTensorAlignment = 64;
constexpr size_t kMostVariants = 32;

[[noreturn]] void Refuse(const std::string& why) { throw std::runtime_error(why); }

// What `read` makes; errors say that they are of this part of the file.
template <typename Read>
auto Within(const char* noun, size_t number, const Read& read) {
  try {
    return read();
  } catch (const std::runtime_error& error) {
    Refuse(std::string(noun) + " " + std::to_string(number) + ": " + error.what());
  }
}

template <typename Read>
auto Each(const Json& list, const char* noun, const Read& read) {
  std::vector<decltype(read(list))> all;
  all.reserve(list.AsList().size());
  for (const Json& one : list.AsList()) {
    all.push_back(Within(noun, all.size(), [&] { return read(one); }));
  }
  return all;
}

// A whole number that is not negative and at most `most`.
int64_t Bounded(const Json& json, int64_t most, const char* noun) {
  const int64_t number = json.AsInt();
  if (number < 0 || number > most) {
    Refuse(std::string(noun) + " is " + std::to_string(number) + "; it must be from 0 to " +
           std::to_string(most));
  }
  return number;
}

// One of `count` things that are numbered from 0 on.
size_t Numbered(const Json& json, size_t count, const char* noun) {
  const int64_t number = json.AsInt();
  if (number < 0 || static_cast<uint64_t>(number) >= count) {
    Refuse("there is no " + std::string(noun) + " " + std::to_string(number) + ": there are " +
           std::to_string(count));
  }
  return number;
}

template <typename T>
void RefuseTwins(const std::vector<T>& all, const char* noun) {
  std::unordered_set<std::string_view> names;
  for (const T& one : all) {
    if (!names.insert(one.name).second) {
      Refuse("two " + std::string(noun) + " are called " + Quoted(one.name));
    }
  }
}

constexpr std::pair<std::string_view, int64_t> kElementBytes[] = {
    {"bool", 1},
    {"uint8", 1},
    {"uint16", 2},
    {"uint32", 4},
    {"uint64", 8},
    {"int8", 1},
    {"int16", 2},
    {"int32", 4},
    {"int64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
    {"complex32", 4},
    {"complex64", 8},
    {"complex128", 16},
    {"float8_e5m2", 1},
    {"float8_e4m3fn", 1},
    {"float8_e5m2fnuz", 1},
    {"float8_e4m3fnuz", 1},
    {"float8_e8m0fnu", 1},
    {"float4_e2m1fn_x2", 1},
};

template <typename Value, size_t N>
Value Find(const std::pair<std::string_view, Value> (&known)[N], std::string_view name,
           const char* noun) {
  for (const auto& [each, value] : known) {
    if (each == name) return value;
  }
  Refuse("no " + std::string(noun) + " is called " + Quoted(name) +
         ": a newer version of torch_hybrid_backend may know it");
}

// Elements from the first to the last one; 0 when empty.
int64_t CheckedSpan(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  if (sizes.size() != strides.size() || sizes.size() > kMostDimensions) {
    Refuse("a tensor has " + std::to_string(sizes.size()) + " sizes and " +
           std::to_string(strides.size()) + " strides; it must have as many of both, at most " +
           std::to_string(kMostDimensions));
  }
  int64_t elements = 1;  // where sizes of 0 count as 1
  int64_t span = 1;
  bool is_empty = false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] < 0 || strides[d] < 0 || strides[d] > kMost) {
      Refuse("a size or stride of a tensor is negative or over 2^58");
    }
    is_empty |= sizes[d] == 0;
    const int64_t steps = std::max<int64_t>(sizes[d], 1) - 1;
    if (steps >= kMost / elements || (steps > 0 && strides[d] > (kMost - span) / steps)) {
      Refuse("a tensor has more than 2^58 elements");
    }
    elements *= steps + 1;
    span += steps * strides[d];
  }
  return is_empty ? 0 : span;
}

TensorForm MakeForm(const Json& dtype, const Json& sizes, const Json& strides) {
  TensorForm form{dtype.AsString(), Find(kElementBytes, dtype.AsString(), "dtype"), sizes.AsInts(),
                  strides.AsInts(), /*span=*/0};
  form.span = CheckedSpan(form.sizes, form.strides);
  return form;
}

TensorForm ReadForm(const Json& json) {
  return MakeForm(json["dtype"], json["sizes"], json["strides"]);
}

bool IsTensorLike(const TensorForm& one, const TensorForm& other) {
  return one.dtype == other.dtype && one.sizes == other.sizes;
}

uint8_t DigitOf(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
  Refuse("a SHA-256 must be 64 lower-case hexadecimal digits");
}

Sha256Digest ReadDigest(const std::string& digits) {
  Sha256Digest digest;
  if (digits.size() != 2 * digest.size()) DigitOf('\0');
  for (size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<uint8_t>(DigitOf(digits[2 * i]) << 4 | DigitOf(digits[2 * i + 1]));
  }
  return digest;
}

constexpr std::pair<std::string_view, SegmentKind> kSegmentKinds[] = {
    {"plan", SegmentKind::kPlan},
    {"library", SegmentKind::kLibrary},
    {"weights", SegmentKind::kWeights},
    {"functions", SegmentKind::kFunctions},
    {"report", SegmentKind::kReport}};

Segment ReadSegment(const Json& json) {
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  Segment segment{json["name"].AsString(),
                  Find(kSegmentKinds, json["kind"].AsString(), "kind of segment"),
                  static_cast<uint64_t>(Bounded(json["offset"], kAny, "the offset")),
                  static_cast<uint64_t>(Bounded(json["size"], kAny, "the size")),
                  ReadDigest(json["sha256"].AsString())};
  segment.decoded = segment.size;
  const std::string& encoding = json["encoding"].AsString();
  if (encoding == "none") return segment;
  if (encoding != "huffman") {
    Refuse("it is encoded as " + Quoted(encoding) +
           ", which only a newer version of torch_hybrid_backend can read");
  }
  segment.is_coded = true;
  segment.decoded = static_cast<uint64_t>(Bounded(json["decoded"], kMost, "the decoded size"));
  if (segment.kind != SegmentKind::kWeights) Refuse("it is coded, and only weights may be");
  if (segment.decoded / kMostExpansion > segment.size) {
    Refuse("its " + std::to_string(segment.size) + " bytes cannot be " +
           std::to_string(segment.decoded) + " decoded ones");
  }
  return segment;
}

Kernel ReadKernel(const Json& json) {
  return {json["name"].AsString(), json["bytes"].AsInts(),
          static_cast<size_t>(Bounded(json["sizes"], kMost, "the number of sizes"))};
}

// They follow one another without overlap or gap, up to the end of the file.
void CheckPlaces(const std::vector<Segment>& segments, uint64_t begin, uint64_t file_bytes) {
  uint64_t end = begin;
  for (const Segment& segment : segments) {
    const uint64_t expected = end + (kHybridPage - end % kHybridPage) % kHybridPage;
    if (segment.offset != expected || expected > file_bytes ||
        segment.size > file_bytes - expected) {
      Refuse("segment " + Quoted(segment.name) + " has " + std::to_string(segment.size) +
             " bytes from " + std::to_string(segment.offset) + " on; it must begin at " +
             std::to_string(expected) + ", and the file has " + std::to_string(file_bytes) +
             " bytes");
    }
    end = expected + segment.size;
  }
  if (end != file_bytes) {
    Refuse("the file has " + std::to_string(file_bytes) + " bytes, and its last segment ends at " +
           std::to_string(end));
  }
}

// Reads a manifest from its beginning to its end: later parts refer to earlier ones.
class Reader {
 public:
  explicit Reader(const Manifest& made) : made_(made) { FindSegments(); }

  static Manifest ReadWhole(const ManifestText& text, size_t variant) {
    const Json& json = text.json;
    const int64_t format = json["format"].AsInt();
    if (format != kHybridFormat) Refuse("it is of format " + std::to_string(format));
    Manifest made;
    made.package = json["package"].AsString();
    made.torch = json["torch"].AsString();
    made.model = json["model"].AsString();
    made.segments = Each(json["segments"], "segment", ReadSegment);
    RefuseTwins(made.segments, "segments");
    CheckPlaces(made.segments, kHybridPage + text.text_bytes, text.file_bytes);
    Reader reader(made);
    const auto each = [&](const Json& list, const char* noun, auto read) {
      return Each(list, noun, [&](const Json& one) { return (reader.*read)(one); });
    };
    // For Python, as an entry's structure.
    made.report = reader.SegmentOf(text.Of(variant, "report"), SegmentKind::kReport);
    made.targets = each(text.Of(variant, "targets"), "target", &Reader::ReadLibraryTarget);
    if (json.Find("kernels") != nullptr) {
      made.kernels.emplace();
      for (Kernel& kernel : Each(text.Of(variant, "kernels"), "kernel", ReadKernel)) {
        const std::string name = kernel.name;
        if (!made.kernels->emplace(name, std::move(kernel)).second)
          Refuse("two kernels are called " + Quoted(name));
      }
    }
    made.constants = each(json["constants"], "constant", &Reader::ReadConstant);
    made.states = each(json["states"], "state", &Reader::ReadState);
    RefuseTwins(made.states, "states");
    made.entries = each(text.Of(variant, "entries"), "entry", &Reader::ReadAnyEntry);
    RefuseTwins(made.entries, "entries");
    for (size_t i = 0; i < made.entries.size(); ++i)
      reader.entries_.emplace(made.entries[i].name, i);
    if (made.entries.empty()) Refuse("there is no entry");
    const bool is_same = std::equal(
        made.entries.begin(), made.entries.end(), json["entries"].AsList().begin(),
        json["entries"].AsList().end(),
        [](const Entry& one, const Json& own) { return one.name == own["name"].AsString(); });
    if (!is_same) Refuse("variant " + std::to_string(variant) + " has other entries than the file");
    made.samples = each(text.Of(variant, "samples"), "sample", &Reader::ReadSample);
    if (const Json* generation = json.Find("generation")) reader.CheckGeneration(*generation);
    return made;
  }

  // An entry at known sizes.
  Entry ReadEntry(const Json& json) const {
    Entry entry = ReadParts(json);
    if (const Json* limits = json.Find("limits")) {
      for (const Json& limit : limits->AsList()) CheckLimit(limit.AsInts());
    }
    return entry;
  }

 private:
  void FindSegments() {
    for (size_t i = 0; i < made_.segments.size(); ++i) segments_.emplace(made_.segments[i].name, i);
  }

  size_t SegmentOf(const Json& name, SegmentKind kind) const {
    const auto found = segments_.find(name.AsString());
    if (found == segments_.end()) Refuse("there is no segment " + Quoted(name.AsString()));
    if (made_.segments[found->second].kind != kind) {
      Refuse("segment " + Quoted(name.AsString()) + " is of another kind");
    }
    return found->second;
  }

  LibraryTarget ReadLibraryTarget(const Json& json) const {
    LibraryTarget target{json["system"].AsString(),
                         json["processor"].AsString(),
                         {},
                         SegmentOf(json["library"], SegmentKind::kLibrary)};
    for (const Json& feature : json["features"].AsList()) {
      target.features.push_back(feature.AsString());
    }
    return target;
  }

  Constant ReadConstant(const Json& json) const {
    Constant constant{SegmentOf(json["segment"], SegmentKind::kWeights),
                      static_cast<uint64_t>(Bounded(json["offset"], kMost, "the offset")),
                      ReadForm(json)};
    const uint64_t size = made_.segments[constant.segment].decoded;
    if (constant.offset % kTensorAlignment != 0 || constant.offset > size ||
        static_cast<uint64_t>(constant.form.Bytes()) > size - constant.offset) {
      Refuse("its " + std::to_string(constant.form.Bytes()) + " bytes from " +
             std::to_string(constant.offset) + " on are not within the segment's " +
             std::to_string(size) + ", or do not begin at a multiple of 64");
    }
    return constant;
  }

  State ReadState(const Json& json) const {
    return {json["name"].AsString(),
            Numbered(json["constant"], made_.constants.size(), "constant")};
  }

  static CallValue ReadValue(const Json& json) {
    CallValue value{json["name"].AsString(), {}, {}};
    if (const Json* constant = json.Find("value")) {
      value.value = ReadLiteral(*constant);
    } else {
      value.tensor = ReadForm(json);
    }
    return value;
  }

  static Json ReadLiteral(const Json& json) {
    if (json.IsList() || json.IsObject()) {
      Refuse("a value must be a number, a truth value, a text or null");
    }
    return json;
  }

  // `outputs`: true if it may be an output of the plan, which is checked when the plan is read.
  Origin ReadOrigin(const Json& json, const Entry& entry, bool outputs) const {
    const std::vector<Json>& fields = json.AsList();
    if (fields.size() != 2) Refuse("an origin is a kind and a number");
    const std::string& kind = fields[0].AsString();
    if (kind == "constant") {
      return {Origin::Kind::kConstant, Numbered(fields[1], made_.constants.size(), "constant")};
    }
    if (kind == "state") {
      return {Origin::Kind::kState, Numbered(fields[1], made_.states.size(), "state")};
    }
    if (kind == "output" && outputs) {
      return {Origin::Kind::kOutput, static_cast<size_t>(Bounded(fields[1], kMost, "an output"))};
    }
    if (kind != "input") Refuse("no tensor comes from " + Quoted(kind) + " there");
    const size_t input = Numbered(fields[1], entry.inputs.size(), "input");
    if (!entry.inputs[input].tensor) {
      Refuse("input " + std::to_string(input) + " is no tensor");
    }
    return {Origin::Kind::kInput, input};
  }

  Update ReadUpdate(const Json& json, const Entry& entry) const {
    const std::vector<Json>& fields = json.AsList();
    if (fields.empty()) Refuse("an update has a kind");
    const std::string& kind = fields[0].AsString();
    if (kind == "copy" && fields.size() == 3) {
      const auto output = static_cast<size_t>(Bounded(fields[2], kMost, "an output"));
      return {ReadTarget(fields[1], entry), {Origin::Kind::kOutput, output}, {}};
    }
    if (kind != "rows" || fields.size() != 5) {
      Refuse("no update is called " + Quoted(kind) + " and has " + std::to_string(fields.size()) +
             " fields");
    }
    const Origin target = ReadTarget(fields[1], entry);
    const size_t dimensions = made_.FormOf(entry, target).sizes.size();
    return {target, ReadOrigin(fields[4], entry, /*outputs=*/true),
            ReadOrigin(fields[3], entry, /*outputs=*/true),
            Numbered(fields[2], dimensions, "dimension")};
  }

  Origin ReadTarget(const Json& json, const Entry& entry) const {
    const Origin target = ReadOrigin(json, entry, /*outputs=*/false);
    if (target.kind == Origin::Kind::kConstant) Refuse("an update changes a constant");
    return target;
  }

  CallResult ReadResult(const Json& json, const Entry& entry) const {
    const std::vector<Json>& fields = json.AsList();
    if (fields.empty()) Refuse("a result has a kind");
    const std::string& kind = fields[0].AsString();
    if (kind == "literal") {
      if (fields.size() != 2) Refuse("a literal is one value");
      return {{}, {}, ReadLiteral(fields[1])};
    }
    if (kind != "view") return {ReadOrigin(json, entry, /*outputs=*/true), {}, {}};
    if (fields.size() != 6) Refuse("a view has six fields");
    const std::string& bits = fields[5].AsString();
    if (!bits.empty() && bits != "conj" && bits != "neg" && bits != "conj neg") {
      Refuse("no bits of a view are called " + Quoted(bits));
    }
    View view{fields[2].AsInts(), fields[3].AsInts(), Bounded(fields[4], kMost, "the offset"),
              bits.starts_with("conj"), bits.ends_with("neg")};
    view.span = CheckedSpan(view.sizes, view.strides);
    return {ReadOrigin(fields[1], entry, /*outputs=*/true), std::move(view), {}};
  }

  Entry ReadAnyEntry(const Json& json) const {
    const Json* const described = json.Find("symbols");
    if (described == nullptr) return ReadEntry(json);
    Entry entry{};
    entry.symbols = Each(*described, "symbol", ReadSymbol);
    RefuseTwins(entry.symbols, "symbols");
    entry.any_sizes = std::make_shared<const Json>(json);
    std::vector<int64_t> examples;
    for (const SizeSymbol& symbol : entry.symbols) examples.push_back(symbol.example);
    entry = EntryAt(made_, entry, examples);
    for (const SizeSymbol& symbol : entry.symbols) {
      const CallValue* const input =
          symbol.input < entry.inputs.size() ? &entry.inputs[symbol.input] : nullptr;
      if (input == nullptr || !input->tensor || symbol.dim >= input->tensor->sizes.size())
        Refuse("the size " + Quoted(symbol.name) + " is read of a dimension that is not there");
    }
    return entry;
  }

  static SizeSymbol ReadSymbol(const Json& json) {
    const auto number = [&](const char* member, int64_t most) {
      return Bounded(json[member], most, member);
    };
    constexpr int64_t kMostSize = std::numeric_limits<int32_t>::max();
    const SizeSymbol symbol{json["name"].AsString(),
                            static_cast<size_t>(number("input", kMost)),
                            static_cast<size_t>(number("dim", kMost)),
                            number("factor", kMostSize),
                            json["offset"].AsInt(),
                            number("least", kMostSize),
                            number("most", kMostSize),
                            number("example", kMostSize)};
    if (symbol.factor == 0 || std::abs(symbol.offset) > kMostSize ||
        symbol.example < symbol.least || symbol.example > symbol.most)
      Refuse("its factor is 0, its offset too large, or its example outside of its range");
    return symbol;
  }

  static void CheckLimit(const std::vector<int64_t>& limit) {
    if (limit.size() != 3) Refuse("a limit is a size, the least and the most");
    if (limit[0] < limit[1] || limit[0] > limit[2]) {
      Refuse("its kernels do not serve these sizes: they count " + std::to_string(limit[0]) +
             ", and may count " + std::to_string(limit[1]) + " to " + std::to_string(limit[2]) +
             "; export the model for fewer sizes");
    }
  }

  Entry ReadParts(const Json& json) const {
    Entry entry{};
    entry.name = json["name"].AsString();
    entry.plan = SegmentOf(json["plan"], SegmentKind::kPlan);
    if (const Json& functions = json["functions"]; !functions.IsNull()) {
      entry.functions = SegmentOf(functions, SegmentKind::kFunctions);
    }
    entry.python_parts = Each(json["python_parts"], "part of Python's",
                              [](const Json& part) { return part.AsString(); });
    if (!entry.functions && !entry.python_parts.empty()) {
      Refuse("it has parts of Python's and no functions");
    }
    for (const char* side : {"in", "out"}) json["structure"][side].AsString();
    entry.needs_torch = json["needs_torch"].AsBool();
    entry.inputs = Each(json["inputs"], "input", ReadValue);
    entry.outputs = Each(json["outputs"], "output", ReadValue);
    entry.sources = Each(json["sources"], "source", [&](const Json& one) {
      return ReadOrigin(one, entry, /*outputs=*/false);
    });
    entry.slots = Each(json["slots"], "slot", [&](const Json& one) {
      return Numbered(one, made_.constants.size(), "constant");
    });
    entry.updates =
        Each(json["updates"], "update", [&](const Json& one) { return ReadUpdate(one, entry); });
    entry.results =
        Each(json["results"], "result", [&](const Json& one) { return ReadResult(one, entry); });
    if (entry.results.size() != entry.outputs.size()) {
      Refuse("it has " + std::to_string(entry.results.size()) + " results and describes " +
             std::to_string(entry.outputs.size()));
    }
    return entry;
  }

  // `may_lack`: a tensor may be null as well.
  std::vector<std::optional<size_t>> ReadSampled(const Json& json, const char* noun,
                                                 const std::vector<CallValue>& values,
                                                 bool may_lack) const {
    if (json.AsList().size() != values.size()) {
      Refuse("it has " + std::to_string(json.AsList().size()) + " tensors instead of " +
             std::to_string(values.size()));
    }
    size_t next = 0;
    return Each(json, noun, [&](const Json& one) -> std::optional<size_t> {
      const CallValue& value = values[next++];
      if (value.tensor ? one.IsNull() && !may_lack : !one.IsNull())
        Refuse("it must be null, and only be it, for a value");
      if (one.IsNull()) return {};
      const size_t constant = Numbered(one, made_.constants.size(), "constant");
      if (!IsTensorLike(made_.constants[constant].form, *value.tensor)) {
        Refuse("constant " + std::to_string(constant) + " has another dtype or other sizes");
      }
      return constant;
    });
  }

  size_t EntryOf(const Json& name) const {
    const auto found = entries_.find(name.AsString());
    if (found == entries_.end()) Refuse("there is no entry " + Quoted(name.AsString()));
    return found->second;
  }

  // For Python, which calls the two entries of a decoder with tensors of its own.
  void CheckGeneration(const Json& json) const {
    const int64_t most = Bounded(json["max_length"], kMost, "the max_length of generation");
    json["stop_tokens"].AsInts();
    const Entry& prefill = made_.entries[EntryOf(json["prefill"])];
    const Entry& decode = made_.entries[EntryOf(json["decode"])];
    const auto is = [](const CallValue& value, std::string_view dtype, std::vector<int64_t> sizes) {
      return value.tensor && (dtype.empty() || value.tensor->dtype == dtype) &&
             value.tensor->sizes == sizes;
    };
    // Sizes of which the last is read from one entry and must be the other one's, too.
    const auto last_size = [](const std::vector<CallValue>& values) {
      const bool has = !values.empty() && values[0].tensor && !values[0].tensor->sizes.empty();
      return has ? values[0].tensor->sizes.back() : 0;
    };
    const int64_t chunk = last_size(prefill.inputs);
    const int64_t vocabulary = last_size(decode.outputs);
    const auto& of_prefill = prefill.inputs;
    const auto& of_decode = decode.inputs;
    if (chunk < 1 || chunk > most || vocabulary < 1 || of_prefill.size() != 3 ||
        of_decode.size() != 2 || prefill.outputs.size() != 1 || decode.outputs.size() != 1 ||
        !is(of_prefill[0], "int64", {1, chunk}) || !is(of_prefill[1], "int64", {chunk}) ||
        !is(of_prefill[2], "int64", {1}) || !is(of_decode[0], "int64", {1, 1}) ||
        !is(of_decode[1], "int64", {1}) || !is(prefill.outputs[0], "", {1, vocabulary}) ||
        !is(decode.outputs[0], "", {1, vocabulary})) {
      Refuse("the entries of generation take or return something else than a decoder's");
    }
  }

  Sample ReadSample(const Json& json) const {
    const size_t number = EntryOf(json["entry"]);
    const Entry& entry = made_.entries[number];
    const double tolerance = json["tolerance"].AsDouble();
    if (!(tolerance >= 0) || std::isinf(tolerance)) Refuse("its tolerance is no such number");
    return {number, ReadSampled(json["inputs"], "input", entry.inputs, false),
            ReadSampled(json["outputs"], "output", entry.outputs, true), tolerance};
  }

  const Manifest& made_;
  // By name: a hostile file may have many of both.
  std::unordered_map<std::string, size_t> segments_;
  std::unordered_map<std::string, size_t> entries_;
};

size_t BoundedCount(const Json& plan, const char* member) {
  return static_cast<size_t>(Bounded(plan[member], Json::kMostUntrustedValues, member));
}

void RequireTruthValue(const TensorForm& form) {
  if (form.dtype != "bool" || form.span != 1) Refuse("what it asks is not one truth value");
}

void RequireLike(const TensorForm& one, const TensorForm& other, const char* noun, size_t number) {
  if (!IsTensorLike(one, other)) {
    Refuse(std::string(noun) + " " + std::to_string(number) +
           " of a plan has another dtype or other sizes than what it is");
  }
}

// A step that runs two of the plans `inner`.
void CheckControlFlow(const Json& step, bool is_loop, const std::vector<TensorForm>& values,
                      const std::vector<PlanOutline>& inner) {
  const auto forms = [&](const char* member) {
    return Each(step[member], "value", [&](const Json& value) -> const TensorForm* {
      constexpr int64_t kUnread = -1;
      if (value.AsInt() == kUnread && member == std::string_view("outputs")) return nullptr;
      return &values[Numbered(value, values.size(), "value")];
    });
  };
  const std::vector<const TensorForm*> inputs = forms("inputs");
  const std::vector<const TensorForm*> outputs = forms("outputs");
  const std::vector<Json>& plans = step["plans"].AsList();
  if (plans.size() != 2) Refuse("it runs two plans");
  if (is_loop && outputs.size() > inputs.size()) Refuse("it carries more than it is given");
  if (!is_loop) RequireTruthValue(values[Numbered(step["predicate"], values.size(), "value")]);
  for (size_t p = 0; p < plans.size(); ++p) {
    const PlanOutline& plan = inner[Numbered(plans[p], inner.size(), "plan before it")];
    const bool is_condition = is_loop && p == 0;
    if (plan.inputs != inputs.size() ||
        plan.outputs.size() != (is_condition ? 1 : outputs.size())) {
      Refuse("plan " + std::to_string(plans[p].AsInt()) + " has other inputs or outputs");
    }
    for (const auto& [input, value] : plan.input_values)
      RequireLike(plan.values[value], *inputs[input], "input", input);
    for (size_t i = 0; i < plan.outputs.size(); ++i) {
      const TensorForm& output = plan.values[plan.outputs[i]];
      if (is_condition) {
        RequireTruthValue(output);
        continue;
      }
      if (is_loop) RequireLike(output, *inputs[i], "output", i);
      if (outputs[i] != nullptr) RequireLike(output, *outputs[i], "output", i);
    }
  }
}

// Kernels check nothing of what they are given.
void CheckCall(const std::unordered_map<std::string, Kernel>& kernels, const Kernel& called) {
  const auto found = kernels.find(called.name);
  if (found == kernels.end())
    Refuse("its plan calls a kernel " + Quoted(called.name) + ", which is not among the kernels");
  const Kernel& kernel = found->second;
  if (called.bytes.size() != kernel.bytes.size() || called.sizes != kernel.sizes) {
    Refuse("its plan calls the kernel " + Quoted(called.name) + " with " +
           std::to_string(called.bytes.size()) + " tensors and " + std::to_string(called.sizes) +
           " sizes; it takes " + std::to_string(kernel.bytes.size()) + " and " +
           std::to_string(kernel.sizes));
  }
  for (size_t i = 0; i < kernel.bytes.size(); ++i) {
    if (called.bytes[i] < kernel.bytes[i]) {
      Refuse("its plan calls the kernel " + Quoted(called.name) + " with " +
             std::to_string(called.bytes[i]) + " bytes as tensor " + std::to_string(i) +
             ", of which it uses " + std::to_string(kernel.bytes[i]));
    }
  }
}

// A plan, whose steps may run the plans `inner`. `slot_bytes`: raised to what it reads of
// constants.
PlanOutline ReadOutline(const Json& json, const std::vector<PlanOutline>& inner,
                        std::vector<int64_t>& slot_bytes) {
  PlanOutline outline{BoundedCount(json, "inputs"), {}, {}, {}, {}, {}};
  if (BoundedCount(json, "constants") != slot_bytes.size())
    Refuse("it has other constants than the plan that it is of");
  // Sums of what is bounded here fit in 64 bits where the plan is built.
  for (const Json& arena : json["arenas"].AsList()) {
    if (arena.AsList().size() != 2) Refuse("an arena is a device and a size");
    Bounded(arena.AsList()[1], kMost, "the size of an arena");
  }
  outline.values.reserve(json["values"].AsList().size());
  for (const Json& value : json["values"].AsList()) {
    Within("value", outline.values.size(), [&] {
      const std::vector<Json>& fields = value.AsList();
      if (fields.size() != 6 && fields.size() != 7) Refuse("it has six fields, or seven");
      const std::string& kind = fields[0].AsString();
      const int64_t payload = Bounded(fields[1], kMost, "the payload");
      TensorForm form = MakeForm(fields[2], fields[3], fields[4]);
      const int64_t offset =
          fields.size() == 7 ? Bounded(fields[6], kMost - form.span, "the offset") : 0;
      if (kind == "constant") {
        int64_t& bytes = slot_bytes[Numbered(fields[1], slot_bytes.size(), "slot")];
        if (form.span > 0) bytes = std::max(bytes, (offset + form.span) * form.element_bytes);
      } else if (kind == "input" || kind == "raw_input") {
        const size_t input = Numbered(fields[1], outline.inputs, "input");
        const auto [known, is_new] = outline.input_values.emplace(input, outline.values.size());
        if (!is_new) RequireLike(form, outline.values[known->second], "input", payload);
      }
      outline.values.push_back(std::move(form));
    });
  }
  size_t step_number = 0;
  for (const Json& step : json["steps"].AsList()) {
    const std::string& kind = step["kind"].AsString();
    Within("step", step_number++, [&] {
      if (kind == "kernel") {
        if (step["library"].AsString() != "library") {
          Refuse("its library must be called \"library\", not " +
                 Quoted(step["library"].AsString()));
        }
        Kernel& kernel = outline.kernels.emplace_back();
        kernel.name = step["symbol"].AsString();
        kernel.sizes = step["sizes"].AsList().size();
        for (const Json& value : step["arguments"].AsList()) {
          kernel.bytes.push_back(
              outline.values[Numbered(value, outline.values.size(), "value")].Bytes());
        }
      } else if (kind == "operator") {
        outline.has_operators = true;
      } else if (kind == "callback") {
        outline.has_callbacks = true;
      } else if (kind == "branch" || kind == "loop") {
        CheckControlFlow(step, kind == "loop", outline.values, inner);
      } else if (kind != "copy" && kind != "check") {
        Refuse("no step in a file is called " + Quoted(kind));
      }
    });
  }
  outline.outputs = Each(json["outputs"], "output", [&](const Json& output) {
    return Numbered(output, outline.values.size(), "value");
  });
  return outline;
}

// What keeps a machine from running a target's library; "" where nothing does.
std::string WhyNotFor(const Json& target, const Processor& machine) {
  const std::string& system = target["system"].AsString();
  const std::string& processor = target["processor"].AsString();
  if (system != machine.system || processor != machine.name)
    return " is for " + Quoted(system) + " on " + Quoted(processor);
  std::string why;
  for (const Json& feature : target["features"].AsList()) {
    if (!machine.features.contains(feature.AsString()))
      why += (why.empty() ? " needs " : ", ") + Quoted(feature.AsString());
  }
  return why;
}

}  // namespace

std::string Quoted(std::string_view text) {
  constexpr size_t kLongest = 80;
  std::string quoted = "\"";
  for (const char c : text.substr(0, kLongest)) {
    quoted += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  }
  return quoted + (text.size() > kLongest ? "...\"" : "\"");
}

size_t Manifest::SegmentNamed(std::string_view name) const {
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i].name == name) return i;
  }
  Refuse("there is no segment " + Quoted(name));
}

const TensorForm& Manifest::FormOf(const Entry& entry, const Origin& origin) const {
  switch (origin.kind) {
    case Origin::Kind::kInput:
      return *entry.inputs[origin.number].tensor;
    case Origin::Kind::kConstant:
      return constants[origin.number].form;
    case Origin::Kind::kState:
      return constants[states[origin.number].constant].form;
    case Origin::Kind::kOutput:
      break;
  }
  Refuse("the form of a plan's output is the plan's to tell");
}

std::vector<bool> Manifest::UsedSegments() const {
  std::vector<bool> used(segments.size());
  const auto use = [&](size_t constant) { used[constants[constant].segment] = true; };
  const auto use_origin = [&](const Origin& origin) {
    if (origin.kind == Origin::Kind::kConstant) use(origin.number);
  };
  used[report] = true;
  for (const LibraryTarget& target : targets) used[target.library] = true;
  for (const State& state : states) use(state.constant);
  for (const Entry& entry : entries) {
    used[entry.plan] = true;
    if (entry.functions) used[*entry.functions] = true;
    for (const size_t slot : entry.slots) use(slot);
    for (const Origin& source : entry.sources) use_origin(source);
    for (const Update& update : entry.updates) {
      use_origin(update.source);
      if (update.index) use_origin(*update.index);
    }
    for (const CallResult& result : entry.results) {
      if (result.origin) use_origin(*result.origin);
    }
  }
  for (const Sample& sample : samples) {
    for (const auto* tensors : {&sample.inputs, &sample.outputs}) {
      for (const auto& constant : *tensors) {
        if (constant) use(*constant);
      }
    }
  }
  return used;
}

ManifestText::ManifestText(std::string_view text, uint64_t file_bytes)
    : json(Json::ParseUntrusted(text)), text_bytes(text.size()), file_bytes(file_bytes) {}

size_t ManifestText::variants() const {
  const Json* const others = json.Find("variants");
  const size_t count = 1 + (others == nullptr ? 0 : others->AsList().size());
  if (count > kMostVariants) {
    Refuse("it has " + std::to_string(count) + " variants; at most " +
           std::to_string(kMostVariants) + " are allowed");
  }
  return count;
}

const Json& ManifestText::Of(size_t variant, std::string_view name) const {
  return variant + 1 < variants() ? json["variants"].AsList()[variant][name] : json[name];
}

Manifest ReadManifest(const ManifestText& text, size_t variant) {
  return Reader::ReadWhole(text, variant);
}

std::vector<int64_t> SymbolsIn(
    const Entry& entry, const std::function<std::span<const int64_t>(size_t input)>& sizes_of) {
  std::vector<int64_t> values;
  for (const SizeSymbol& symbol : entry.symbols) {
    const std::span<const int64_t> sizes = sizes_of(symbol.input);
    const CallValue& input = entry.inputs[symbol.input];
    if (sizes.size() != input.tensor->sizes.size()) {
      Refuse("input " + std::to_string(symbol.input) + " (" + Quoted(input.name) + ") has " +
             std::to_string(sizes.size()) + " dimensions; it must have " +
             std::to_string(input.tensor->sizes.size()));
    }
    const int64_t more = sizes[symbol.dim] - symbol.offset;
    const int64_t value = more / symbol.factor;
    if (more % symbol.factor != 0 || value < symbol.least || value > symbol.most) {
      const auto size_of = [&](int64_t of) {
        return std::to_string(symbol.factor * of + symbol.offset);
      };
      Refuse("dimension " + std::to_string(symbol.dim) + " of input " +
             std::to_string(symbol.input) + " (" + Quoted(input.name) + ") is " +
             std::to_string(sizes[symbol.dim]) + "; the model was exported for " +
             size_of(symbol.least) + " to " + size_of(symbol.most) +
             (symbol.factor == 1 ? "" : " in steps of " + std::to_string(symbol.factor)));
    }
    values.push_back(value);
  }
  return values;
}

Entry EntryAt(const Manifest& manifest, const Entry& entry, const std::vector<int64_t>& values) {
  std::vector<std::string> names;
  for (const SizeSymbol& symbol : entry.symbols) names.push_back(symbol.name);
  const Json& any = *entry.any_sizes;
  const SizeTable table(std::move(names), any["sizes"]);
  SizedText text(any, table.size());
  text.Fill(table.At(values));
  Entry made = Reader(manifest).ReadEntry(text.json());
  made.symbols = entry.symbols;
  made.any_sizes = entry.any_sizes;
  return made;
}

PlanOutline OutlineOf(const Json& json) {
  std::vector<int64_t> slot_bytes(BoundedCount(json, "constants"));
  std::vector<PlanOutline> inner;
  if (const Json* const plans = json.Find("plans")) {
    for (const Json& plan : plans->AsList()) {
      inner.push_back(
          Within("plan", inner.size(), [&] { return ReadOutline(plan, inner, slot_bytes); }));
    }
  }
  PlanOutline outline = ReadOutline(json, inner, slot_bytes);
  for (const PlanOutline& plan : inner) {
    outline.kernels.insert(outline.kernels.end(), plan.kernels.begin(), plan.kernels.end());
    outline.has_operators |= plan.has_operators;
    outline.has_callbacks |= plan.has_callbacks;
  }
  outline.slot_bytes = std::move(slot_bytes);
  return outline;
}

void CheckEntry(const Manifest& manifest, const Entry& entry, const PlanOutline& plan) {
  if (entry.sources.size() != plan.inputs || entry.slots.size() != plan.slot_bytes.size()) {
    Refuse("its plan takes " + std::to_string(plan.inputs) + " inputs and " +
           std::to_string(plan.slot_bytes.size()) + " constants, and it gives " +
           std::to_string(entry.sources.size()) + " and " + std::to_string(entry.slots.size()));
  }
  if (plan.has_operators && !entry.needs_torch) {
    Refuse("its plan has operators of PyTorch, and it says that it needs none");
  }
  if (plan.has_callbacks && !entry.functions) {
    Refuse("its plan calls functions, and it has no segment of them");
  }
  if (!plan.kernels.empty() && manifest.targets.empty()) {
    Refuse("its plan has kernels, and the file has no library of them");
  }
  if (manifest.kernels) {
    for (const Kernel& called : plan.kernels) CheckCall(*manifest.kernels, called);
  }
  for (size_t slot = 0; slot < entry.slots.size(); ++slot) {
    const TensorForm& constant = manifest.constants[entry.slots[slot]].form;
    if (constant.Bytes() < plan.slot_bytes[slot]) {
      Refuse("slot " + std::to_string(slot) + ": its plan reads " +
             std::to_string(plan.slot_bytes[slot]) + " bytes of a constant of " +
             std::to_string(constant.Bytes()));
    }
  }
  const auto form_of = [&](const Origin& origin) -> const TensorForm& {
    if (origin.kind != Origin::Kind::kOutput) return manifest.FormOf(entry, origin);
    if (origin.number >= plan.outputs.size()) {
      Refuse("its plan has no output " + std::to_string(origin.number));
    }
    return plan.values[plan.outputs[origin.number]];
  };
  for (size_t i = 0; i < entry.updates.size(); ++i) {
    Within("update", i, [&] {
      const Update& update = entry.updates[i];
      const TensorForm& target = form_of(update.target);
      const TensorForm& source = form_of(update.source);
      TensorForm expected = target;
      if (update.index) {
        const TensorForm& index = form_of(*update.index);
        if (index.dtype != "int64" || index.sizes.size() != 1) {
          Refuse("its index must be int64 and have one dimension");
        }
        expected.sizes[update.dim] = index.sizes[0];
        // `index_put` expands what it writes: leading sizes of 1 may be missing.
        auto& sizes = expected.sizes;
        while (sizes.size() > source.sizes.size() && sizes.front() == 1) sizes.erase(sizes.begin());
      }
      if (!IsTensorLike(source, expected)) Refuse("its source has another dtype or other sizes");
    });
  }
  for (size_t i = 0; i < entry.results.size(); ++i) {
    Within("result", i, [&] {
      const CallResult& result = entry.results[i];
      const CallValue& output = entry.outputs[i];
      if (result.origin.has_value() != output.tensor.has_value()) {
        Refuse("it is a tensor, or a value, and is described as the other");
      }
      if (!result.origin) return;
      TensorForm form = form_of(*result.origin);
      if (result.view) {
        const View& view = *result.view;
        if (view.span > 0 && view.offset + view.span > form.span) {
          Refuse("the view ends behind what it views");
        }
        form.sizes = view.sizes;
      }
      if (!IsTensorLike(form, *output.tensor)) Refuse("it has another dtype or other sizes");
    });
  }
}

VariantChoice ChooseVariant(const ManifestText& text, const Processor& machine) {
  std::string lacking;
  for (size_t variant = 0; variant < text.variants(); ++variant) {
    const std::vector<Json>& targets = text.Of(variant, "targets").AsList();
    if (targets.empty()) return {variant, {}, {}};
    for (size_t i = 0; i < targets.size(); ++i) {
      const std::string why = WhyNotFor(targets[i], machine);
      if (why.empty()) return {variant, i, {}};
      constexpr size_t kLongest = 1000;
      if (lacking.size() < kLongest) {
        lacking += "; " + Quoted(targets[i]["library"].AsString()) + why.substr(0, kLongest);
      }
    }
  }
  return {0,
          {},
          "no library in it is for this processor (" + machine.system + " on " + machine.name +
              ")" + lacking +
              ": export the model for this processor, or run the file on one that it is for"};
}

}  // namespace torch_hybrid_backend
