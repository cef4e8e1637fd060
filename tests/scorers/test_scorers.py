"""Scorers: the parallel form against decoding token by token and against the equations, and what must never leak."""

from dataclasses import replace
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvpop_jax.scorers import MLPSettings, MLSTMSettings, ScorerDims, ScorerModule, mlp_scorer, mlstm_scorer
from pallas_kernels.leaving import leaving_at_once

B, S, WINDOW = 3, 40, 6
DIMS = ScorerDims(hidden_size=12, num_kv_heads=2, head_dim=8)
SEGMENT_BS = np.array(
    [
        [1] * 18 + [2] * 3 + [3] * 19,  # three documents, one shorter than the window
        [4] * 7 + [9] * 24 + [0] * 9,  # one that just fills the window; padding at the end
        [2] * 40,
    ],
    np.int32,
)
SCORERS = {
    "mlstm": mlstm_scorer(MLSTMSettings(key_dim=3, value_dim=5, skip_width=7), DIMS),
    "mlstm_immediate": mlstm_scorer(MLSTMSettings(read="immediate"), DIMS),
    "mlp": mlp_scorer(MLPSettings(width=16), DIMS),
}


def random_params(scorer, seed: int = 0):
    """Initial parameters, shaken so that no head, gate or bias is zero; float32 draws, whatever types are enabled."""
    with jax.enable_x64(False):
        params = scorer.init(jax.random.key(seed))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(0.4 * rng.normal(size=leaf.shape), leaf.dtype), params)


def random_tokens(dtype=jnp.float32, seed: int = 1):
    """(hidden_BSE, k_BSKD, v_BSKD)."""
    rng = np.random.default_rng(seed)
    head = (B, S, DIMS.num_kv_heads, DIMS.head_dim)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in ((B, S, DIMS.hidden_size), head, head))


def to_float64(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), tree)


def leaves_window(segment_BS, delay: int):
    """Where the token `delay` later is of the same document."""
    later = np.pad(segment_BS, ((0, 0), (0, delay)))[:, delay:]
    return (segment_BS != 0) & (segment_BS == later)


@partial(jax.jit, static_argnums=0)
def parallel_scores(scorer, params, tokens, segment_BS=SEGMENT_BS):
    return scorer.parallel(params, scorer.init_state(B, WINDOW), *tokens, jnp.asarray(segment_BS), delay=WINDOW)


@partial(jax.jit, static_argnums=0)
def decoded_scores(scorer, params, tokens):
    """Token by token: `step` reads out what leaves the window; a new document starts afresh, padding is not decoded."""
    hidden, k, v = tokens
    first = to_float64(scorer.init_state(B, WINDOW)) if k.dtype == jnp.float64 else scorer.init_state(B, WINDOW)
    segments = jnp.asarray(SEGMENT_BS)
    starts = segments != jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]

    def pick(which_B, yes, no):
        return jax.tree.map(lambda a, b: jnp.where(which_B.reshape(-1, *[1] * (a.ndim - 1)), a, b), yes, no)

    def body(state, token):
        starts_B, segment_B, *new, late_k, late_v = token
        # At position 0 a priority is a score.
        leaving = leaving_at_once(jnp.zeros_like(segment_B), late_k, late_v)
        after, score_BK = scorer.step(params, pick(starts_B, first, state), *new, leaving)
        return pick(segment_B != 0, after, state), score_BK

    def late(x):
        return jnp.pad(x, ((0, 0), (WINDOW, 0), (0, 0), (0, 0)))[:, :S]

    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (starts, segments, hidden, k, v, late(k), late(v)))
    state, read_SBK = jax.lax.scan(body, first, by_time)
    score_BKS = jnp.pad(jnp.moveaxis(read_SBK, 0, 2), ((0, 0), (0, 0), (0, WINDOW)))[..., WINDOW:]
    return jnp.where(leaves_window(SEGMENT_BS, WINDOW)[:, None], score_BKS, 0), state


def scores_by_the_equations(params, tokens):
    """The delayed mLSTM score as one sum per token over everything its document holds up to t + window: O(S^2)."""
    hidden, k, v = tokens

    def unit(x):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)

    x = jnp.concatenate([unit(k), unit(v)], axis=-1)
    q, key, value = (jnp.einsum("bski,kio->bsko", x, w) for w in (params.q_KIX, params.k_KIX, params.v_KIY))
    i, f = jnp.split(15 * jnp.tanh((hidden @ params.gates_E2K + params.gate_bias_2K) / 15), 2, axis=-1)
    total = jnp.cumsum(jnp.log(jax.nn.sigmoid(f)), axis=1)
    reader = np.minimum(np.arange(S) + WINDOW, S - 1)
    written = (np.arange(S) <= reader[:, None]) & (SEGMENT_BS[:, :, None] == SEGMENT_BS[:, None, :])
    log_weight = jnp.where(written[..., None], total[:, reader, None] - total[:, None] + i[:, None], -jnp.inf)
    m = jnp.maximum(jax.lax.stop_gradient(log_weight).max(axis=2), 0)
    weight = jnp.exp(log_weight) * jnp.einsum("bskx,btkx->bstk", q, key) / np.sqrt(q.shape[-1])
    norm = jnp.maximum(jnp.abs(weight.sum(axis=2)), 1) + 1e-6 * jnp.exp(m)
    h = jnp.einsum("bstk,btky->bsky", weight, value) / norm[..., None]
    skip = jax.nn.silu(jnp.einsum("bski,kif->bskf", x, params.skip.in_KIF) + params.skip.in_bias_KF)
    score = jnp.einsum("bsky,ky->bks", unit(h), params.out_KY) + params.out_bias_K[:, None]
    score += jnp.einsum("bskf,kf->bks", skip, params.skip.out_KF) + params.skip.out_bias_K[:, None]
    return jnp.where(leaves_window(SEGMENT_BS, WINDOW)[:, None], score, 0)


