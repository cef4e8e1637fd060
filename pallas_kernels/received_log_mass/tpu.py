"""`received_log_mass` on TPU: attention transposed, an online log-sum-exp over blocks of queries.

The grid is (B, K, blocks of keys, blocks of queries), queries innermost. A step holds in VMEM a block of K and the ends
of its keys' documents, a block of queries of all heads of the group, their log-sum-exp and positions (along lanes), and
for every key and head the running maximum and sum. Queries come in the order of their positions, so those that count
for a block of keys are consecutive blocks: scalar memory holds the first and the one past the last of each, and skipped
steps fetch nothing. A subset of the queries is moved to the front first, so that the cost falls with its share.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.segments import segment_end
from pallas_kernels.tpu_tiles import FLOOR, LANES, LOG2_E, MASKED, dot, lanes, round_up, to_rows, vmem_limit

HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 16
_ROWS = 1024
_KEYS = 512


def refuses(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    lse_BHT: Float[Array, "B H T"],
    segment_BS: Int[Array, "B S"],
    delay: int,
    query_BT: Bool[Array, "B T"] | None = None,
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    group = q_BTHD.shape[2] // k_BSKD.shape[2]
    if q_BTHD.dtype != k_BSKD.dtype or q_BTHD.dtype not in (jnp.bfloat16, jnp.float32):
        return f"takes q and k both in bfloat16 or both in float32, not {q_BTHD.dtype} and {k_BSKD.dtype}"
    if q_BTHD.shape[3] not in HEAD_DIMS:
        return f"takes head dimensions {', '.join(map(str, HEAD_DIMS))}, not {q_BTHD.shape[3]}"
    if group > MAX_GROUP:
        return f"takes at most {MAX_GROUP} query heads per KV head, not {group}"
    return None


def received_log_mass(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    lse_BHT: Float[Array, "B H T"],
    segment_BS: Int[Array, "B S"],
    delay: int,
    query_BT: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B H S"]:
    """See `api.received_log_mass`."""
    q_BTHD, k_BSKD, lse_BHT = lax.stop_gradient((q_BTHD, k_BSKD, lse_BHT))
    B, T, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    counts_BHT = jnp.isfinite(lse_BHT)
    # What does not count is as far below every other term as a masked one.
    lse_BHT = jnp.where(counts_BHT, lse_BHT.astype(jnp.float32), -MASKED)
    position_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    if query_BT is not None:
        # The others follow at positions past the row, where no document reaches.
        asks_BT = query_BT & counts_BHT.any(1) & (segment_BS > 0)
        position_BT = jnp.sort(jnp.where(asks_BT, position_BT, T + position_BT), axis=1)
        q_BTHD = jax.vmap(lambda q_THD, at_T: q_THD[at_T])(q_BTHD, position_BT % T)
        lse_BHT = jax.vmap(lambda lse_HT, at_T: lse_HT[:, at_T])(lse_BHT, position_BT % T)
    L, C = _block_sizes(T, H // K)
    pad = round_up(T, max(L, C)) - T
    q_BTHD, k_BSKD = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q_BTHD, k_BSKD))
    lse_BHT = jnp.pad(lse_BHT, ((0, 0), (0, 0), (0, pad)))
    position_BT = jnp.pad(position_BT, ((0, 0), (0, pad)), constant_values=2 * T)
    end_BS = jnp.pad(segment_end(segment_BS), ((0, 0), (0, pad)))
    q_BKGTD = jnp.moveaxis(q_BTHD.reshape(B, T + pad, K, H // K, D), 1, 3)
    lse_BKGT = lse_BHT.reshape(B, K, H // K, T + pad)
    mass_BKGS = _receive(q_BKGTD, jnp.swapaxes(k_BSKD, 1, 2), lse_BKGT, position_BT, end_BS, delay, L, C)
    return mass_BKGS.reshape(B, H, T + pad)[..., :T]


def _block_sizes(T: int, group: int) -> tuple[int, int]:
    """Queries (each with all heads of the group) and keys of a block."""
    longest = 1 << (max(T, LANES) - 1).bit_length()
    queries = max(LANES, min(512, 1 << (_ROWS // group).bit_length() - 1))
    return min(queries, longest), min(_KEYS, longest)


def asking_blocks(
    position_BT: Int[Array, "B T"], end_BS: Int[Array, "B S"], delay: int, L: int, C: int
) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """First block of queries, and the one past the last, that may count for each block of keys."""
    B, S = end_BS.shape
    last_Bn = position_BT.reshape(B, -1, L)[:, :, -1]
    first_Bn = position_BT.reshape(B, -1, L)[:, :, 0]
    earliest_N = jnp.arange(0, S, C, dtype=jnp.int32) + delay
    end_BN = end_BS.reshape(B, -1, C).max(-1)
    start_BN = jnp.sum(last_Bn[:, None] < earliest_N[:, None], axis=-1, dtype=jnp.int32)
    stop_BN = jnp.sum(first_Bn[:, None] < end_BN[:, :, None], axis=-1, dtype=jnp.int32)
    return start_BN, stop_BN


def _receive(q_BKGTD, k_BKSD, lse_BKGT, position_BT, end_BS, delay: int, L: int, C: int):
    B, K, G, T, D = q_BKGTD.shape
    S = k_BKSD.shape[2]
    n, N = T // L, S // C

    def q_block(b, h, j, i, start_ref, stop_ref):
        start = jnp.minimum(start_ref[b * N + j], n - 1)
        return jnp.clip(i, start, jnp.maximum(start, stop_ref[b * N + j] - 1))

    pairs = B * K * sum(n - min(n, j * C // L) for j in range(N))
    size = q_BKGTD.dtype.itemsize
    return pl.pallas_call(
        partial(_kernel, delay, N),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, K, N, n),
            in_specs=[
                pl.BlockSpec((None, None, G, L, D), lambda *at: (at[0], at[1], 0, q_block(*at), 0)),
                pl.BlockSpec((None, None, C, D), lambda b, h, j, i, *_: (b, h, j, 0)),
                pl.BlockSpec((None, None, G, L), lambda *at: (at[0], at[1], 0, q_block(*at))),
                pl.BlockSpec((None, 1, L), lambda *at: (at[0], 0, q_block(*at))),
                pl.BlockSpec((None, 1, C), lambda b, h, j, i, *_: (b, 0, j)),
            ],
            out_specs=pl.BlockSpec((None, None, G, C), lambda b, h, j, i, *_: (b, h, 0, j)),
            scratch_shapes=[pltpu.VMEM((G, C), jnp.float32), pltpu.VMEM((G, C), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, K, G, S), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit(q_BKGTD.dtype),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * G * L * C * D,
            transcendentals=pairs * G * L * C,
            bytes_accessed=pairs * G * L * (D * size + 4) + B * K * S * (D * size + 4 * G),
        ),
        name="received_log_mass",
    )(
        *(x_BN.reshape(-1) for x_BN in asking_blocks(position_BT, end_BS, delay, L, C)),
        q_BKGTD, k_BKSD, lse_BKGT, position_BT[:, None], end_BS[:, None],
    )  # fmt: skip


def _kernel(
    delay, num_k, start_ref, stop_ref, q_ref, k_ref, lse_ref, position_ref, end_ref, mass_ref, max_ref, sum_ref
):
    j, i = pl.program_id(2), pl.program_id(3)
    at = pl.program_id(0) * num_k + j
    G, L, D = q_ref.shape
    C = k_ref.shape[0]

    @pl.when(i == 0)
    def start():
        max_ref[...] = jnp.full_like(max_ref, FLOOR)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when((start_ref[at] <= i) & (i < stop_ref[at]))
    def step():
        s_RS = dot(q_ref[...].reshape(G * L, D), k_ref[...], ((1,), (1,)))
        position_LS = lanes(to_rows(position_ref[...]), C)
        key_LS = j * C + lax.broadcasted_iota(jnp.int32, (L, C), 1)
        mask_LS = jnp.where((key_LS + delay <= position_LS) & (position_LS < end_ref[...]), 0, MASKED)
        for g in range(G):
            head = pl.ds(g, 1)
            lse_LS = lanes(to_rows(lse_ref[head]), C)
            mass_LS = (s_RS[g * L : (g + 1) * L] * D**-0.5 - lse_LS) * LOG2_E + mask_LS
            before_1S = max_ref[head]
            after_1S = jnp.maximum(before_1S, jnp.max(mass_LS, axis=0, keepdims=True))
            max_ref[head] = after_1S
            added_1S = jnp.sum(jnp.exp2(mass_LS - after_1S), axis=0, keepdims=True)
            sum_ref[head] = sum_ref[head] * jnp.exp2(before_1S - after_1S) + added_1S

    @pl.when(i == pl.num_programs(3) - 1)
    def finish():
        none_GS = sum_ref[...] == 0
        log_GS = (max_ref[...] + jnp.log2(jnp.where(none_GS, 1, sum_ref[...]))) / LOG2_E
        mass_ref[...] = jnp.where(none_GS, -jnp.inf, log_GS)
