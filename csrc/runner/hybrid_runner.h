/* libhybrid_runner: runs `.hybrid` files, which torch_hybrid_backend.export writes, without Python,
 * and without PyTorch but for files that call its operators.
 *
 *   HybridModel* model = hybrid_open("model.hybrid", NULL);
 *   if (model == NULL) { fprintf(stderr, "%s\n", hybrid_error()); exit(1); }
 *   DLManagedTensorVersioned* output;
 *   if (hybrid_run(model, NULL, &input, 1, &output, 1) != 0) ...
 *   output->deleter(output);
 *   hybrid_close(model);
 *
 * Tensors are DLPack's. Inputs are on the CPU, with any strides; the runner reads them, and writes
 * only to those that the model changes. Outputs own their memory, also after the model is closed.
 *
 * Failure: a function that can fail returns NULL or a number other than 0; hybrid_error says why.
 * A NULL where a pointer must be given is such a failure.
 *
 * Threads: any number may call hybrid_run at once, with one model too. Calls of a model with states
 * (a KV cache) wait for each other. hybrid_close must be the last call with a model.
 */
#ifndef HYBRID_RUNNER_H_
#define HYBRID_RUNNER_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* DLPack 1: include dlpack/dlpack.h before this header to use its own. */
#ifndef DLPACK_DLPACK_H_
typedef struct {
  uint32_t major;
  uint32_t minor;
} DLPackVersion;

typedef enum {
  kDLCPU = 1,
} DLDeviceType;

typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;

typedef enum {
  kDLInt = 0U,
  kDLUInt = 1U,
  kDLFloat = 2U,
  kDLOpaqueHandle = 3U,
  kDLBfloat = 4U,
  kDLComplex = 5U,
  kDLBool = 6U,
  kDLFloat8_e4m3fn = 10U,
  kDLFloat8_e4m3fnuz = 11U,
  kDLFloat8_e5m2 = 12U,
  kDLFloat8_e5m2fnuz = 13U,
  kDLFloat8_e8m0fnu = 14U,
  kDLFloat4_e2m1fn = 17U,
} DLDataTypeCode;

typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides; /* in elements; NULL: row-major and compact */
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned* self);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;
#endif /* DLPACK_DLPACK_H_ */

#define HYBRID_API __attribute__((visibility("default")))

/* Raised whenever a function of this header changes, not when one is added; hybrid_api_version is
 * the library's. */
#define HYBRID_API_VERSION 1
HYBRID_API int32_t hybrid_api_version(void);

/* An opened file. */
typedef struct HybridModel HybridModel;

typedef struct HybridOptions {
  size_t struct_size; /* sizeof(HybridOptions) */
  /* Threads of a call, at most 256 or 4 times the processors, whichever is more. 0: as
   * OMP_NUM_THREADS says, up to the same bound; without it, as many as there are processors. */
  int32_t threads;
  /* 1: the file is mapped, and processes share its memory; it must not change while it is open, and
   * only its owner or root may be able to write to it. 0: it is read to memory of this process. */
  int32_t share;
  /* 1: the samples in the file are not run when it is opened. */
  int32_t skip_sample;
  /* Public keys of Ed25519 that are trusted; one of them must have signed the file. They need
   * OpenSSL's libcrypto.so.3. NULL: signatures are not looked at. */
  const uint8_t (*keys)[32];
  size_t key_count;
  /* The folder of libtorch_cpu.so, for files with operators of PyTorch. NULL: where the loader
   * looks. The first such file decides for the process. */
  const char* torch_folder;
} HybridOptions;

#define HYBRID_OPTIONS_DEFAULT {sizeof(HybridOptions), 0, 1, 0, NULL, 0, NULL}

/* Reads a public key of Ed25519 from a file in PEM (`openssl pkey -in key.pem -pubout`). */
HYBRID_API int32_t hybrid_read_key(const char* path, uint8_t key[32]);

/* Opens a file: checks every byte that is for this processor, and that the outputs of its samples
 * come out. `options`: NULL for the defaults. */
HYBRID_API HybridModel* hybrid_open(const char* path, const HybridOptions* options);

/* Closes a model; NULL is ignored. */
HYBRID_API void hybrid_close(HybridModel* model);

/* A tensor that an entry takes or gives. All pointers live as long as the model. Of an entry for
 * many sizes these are the sizes and strides of its sample; the manifest has the ranges. */
typedef struct HybridTensor {
  const char* name;
  const char* dtype; /* as torch names it: "float32" */
  DLDataType dlpack_dtype;
  int32_t ndim;
  const int64_t* sizes;
  const int64_t* strides; /* inputs may have others, and are copied then */
} HybridTensor;

/* A function of the model. Inputs and results that are no tensors are fixed, and left out. */
typedef struct HybridEntry {
  size_t struct_size; /* sizeof(HybridEntry), set by the caller */
  const char* name;
  size_t input_count;
  const HybridTensor* inputs;
  size_t output_count;
  const HybridTensor* outputs;
} HybridEntry;

/* The number of entries; 0 where the call fails. */
HYBRID_API size_t hybrid_entry_count(const HybridModel* model);

/* The name of an entry; NULL where the call fails: there are no so many. */
HYBRID_API const char* hybrid_entry_name(const HybridModel* model, size_t index);

/* Fills in `entry`. `name`: NULL for the first one. */
HYBRID_API int32_t hybrid_describe(const HybridModel* model, const char* name, HybridEntry* entry);

/* The file's manifest, of all targets that the file has kernels for: a JSON text, which lives as
 * long as the model. */
HYBRID_API const char* hybrid_manifest(const HybridModel* model);

/* The name of the library of kernels that the model runs: of those in the file, the best that this
 * processor supports. "" for a model without kernels, NULL where the call fails. */
HYBRID_API const char* hybrid_library(const HybridModel* model);

/* Runs an entry. `entry`: NULL for the first one. `outputs` gets `output_count` new tensors, which
 * the caller deletes; where the call fails, it gets NULLs. Both counts must be the entry's. */
HYBRID_API int32_t hybrid_run(HybridModel* model, const char* entry, const DLTensor* const* inputs,
                              size_t input_count, DLManagedTensorVersioned** outputs,
                              size_t output_count);

/* Sets the states of the model to what they were when it was opened. */
HYBRID_API int32_t hybrid_reset(HybridModel* model);

/* What was wrong in the calling thread's last call that failed; "" where none did. The text lives
 * until the thread's next call that fails. */
HYBRID_API const char* hybrid_error(void);

#ifdef __cplusplus
}
#endif

#endif /* HYBRID_RUNNER_H_ */