def value_and_gradient(scores, params):
    """Scores, and the gradient of a random functional of them."""
    weight = np.random.default_rng(5).normal(size=(B, DIMS.num_kv_heads, S))

    def loss(params):
        score_BKS = scores(params)
        return jnp.sum(weight.astype(score_BKS.dtype) * score_BKS), score_BKS

    gradient, score_BKS = jax.jit(jax.grad(loss, has_aux=True))(params)
    return score_BKS, gradient


@cache
def exact(name: str, dtype=jnp.float32):
    """The parallel form in float64, on values that `dtype` holds."""
    with jax.enable_x64(True):
        scorer, tokens = SCORERS[name], to_float64(random_tokens(dtype))
        return value_and_gradient(
            lambda params: parallel_scores(scorer, params, tokens)[0], to_float64(random_params(scorer))
        )


def largest_error(actual, expected) -> float:
    """Over all arrays: the largest difference, relative to the array's largest magnitude (1 at least)."""

    def error(a, e):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        return np.max(np.abs(a - e)) / max(1.0, np.max(np.abs(e)))

    return max(jax.tree.leaves(jax.tree.map(error, actual, expected)))


@pytest.mark.core
@pytest.mark.parametrize("name", ["mlstm", "mlp"])
def test_decoding_token_by_token_gives_the_parallel_scores_and_gradients(name, float64):
    tokens, params = to_float64(random_tokens()), to_float64(random_params(SCORERS[name]))
    decoded = value_and_gradient(lambda params: decoded_scores(SCORERS[name], params, tokens)[0], params)
    chex.assert_trees_all_close(decoded, exact(name), rtol=1e-9, atol=1e-10)


@pytest.mark.core
def test_the_delayed_scores_and_gradients_are_those_of_the_equations(float64):
    tokens, params = to_float64(random_tokens()), to_float64(random_params(SCORERS["mlstm"]))
    explicit = value_and_gradient(lambda params: scores_by_the_equations(params, tokens), params)
    chex.assert_trees_all_close(explicit, exact("mlstm"), rtol=1e-9, atol=1e-10)


