"""The operations KVpop-JAX is built on, one folder each: `api`, `reference`, and a kernel per platform.

- `masked_attention`: attention under per-token expiry, with a differentiable log-sum-exp.
- `received_log_mass`: the attention every key receives from later queries, without a dense map.
- `mlstm_chunkwise`: the matrix memory of the scorers, in linear time.
- `scorer_step`: one token's work of the recurrent scorer and the leaving token's priority, in decoding.
- `take_slot`: the slot that a new token takes in a bounded cache, in decoding.
- `decode_attention`: one query against the slots of a bounded cache, the new row written in place.
- `thin_matmul`: the large products of a layer, with the norm, gate or residual beside each, for few rows.
- `split_qkv`: queries, keys and values of every head from a fused projection, normed and rotated.

The reference of an operation is plain JAX: right, readable, generic over dtypes up to float64 and bounded in memory.
A kernel is held against it by one inherited test suite.
"""

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.masked_attention import NEVER, masked_attention
from pallas_kernels.mlstm_chunkwise import MLSTMState, mlstm_chunkwise, mlstm_step
from pallas_kernels.received_log_mass import received_log_mass
from pallas_kernels.scorer_step import ScorerWeights, scorer_step
from pallas_kernels.split_qkv import split_qkv
from pallas_kernels.take_slot import take_slot
from pallas_kernels.thin_matmul import matmul_add, norm_matmul, norm_swiglu

__all__ = [
    "NEVER",
    "MLSTMState",
    "ScorerWeights",
    "decode_attention",
    "masked_attention",
    "matmul_add",
    "mlstm_chunkwise",
    "mlstm_step",
    "norm_matmul",
    "norm_swiglu",
    "received_log_mass",
    "scorer_step",
    "split_qkv",
    "take_slot",
]
