"""Operators that are left to PyTorch for good, and the reason: what generated loops gain nothing on, or cannot say.

Others without a lowering are unknown (`Reason.UNKNOWN_OPERATOR`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from torch_hybrid_backend.core.verdict import Reason, Refused

_SELECTS = "PyTorch's own operator is called: it orders elements, by steps that depend on their values"
_SEARCHES = "PyTorch's own operator is called: it searches, by steps that depend on values"
_TRANSFORMS = "PyTorch's library for FFTs is called: its results are complex, which kernels cannot hold"
_COMPLEX = "PyTorch's own operator is called: it computes with complex numbers, which kernels cannot hold"
_FACTORIZES = "PyTorch's library for linear algebra (LAPACK) is called"
_PAIRS = "PyTorch's own operator is called: it visits pairs of rows"
_ADDS_UP = "PyTorch's own operator is called: where it writes depends on values"
_UNWRITTEN = "there is nothing to compute: the memory is left as it was"
_SIZED_BY_DATA = "how large the result is depends on its data"
_NUMBER = "it reads a number from a tensor, on which the rest of the graph may depend"
_DRAWS = "PyTorch's own operator is called: eager's random generator draws its numbers"

_REASONS = {
    (Reason.LIBRARY, _SELECTS): "sort topk kthvalue median nanmedian mode msort argsort",
    (Reason.LIBRARY, _SEARCHES): "searchsorted bucketize",
    (Reason.LIBRARY, _TRANSFORMS): "_fft_r2c _fft_c2c _fft_c2r",
    (Reason.LIBRARY, _COMPLEX): "view_as_real view_as_complex complex polar angle _conj _conj_physical",
    (Reason.LIBRARY, _PAIRS): "_cdist_forward _pdist_forward",
    (Reason.LIBRARY, _ADDS_UP): "masked_scatter histc bincount",
    (Reason.LIBRARY, _FACTORIZES): (
        "_linalg_svd _linalg_eigh _linalg_solve_ex _linalg_det _linalg_slogdet linalg_qr linalg_inv_ex linalg_lu_factor_ex linalg_lu "
        "linalg_lu_solve linalg_cholesky_ex linalg_eig linalg_solve_triangular linalg_lstsq linalg_pinv cholesky_solve cholesky_inverse"
    ),
    (Reason.LIBRARY, _UNWRITTEN): "empty empty_strided empty_permuted empty_like new_empty new_empty_strided",
    (Reason.DATA_DEPENDENT, _SIZED_BY_DATA): "nonzero masked_select _unique2 unique_dim unique_consecutive",
    (Reason.DATA_DEPENDENT, _NUMBER): "_local_scalar_dense",
    (Reason.RANDOM, _DRAWS): "randperm multinomial poisson binomial",
}


def left_to_pytorch(operator: str) -> Refused | None:
    """The refusal of an operator by its name ("sort"); None if nothing is known of it."""
    return _by_name().get(operator)


@functools.cache
def _by_name() -> Mapping[str, Refused]:
    return MappingProxyType(
        {name: Refused(code, why) for (code, why), names in _REASONS.items() for name in names.split()}
    )