def test_immediate_scores_wait_in_the_state_until_their_token_leaves():
    scorer = SCORERS["mlstm_immediate"]
    params, tokens = random_params(scorer), random_tokens()
    score_BKS, state = parallel_scores(scorer, params, tokens)
    decoded_BKS, decoded_state = decoded_scores(scorer, params, tokens)
    leaves = np.broadcast_to(leaves_window(SEGMENT_BS, WINDOW)[:, None], score_BKS.shape)
    chex.assert_trees_all_close(decoded_BKS[leaves], score_BKS[leaves], rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(decoded_state, state, rtol=1e-4, atol=1e-5)


def test_immediate_scores_know_nothing_of_later_tokens_and_delayed_ones_do():
    tokens, later = random_tokens(), jnp.arange(S) > 20
    changed = tuple(jnp.where(later.reshape(-1, *[1] * (x.ndim - 2)), -x, x) for x in tokens)
    for name, sees_them in (("mlstm_immediate", False), ("mlstm", True)):
        params = random_params(SCORERS[name])
        before, after = (parallel_scores(SCORERS[name], params, t)[0][2, :, 20] for t in (tokens, changed))
        assert bool((before != after).any()) == sees_them


@pytest.mark.parametrize("name", ["mlstm", "mlp"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores_and_gradients_are_computed_in_float32_whatever_the_dtype_of_the_model(name, dtype):
    scorer = SCORERS[name]
    params, tokens = random_params(scorer), random_tokens(dtype)
    score_BKS, gradient = value_and_gradient(lambda params: parallel_scores(scorer, params, tokens)[0], params)
    assert score_BKS.dtype == jnp.float32
    chex.assert_trees_all_equal_shapes_and_dtypes(gradient, params)
    assert largest_error((score_BKS, gradient), exact(name, dtype)) < 1e-5


@pytest.mark.core
@pytest.mark.parametrize("name", SCORERS)
def test_a_new_scorer_scores_exactly_zero(name):
    score_BKS, _ = parallel_scores(SCORERS[name], SCORERS[name].init(jax.random.key(3)), random_tokens())
    assert not score_BKS.any()


@pytest.mark.core
@pytest.mark.parametrize("name", SCORERS)
def test_no_gradient_reaches_the_model(name):
    params = random_params(SCORERS[name])

    def loss(tokens):
        return jnp.sum(parallel_scores(SCORERS[name], params, tokens)[0] ** 2)

    gradients = jax.grad(loss)(random_tokens())
    chex.assert_trees_all_equal(gradients, jax.tree.map(jnp.zeros_like, gradients))


@pytest.mark.parametrize("name", SCORERS)
def test_what_padding_holds_changes_neither_scores_nor_state(name):
    params, tokens = random_params(SCORERS[name]), random_tokens()
    padding_BS = SEGMENT_BS == 0
    other = tuple(jnp.where(padding_BS.reshape(B, S, *[1] * (x.ndim - 2)), 9.0, x) for x in tokens)
    (plain, state), (padded, other_state) = (parallel_scores(SCORERS[name], params, t) for t in (tokens, other))
    real = np.broadcast_to(~padding_BS[:, None], plain.shape)
    chex.assert_trees_all_equal((padded[real], other_state), (plain[real], state))


@pytest.mark.parametrize("name", ["mlstm", "mlstm_immediate"])
def test_a_row_in_two_calls_equals_one_call(name):
    scorer, cut = SCORERS[name], S // 2
    params, tokens = random_params(scorer), random_tokens()
    whole_BKS, whole_state = parallel_scores(scorer, params, tokens, np.ones_like(SEGMENT_BS))
    run, state = jax.jit(partial(scorer.parallel, delay=WINDOW)), scorer.init_state(B, WINDOW)
    first_BKS, state = run(params, state, *(x[:, :cut] for x in tokens), np.ones((B, cut), np.int32))
    second_BKS, state = run(params, state, *(x[:, cut:] for x in tokens), np.ones((B, S - cut), np.int32))
    # A token that leaves during the second call but came with the first is the caller's to read, with `step`.
    ends = cut - WINDOW
    whole = (whole_BKS[..., :ends], whole_BKS[..., cut:], whole_state)
    chex.assert_trees_all_close((first_BKS[..., :ends], second_BKS, state), whole, rtol=1e-4, atol=1e-5)


def test_a_delay_longer_than_the_row_scores_nothing():
    scorer = SCORERS["mlstm"]
    tokens, segments = random_tokens(), jnp.asarray(SEGMENT_BS)
    run, state = jax.jit(partial(scorer.parallel, delay=50)), scorer.init_state(B, 50)
    score_BKS, _ = run(random_params(scorer), state, *tokens, segments)
    assert not score_BKS.any()


def test_the_budget_is_charged_for_every_byte_of_the_state():
    large = ScorerDims(hidden_size=64, num_kv_heads=8, head_dim=128)
    scorer = mlstm_scorer(MLSTMSettings(), large)
    state = scorer.init_state(1, 256)
    chex.assert_shape(state.c_BKXY, (1, 8, 64, 128))
    assert scorer.state_bytes_per_head(256) == 4 * (64 * 128 + 64 + 1)
    for made in (scorer, mlstm_scorer(MLSTMSettings(read="immediate"), large), mlp_scorer(MLPSettings(), large)):
        leaves = jax.tree.leaves(made.init_state(1, 256))
        assert made.state_bytes_per_head(256) == sum(leaf.nbytes for leaf in leaves) // 8


@pytest.mark.parametrize("make", [mlstm_scorer, mlp_scorer])
def test_decay_is_learned_within_its_bound_frozen_or_zero(make):
    settings = {mlstm_scorer: MLSTMSettings(), mlp_scorer: MLPSettings()}[make]

    def lambda_and_gradient(mode, log_decay):
        scorer = make(replace(settings, decay=mode), DIMS)
        params = replace(scorer.init(jax.random.key(0)), log_decay_K=jnp.full(2, log_decay))
        gradient = jax.grad(lambda params: jnp.sum(scorer.decay(params)))(params)
        return scorer.decay(params), gradient.log_decay_K

    start = np.log(np.float32(1e-4))
    chex.assert_trees_all_close(lambda_and_gradient("learned", start), (jnp.full(2, 1e-4),) * 2, rtol=1e-5)
    chex.assert_trees_all_close(lambda_and_gradient("learned", 0.0)[0], jnp.full(2, 1e-3))
    chex.assert_trees_all_close(lambda_and_gradient("frozen", start), (jnp.full(2, 1e-4), jnp.zeros(2)), rtol=1e-5)
    chex.assert_trees_all_equal(lambda_and_gradient("zero", start), (jnp.zeros(2), jnp.zeros(2)))


@pytest.mark.core
def test_the_module_splits_into_the_parameters_it_wraps():
    scorer = SCORERS["mlstm"]
    module = ScorerModule(scorer, num_layers=3, key=jax.random.key(4))
    chex.assert_trees_all_equal(module.params[1], scorer.init(jax.random.split(jax.random.key(4), 3)[1]))
    graph, state = nnx.split(module)
    merged = nnx.merge(graph, jax.tree.map(lambda leaf: 2 * leaf, state))
    chex.assert_trees_all_equal(merged.params, jax.tree.map(lambda leaf: 2 * leaf, module.params))
