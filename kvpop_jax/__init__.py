"""KVpop-JAX: language models with a fixed key-value cache budget, in JAX for TPUs and NVIDIA GPUs.

What is where:

- `models`: one decoder for Qwen3 and Llama; Hugging Face and GGUF weights in, Hugging Face folders out.
- `eviction`: expiry (one integer per token that is an eviction rule), the future-attention target, the boundary loss.
- `scorers`: what predicts how much attention a token will still receive (mLSTM memory, MLP).
- `policies`: every eviction policy, one short file each, one registry.
- `cache`: the bounded cache and the accounting of its budget.
- `polykv`: a policy and a budget for every layer, chosen offline.
- `training`, `inference`, `evaluation`: what `train.py` and `eval.py` run; `calibrate.py` runs `polykv`.
- `pallas_kernels` (beside this package): the operations with their references and kernels.

Axis letters, used as suffixes of array names everywhere (`q_BTHD`, `lse_BHT`, `expiry_BKS`):

    B batch          T query position     S key position       N layers
    H query heads    K KV heads           G = H / K            D head dimension
    C cache slots    L chunk              E hidden size        F feed-forward size    V vocabulary
    X, Y key and value dimensions of the mLSTM memory

Words: a *sink* is one of the first tokens of a segment and never leaves; the *window* is the last `w` tokens, the query
included; the *pool* holds `k` older tokens that compete by *priority*; *expiry* is the first query position that no
longer sees a token; the *budget* is entries per KV head: sinks + window + pool + what the policy's own state occupies.
"""

__version__ = "0.1.0"
