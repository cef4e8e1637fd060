from functools import cache

import jax
import numpy as np
import pytest
from oracles import assert_close, dense_lse, dense_scores, documents, segment_rows, visibility

from kvpop_jax.eviction import future_attention_target, token_layout

B, S, H, K, D = 2, 40, 6, 2, 8
SEGMENT_BS = segment_rows([[40], [-2, 19, -3, 1, 12]], S)
ASKS_BT = np.random.default_rng(5).random((B, S)) < 0.4


def random_inputs(dtype: str = "float64"):
    """q, k, and the log-sum-exp of their dense attention."""
    rng = np.random.default_rng(0)
    q_BTHD = rng.normal(size=(B, S, H, D), scale=2).astype(dtype)
    k_BSKD = rng.normal(size=(B, S, K, D)).astype(dtype)
    lse_BHT = dense_lse(q_BTHD, k_BSKD, visibility(np.full((B, K, S), S), SEGMENT_BS)).astype(dtype)
    return q_BTHD, k_BSKD, lse_BHT


@cache
def compute(group: str, sampled: bool):
    """The target with every number traced."""

    @jax.jit
    def run(q_BTHD, k_BSKD, lse_BHT, query_BT, window, floor, power=1.0):
        layout = token_layout(SEGMENT_BS, sinks=1, pool=4)
        return future_attention_target(
            q_BTHD, k_BSKD, lse_BHT, layout,
            window=window, group=group, power=power, query_BT=query_BT if sampled else None, floor=floor,
        )  # fmt: skip

    return run


def literal_target(q_BTHD, k_BSKD, lse_BHT, query_BT, window, floor, group, power=1.0):
    """Token by token: power mean over the later queries, log, joined over the group."""
    with np.errstate(over="ignore"):
        p_BHTS = np.exp(dense_scores(q_BTHD, k_BSKD) - np.where(np.isfinite(lse_BHT), lse_BHT, 0)[..., None])
    target_BKS = np.full((B, K, S), np.log(floor))
    for b in range(B):
        for document in documents(SEGMENT_BS[b]):
            for t in document:
                later = [d for d in document if d >= t + window and query_BT[b, d]]
                mass_H = ((p_BHTS[b, :, later, t] ** power).sum(0) / max(1, len(later))) ** (1 / power)
                mass_KG = mass_H.reshape(K, H // K)
                joined_K = {"max": np.max, "mean": np.mean}[group](mass_KG, axis=1)
                target_BKS[b, :, t] = np.log(floor + joined_K)
    return target_BKS


@pytest.mark.core
@pytest.mark.parametrize(("group", "sampled"), [("max", False), ("mean", True)], ids=["all_queries", "some_queries"])
def test_it_is_the_log_of_the_mean_attention_from_later_queries(group, sampled, float64):
    inputs = random_inputs()
    query_BT = ASKS_BT if sampled else np.ones((B, S), bool)
    for window, floor in ((1, 1e-8), (6, 1e-8), (6, 0.1), (S + 1, 1e-3)):
        target_BKS = compute(group, sampled)(*inputs, query_BT, window, floor)
        assert_close(target_BKS, literal_target(*inputs, query_BT, window, floor, group), 1e-13)


def test_a_power_above_1_takes_the_power_mean_of_the_attention(float64):
    inputs, query_BT = random_inputs(), np.ones((B, S), bool)
    for power in (2.0, 3.5):
        target_BKS = compute("max", False)(*inputs, query_BT, 6, 1e-8, power)
        assert_close(target_BKS, literal_target(*inputs, query_BT, 6, 1e-8, "max", power), 1e-13)


@pytest.mark.core
def test_tokens_that_no_later_query_sees_get_the_floor(float64):
    window, floor = 6, 1e-8
    target_BKS = np.asarray(compute("max", False)(*random_inputs(), ASKS_BT, window, floor))
    unseen_BS = np.ones((B, S), bool)
    for b in range(B):
        for document in documents(SEGMENT_BS[b]):
            unseen_BS[b, document.start : max(document.stop - window, document.start)] = False
    at_floor_BKS = np.isclose(target_BKS, np.log(floor), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(at_floor_BKS, np.broadcast_to(unseen_BS[:, None], at_floor_BKS.shape))


def test_the_lse_of_a_sparse_pass_weighs_each_query_by_one_over_its_kept_mass(float64):
    q_BTHD, k_BSKD, lse_BHT = random_inputs()
    expiry_BKS = np.arange(S) + np.random.default_rng(1).integers(1, 6, (B, K, S))
    sparse_lse_BHT = dense_lse(q_BTHD, k_BSKD, visibility(expiry_BKS, SEGMENT_BS))
    everyone_BT = np.ones((B, S), bool)
    target_BKS = compute("max", False)(q_BTHD, k_BSKD, sparse_lse_BHT, everyone_BT, 4, 1e-8)
    with np.errstate(invalid="ignore"):
        kept_BHT = np.exp(sparse_lse_BHT - lse_BHT)
    weighed_lse_BHT = lse_BHT + np.log(np.where(np.isfinite(lse_BHT), kept_BHT, 1))
    wanted_BKS = literal_target(q_BTHD, k_BSKD, weighed_lse_BHT, everyone_BT, 4, 1e-8, "max")
    assert_close(target_BKS, wanted_BKS, 1e-13)


@pytest.mark.core
def test_the_target_teaches_nothing_to_the_base_model():
    q_BTHD, k_BSKD, lse_BHT = random_inputs("float32")

    def total(q_BTHD, k_BSKD, lse_BHT):
        return compute("max", False)(q_BTHD, k_BSKD, lse_BHT, ASKS_BT, 6, 1e-8).sum()

    for gradient in jax.grad(total, argnums=(0, 1, 2))(q_BTHD, k_BSKD, lse_BHT):
        assert not np.any(gradient)
