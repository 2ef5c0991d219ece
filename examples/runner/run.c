/* Runs the first function of a .hybrid file on zeros, in C.
 *
 *   cc run.c -lhybrid_runner -o run && ./run model.hybrid
 */
#include <hybrid_runner.h>
#include <stdio.h>
#include <stdlib.h>

static int fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, hybrid_error());
  return 1;
}

static size_t bytes_of(const HybridTensor* tensor) {
  size_t bytes = ((size_t)tensor->dlpack_dtype.bits * tensor->dlpack_dtype.lanes + 7) / 8;
  for (int32_t d = 0; d < tensor->ndim; ++d) bytes *= (size_t)tensor->sizes[d];
  return bytes;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s model.hybrid\n", argv[0]);
    return 1;
  }
  HybridModel* model = hybrid_open(argv[1], NULL);
  if (model == NULL) return fail("opening the model");
  HybridEntry entry = {sizeof(entry), NULL, 0, NULL, 0, NULL};
  if (hybrid_describe(model, NULL, &entry) != 0) return fail("describing the model");

  DLTensor* inputs = calloc(entry.input_count + 1, sizeof(*inputs));
  const DLTensor** pointers = calloc(entry.input_count + 1, sizeof(*pointers));
  DLManagedTensorVersioned** outputs = calloc(entry.output_count + 1, sizeof(*outputs));
  for (size_t i = 0; i < entry.input_count; ++i) {
    const HybridTensor* takes = &entry.inputs[i];
    inputs[i].data = calloc(bytes_of(takes) + 1, 1);
    inputs[i].device.device_type = kDLCPU;
    inputs[i].ndim = takes->ndim;
    inputs[i].dtype = takes->dlpack_dtype;
    inputs[i].shape = (int64_t*)takes->sizes;
    pointers[i] = &inputs[i];
  }
  if (hybrid_run(model, NULL, pointers, entry.input_count, outputs, entry.output_count) != 0)
    return fail("running the model");

  for (size_t i = 0; i < entry.output_count; ++i) {
    const DLTensor* output = &outputs[i]->dl_tensor;
    printf("%s: %s(", entry.outputs[i].name, entry.outputs[i].dtype);
    for (int32_t d = 0; d < output->ndim; ++d)
      printf("%s%lld", d == 0 ? "" : ", ", (long long)output->shape[d]);
    printf(")\n");
    outputs[i]->deleter(outputs[i]);
  }
  for (size_t i = 0; i < entry.input_count; ++i) free(inputs[i].data);
  free(inputs);
  free(pointers);
  free(outputs);
  hybrid_close(model);
  return 0;
}
