"""Random numbers as PyTorch's kernels on NVIDIA GPUs draw them: the number of the generator that each element gets.

A generator is a seed and an offset. Thread number `thread` of a kernel has the Philox sequence with the counter (offset / 4, thread) and the
key `seed`; each group of four 32-bit numbers adds 1 to the lower half. So a number is a function of the seed, the offset and an element's
position (`loops.ops.RANDOM`): kernels may compute it wherever it is read, and get the same one.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x32-10); PyTorch 2.13,
aten/src/ATen/native/cuda/DistributionTemplates.h and Dropout.cu (who draws what).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_hybrid_backend.loops.index import Index
from torch_hybrid_backend.loops.ir import INDEX_DTYPE, Buffer, Expr
from torch_hybrid_backend.loops.ops import call, from_index
from torch_hybrid_backend.sizes.size import Dim, ceil_div, function

BLOCK = 256  # threads of a block of PyTorch's kernels
_GROUP = 4  # 32-bit numbers that a thread draws at once


@dataclass(slots=True, eq=False)
class Generator:
    """A device's generator as one call of a region finds it, and what the region's operators draw from it, in program order.

    `seed`: int64 without dimensions. `by_value`: as in `loops.ir.Buffer`, of it and of counters.
    """

    by_value: bool = False
    seed: Buffer = field(init=False)
    draws: list[Draw] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seed = Buffer((), INDEX_DTYPE, "seed", by_value=self.by_value)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers of the generator's state that kernels read."""
        return (self.seed, *(draw.counter for draw in self.draws))

    def draw(self, numel: Dim, blocks: int, *, per_group: int = _GROUP, vector: int = 1) -> Draw:
        """The numbers of the next operator, which has `numel` elements. blocks: `loops.policy.Abilities.random_blocks`; per_group, vector: as
        in `Draw`."""
        threads = BLOCK * function("min", blocks, ceil_div(numel, BLOCK))
        counter = Buffer((), INDEX_DTYPE, "counter", by_value=self.by_value)
        self.draws.append(Draw(self.seed, counter, numel, threads, per_group, vector))
        return self.draws[-1]


@dataclass(frozen=True, slots=True)
class Draw:
    """Numbers of one operator. Its `threads` go over the elements again and again, in the order in which they lie in memory.

    `counter`: groups that were taken of the generator before it, int64 without dimensions: equal operators have equal kernels. `groups`: how
    many it takes. `per_group`: elements that a thread makes of a group, 4 or, of float64, 2. With a `vector` of 1 the threads take one element
    each in every turn, and a new group when one is used up; else a thread takes so many neighbours, and new groups in every turn.

    Kernels find the place of an element from its position: neighbours that share a group shall be seen to.
    """

    seed: Buffer
    counter: Buffer
    numel: Dim
    threads: Dim
    per_group: int
    vector: int

    @property
    def groups(self) -> Dim:
        # What PyTorch takes, which with vectors may be other than what its threads use.
        return (self.numel - 1) // (self.threads * self.per_group) + 1

    def at(self, op: str, dtype: str, position: Index) -> Expr:
        """The element at a position in memory, as `op` of `loops.ops.RANDOM` has it."""
        is_narrow = (
            not isinstance(self.numel, int) or self.numel < 1 << 31
        )  # of sizes not known yet as kernels address them
        integer = "int32" if is_narrow else "int64"
        place = [from_index(n, integer) for n in (position, self.threads, self.vector, self.per_group)]
        return call(op, self.seed.at(()), self.counter.at(()), *place, dtype=dtype)
