"""The input pipeline: shuffled documents, packed into rows, batched, resumable (grain)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import grain
import jax
import numpy as np
from absl import flags
from grain import experimental as grain_experimental
from jaxtyping import Array, Bool, Int

from kvpop_jax.config import DataConfig
from kvpop_jax.errors import UserError
from kvpop_jax.training.documents import Encoder
from kvpop_jax.training.sources import Source

_BINS = 16
"""Rows that are filled side by side: more of them leave less padding, and hold more documents back."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_BS", "segment_BS", "position_BS", "prompt_BS", "loss_BS"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Batch:
    """Rows of packed documents.

    Attributes:
        token_BS: token ids, 0 in padding.
        segment_BS: document of each token, in contiguous runs of growing numbers; 0 is padding, at the end.
        position_BS: position within the document.
        prompt_BS: the token belongs to its document's prompt.
        loss_BS: the token is to be predicted (from the one before it).
    """

    token_BS: Int[Array, "B S"]
    segment_BS: Int[Array, "B S"]
    position_BS: Int[Array, "B S"]
    prompt_BS: Bool[Array, "B S"]
    loss_BS: Bool[Array, "B S"]


def make_iterator(
    source: Source,
    encoder: Encoder,
    settings: DataConfig,
    *,
    batch_size: int,
    seed: int,
) -> grain.DatasetIterator:
    """Endless batches: every document once per epoch, in an order that depends on the seed only.

    The iterator is checkpointed with `get_state` and `set_state`. Of several processes each makes the whole batches and
    uses its own rows: which documents share a row depends on all that came before, and only so can a run go on with
    another number of processes.

    Args:
        source: the documents.
        encoder: turns rows into arrays.
        settings: packing and workers.
        batch_size: rows of a batch.
        seed: seed of the order.

    Returns:
        An iterator over dicts of arrays that `to_batch` understands.
    """
    documents = grain.MapDataset.source(source).seed(seed).shuffle().repeat().map(encoder)
    # One reading thread: the work is Python, and more threads would only take turns.
    rows = grain_experimental.FirstFitPackIterDataset(
        documents.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)),
        length_struct=dict.fromkeys(("token", "prompt", "loss", "overlong"), encoder.seq_len) | {"own_row": 1},
        num_packing_bins=_BINS,
        seed=seed,
    )
    batches = rows.map(partial(_join, shared=settings.packing == "shared")).batch(batch_size, drop_remainder=True)
    if settings.workers:
        # Grain's worker pool reads absl flags, which only a program started through absl has parsed.
        flags.FLAGS.mark_as_parsed()
        return iter(batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=settings.workers)))
    return iter(grain_experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=2))


def to_batch(arrays: dict[str, np.ndarray]) -> tuple[Batch, dict[str, int]]:
    """A batch of NumPy arrays, and counts: `tokens` (not padding), `documents` laid in, `overlong` ones met.

    Raises:
        UserError: every document is longer than a row, so that there is nothing but padding.
    """
    counts = {
        "tokens": int(np.count_nonzero(arrays["segment"])),
        "documents": int(arrays["documents"].sum()),
        "overlong": int(arrays["overlong"].sum()),
    }
    if counts["tokens"] == 0:
        raise UserError(
            f"data: the last {counts['overlong']} documents are all longer than seq_len ({arrays['token'].shape[1]}); "
            "raise seq_len or set data.overlong to truncate"
        )
    kinds = {"token": np.int32, "segment": np.int32, "position": np.int32, "prompt": bool, "loss": bool}
    fields: list[Any] = [
        np.asarray(arrays[name], kind) for name, kind in kinds.items()
    ]  # placed before a step has them
    return Batch(*fields), counts


def _join(row: dict[str, Any], *, shared: bool) -> dict[str, np.ndarray]:
    """Drops what packing added and is not needed; `shared` makes one document of the whole row."""
    segment, position = row["token_segment_ids"], row["token_positions"]
    documents = np.asarray(len(np.unique(segment[segment > 0])), np.int32)
    if shared:
        position = np.where(segment > 0, np.arange(len(segment), dtype=np.int32), 0)
        # Only the first document's prompt is a beginning of the row: it alone can be pinned.
        row = row | {"prompt": row["prompt"] * (segment == segment[0])}
        segment = np.minimum(segment, 1)
    return {
        "token": row["token"],
        "segment": segment,
        "position": position,
        "prompt": row["prompt"],
        "loss": row["loss"],
        "documents": documents,
        "overlong": row["overlong"].sum(dtype=np.int32),
    }
