"""What NVIDIA's kvpress keeps of a prompt, on the same tiny Qwen3: an outside check of the prefill scores.

kvpress needs torch and is no dependency: `pip install kvpress` to run this. Its hooks want transformers < 5.3, so the
presses are called here on what a forward pass left in transformers' cache.
"""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpop_jax import policies
from kvpop_jax.inference.decode import Setup, prefill
from kvpop_jax.models.huggingface import read_huggingface
from kvpop_jax.policies import MethodSettings, PolicySettings

torch = pytest.importorskip("torch", reason="kvpress runs on torch, which is not installed")
kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed")
transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[1] / "golden" / "qwen3_untied"
LENGTH, OBSERVED, FUTURE, RATIO = 60, 8, 32, 0.6
SINKS = {"streaming_llm": 4, "expected_attention": 4}  # of the others none
TOKEN_1S = np.random.default_rng(3).permutation(64)[None, :LENGTH].astype(np.int32)
METHODS = MethodSettings(observed=OBSERVED, future=FUTURE)
PRESSES = {
    "streaming_llm": lambda: kvpress.StreamingLLMPress(RATIO, n_sink=4),
    "dense+knorm": lambda: kvpress.KnormPress(RATIO),
    "snapkv": lambda: kvpress.SnapKVPress(RATIO, window_size=OBSERVED),
    # Its budgets per layer are taken as they come: it counts and rounds them in its own way.
    "pyramidkv": lambda: kvpress.PyramidKVPress(RATIO, window_size=OBSERVED, beta=2),
    "tova": lambda: kvpress.TOVAPress(RATIO),
    "keydiff": lambda: kvpress.KeyDiffPress(RATIO),
    "expected_attention": lambda: kvpress.ExpectedAttentionPress(RATIO, n_future_positions=FUTURE, n_sink=4),
}
# One side only protects the newest token, which may take the place of the weakest.
NEWEST_DIFFERS = ("dense+knorm", "tova")


@cache
def torch_layers():
    """Of every layer: its attention module, its input, its rotation, and its keys and values in the cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    seen = []

    def remember(module, args, kwargs, output):
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        seen.append((module, hidden, kwargs["position_embeddings"]))

    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        layer.self_attn.register_forward_hook(remember, with_kwargs=True)
    filled = transformers.DynamicCache()
    with torch.no_grad():
        model(torch.tensor(TOKEN_1S, dtype=torch.long), past_key_values=filled, use_cache=True)
    return [(*x, filled.layers[n].keys, filled.layers[n].values) for n, x in enumerate(seen)]


def kept_by(press) -> list[list[list[int]]]:
    """Positions per layer and head."""
    found = []
    for module, hidden, rotation, k, v in torch_layers():
        with torch.no_grad():
            left, _ = press.compress(module, hidden, k, v, None, {"position_embeddings": rotation})
        same = (left[0][:, :, None] == k[0][:, None]).all(-1)  # head, kept, position
        found.append([sorted(row.nonzero()[:, 1].tolist()) for row in same])
    return found


@pytest.mark.parametrize("name", PRESSES)
def test_the_same_tokens_are_kept(name):
    wanted = kept_by(PRESSES[name]())
    config, params = read_huggingface(FOLDER, jnp.float32)
    policy = policies.make(name, PolicySettings(SINKS.get(name, 0), window=1, methods=METHODS))
    plans = tuple(policy.plan(len(heads[0]), config, 2 * 4 * config.head_dim) for heads in wanted)
    setup = Setup(config, (policy,) * config.num_layers, plans, pin_prompt=False)
    one_B = jnp.array([LENGTH], jnp.int32)
    run = jax.jit(prefill, static_argnums=0)
    _, caches = run(setup, params, [None] * config.num_layers, jnp.asarray(TOKEN_1S), one_B, one_B)
    for layer, (left, heads) in enumerate(zip(caches, wanted, strict=True)):
        for slots, kept in zip(np.asarray(left.position_BKC)[0].tolist(), heads, strict=True):
            got, expected = {p for p in slots if p >= 0}, set(kept)
            assert len(got) == len(expected) < LENGTH
            if name in NEWEST_DIFFERS:
                got, expected = got - {LENGTH - 1}, expected - {LENGTH - 1}
                assert got <= expected or expected <= got, (name, layer)
            else:
                assert got == expected, (name, layer)
