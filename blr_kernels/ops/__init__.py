"""The public ops. Each validates its tensors, then runs on the backend that was asked for."""

from blr_kernels.ops.backend import Backend, Explanation, explain, triton_available
from blr_kernels.ops.blast import blast_linear
from blr_kernels.ops.blast_grouped import blast_linear_grouped
from blr_kernels.ops.int8 import blast_linear_int8
from blr_kernels.ops.low_rank import low_rank_linear
from blr_kernels.ops.low_rank_grouped import low_rank_linear_grouped
from blr_kernels.ops.monarch import monarch_linear
from blr_kernels.ops.monarch_grouped import monarch_linear_grouped

__all__ = [
    "Backend",
    "Explanation",
    "blast_linear",
    "blast_linear_grouped",
    "blast_linear_int8",
    "explain",
    "low_rank_linear",
    "low_rank_linear_grouped",
    "monarch_linear",
    "monarch_linear_grouped",
    "triton_available",
]
