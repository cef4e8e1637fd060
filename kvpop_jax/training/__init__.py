"""Training, from configuration to exported scorer. Nothing is imported here: data workers load only what they need.

- `sources`, `documents`, `data`: rows of text; their tokens; packed batches (grain).
- `losses`: cross entropy and KL to the dense model, without ever holding all logits.
- `student`: the attention function of a model under an eviction policy, with the scorer's loss.
- `optimizer`, `step`: two groups of weights (optax); the compiled steps.
- `checkpoint`, `metrics`: resuming (Orbax); JSONL, TensorBoard and progress.
- `loop`: what `train.py` runs.
"""
