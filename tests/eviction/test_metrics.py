import jax
import numpy as np
import pytest
from eviction_oracles import HEADS, LENGTH, best, documents_of, layout_of, priorities, problems
from hypothesis import given, settings
from oracles import dense_lse, segment_rows, visibility

from kvpop_jax.eviction import kept_mass, target_recall

compute_recall = jax.jit(target_recall, static_argnames="stride")


@pytest.mark.core
def test_kept_mass_is_the_share_of_dense_attention_on_kept_keys(float64):
    stride = 3
    B, S, H, K, D = 2, 40, 4, 2, 8
    segment_BS = segment_rows([[40], [19, -3, 12]], S)
    rng = np.random.default_rng(0)
    q_BTHD, k_BSKD = rng.normal(size=(B, S, H, D), scale=3), rng.normal(size=(B, S, K, D))
    # Some keys expire before they are seen, so that some real queries see nothing and are left out of the mean.
    visible_BKTS = visibility(np.arange(S) + rng.integers(0, 4, (B, K, S)), segment_BS)
    sparse_lse_BHT = dense_lse(q_BTHD, k_BSKD, visible_BKTS)
    lse_BHT = dense_lse(q_BTHD, k_BSKD, visibility(np.full((B, K, S), S), segment_BS))
    sampled_T = np.arange(S - 1, -1, -stride)
    counted_BHQ = np.isfinite(sparse_lse_BHT[..., sampled_T])
    assert 0 < counted_BHQ.sum() < counted_BHQ.size
    wanted = np.mean(np.exp((sparse_lse_BHT - np.where(np.isfinite(lse_BHT), lse_BHT, 0))[..., sampled_T][counted_BHQ]))
    got = jax.jit(kept_mass, static_argnames="stride")(q_BTHD, k_BSKD, sparse_lse_BHT, segment_BS, stride=stride)
    assert got == pytest.approx(wanted, rel=1e-12)


@pytest.mark.core
def test_kept_mass_of_dense_attention_is_one_and_of_an_empty_batch_zero():
    B, S, H, K, D = 2, 40, 4, 2, 8
    rng = np.random.default_rng(0)
    q_BTHD, k_BSKD = (rng.normal(size=(B, S, heads, D)).astype(np.float32) for heads in (H, K))
    for segment, share in ((1, 1.0), (0, 0.0)):
        segment_BS = np.full((B, S), segment, np.int32)
        lse_BHT = dense_lse(q_BTHD, k_BSKD, visibility(np.full((B, K, S), S), segment_BS)).astype(np.float32)
        got = jax.jit(kept_mass, static_argnames="stride")(q_BTHD, k_BSKD, lse_BHT, segment_BS, stride=7)
        assert got == pytest.approx(share, abs=1e-5)


@pytest.mark.core
@settings(max_examples=40)
@given(problem=problems(), student_BKS=priorities(), target_BKS=priorities())
def test_recall_is_the_share_of_the_targets_pool_that_the_student_holds(problem, student_BKS, target_BKS):
    stride, shares = 2, []
    for document in documents_of(problem):
        for q in set(document.tokens) & set(range(LENGTH - 1, -1, -stride)):
            eligible = document.eligible(q, problem.window)
            for head in range(HEADS) if len(eligible) > document.pool > 0 else ():
                student, target = (
                    set(best(x[document.row, head], eligible, document.pool)) for x in (student_BKS, target_BKS)
                )
                shares.append(len(student & target) / document.pool)
    layout = layout_of(**problem.layout_arguments)
    got = compute_recall(student_BKS, target_BKS, layout, window=problem.window, stride=stride)
    assert got == pytest.approx(np.mean(shares) if shares else 0.0, abs=1e-6)
