"""Numbers that several stages must agree on: what one leaves as it is because another takes it."""

from torch_hybrid_backend.sizes.size import MAX_SIZE

# No layout keeps more channels together: channels from a multiple of it on are whole blocks (AVX-512 has 16 lanes of float32).
MAX_CHANNELS_TOGETHER = 16
# Weights of fewer elements come from memory in 2 us, at 30 GB/s in float32: less than a kernel takes to begin. They are not kept in few bits.
LEAST_QUANTIZED_ELEMENTS = 1 << 14
# Elements that kernels address. A position at or beyond it (INT64_MAX is "to the end") is behind every dimension.
MAX_ELEMENTS = MAX_SIZE
# A first call that tries several ways of computing keeps what it tried until it has chosen, up to so many bytes: its peak of memory is to be
# about that of a later call.
MAX_HELD_BYTES = 32 << 20
# Bytes by which every address can be divided that a kernel of a GPU is given: plans copy what lies elsewhere. csrc/include/device.h has it too.
ADDRESS_ALIGNMENT = 16
# Bytes by which the addresses can be divided of what a plan keeps in a GPU's memory for its steps. csrc/include/device.h has it too.
MEMORY_ALIGNMENT = 256
