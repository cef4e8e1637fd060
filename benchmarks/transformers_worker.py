"""transformers' side of a comparison, in a process of its own: torch and JAX would share threads and memory.

    python benchmarks/transformers_worker.py '{"gguf": FILE, "prompt": 128, "tokens": 256}'
    python benchmarks/transformers_worker.py '{"config": {...}, "cache": 4096, "steps": 64}'

Each line on standard input asks for one more run; each run answers with a line of JSON: seconds, for so many tokens.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers


def generation(options: dict[str, Any]) -> Callable[[], tuple[float, int]]:
    """Greedy generation from a GGUF file in float32 with the default cache, on the CPU."""
    path = Path(options["gguf"])
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    prompt = torch.arange(100, 100 + options["prompt"])[None]
    length = options["tokens"]

    def run() -> tuple[float, int]:
        began = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=length,
                max_new_tokens=length, pad_token_id=0,
            )  # fmt: skip
        seconds = time.perf_counter() - began
        assert made.shape[1] == options["prompt"] + length
        return seconds, length

    return run


def steps(options: dict[str, Any]) -> Callable[[], tuple[float, int]]:
    """Decode steps of random weights in bfloat16 with a static cache, compiled with CUDA graphs, batch 1."""
    config = transformers.Qwen3Config(**options["config"])
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.Qwen3ForCausalLM(config).eval()
        token = torch.zeros((1, 1), dtype=torch.long)
    cache = transformers.StaticCache(config=config, max_cache_len=options["cache"])
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    count = options["steps"]

    def run() -> tuple[float, int]:
        position = torch.tensor([options["cache"] - count - 1], device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.inference_mode():
            for _ in range(count):
                out = forward(input_ids=token, cache_position=position, past_key_values=cache, use_cache=True)
                token.copy_(out.logits[:, -1:].argmax(-1))
                position += 1
        torch.cuda.synchronize()
        return time.perf_counter() - began, count

    return run


def main() -> None:
    options = json.loads(sys.argv[1])
    run = generation(options) if "gguf" in options else steps(options)
    for _ in sys.stdin:
        seconds, tokens = run()
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
