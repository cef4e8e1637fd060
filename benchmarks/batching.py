"""How near continuous batching comes to a perfectly packed schedule, counted in steps of the real engine.

    python benchmarks/batching.py --requests 480 --rows 16

Random weights of a tiny shape draw from a nearly flat distribution with one stop token, so lengths are geometric, very
unequal and unknown beforehand. A perfect schedule gives every row an equal share of all tokens, and takes at least as
many steps as the longest completion. Steps are counted, not timed: all cost the same, whatever the rows hold.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from arguments import count
from decode import SHAPES

from kvpop_jax import cli
from kvpop_jax.errors import UserError
from kvpop_jax.inference import BatchStatistics, Generator, SamplingParams, complete
from kvpop_jax.models import LoadedModel, init_params
from kvpop_jax.policies import PolicySettings, make


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=count, default=480)
    parser.add_argument("--rows", type=count, default=16)
    parser.add_argument("--mean", type=int, default=512, help="tokens; the size of the vocabulary")
    parser.add_argument("--longest", type=count, default=2048, help="tokens, where a completion is cut")
    parser.add_argument("--budget", type=int, default=64)
    options = parser.parse_args(argv)
    if options.mean < 2:
        raise UserError(f"--mean {options.mean}: a vocabulary with a stop token and another one has at least 2")
    config = replace(
        SHAPES["tiny"], vocab_size=options.mean, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=32,
    )  # fmt: skip
    model = LoadedModel(config, init_params(config, jax.random.key(0), jnp.dtype("float32")), None, "random", "random")
    generator = Generator(model, make("streaming_llm", PolicySettings(4, 16)), options.budget)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=options.longest, stop_tokens=(0,))
    prompts = [[1 + n % (options.mean - 1), 1 + n // options.mean] for n in range(options.requests)]

    seen: list[BatchStatistics] = []
    completions = complete(generator, prompts, sampling, rows=options.rows, progress=seen.append)
    # A stop token takes a step too: its row computes it before it is known to have ended.
    lengths = np.array([len(completion.tokens) for _, completion in completions])
    last = seen[-1]
    steps = round(last.tokens / (last.occupancy * last.rows))
    perfect = max(-(-int(lengths.sum()) // options.rows), int(lengths.max()))
    print(
        f"{len(lengths)} completions of {lengths.min()} to {lengths.max()} tokens, mean {lengths.mean():.0f}, on "
        f"{options.rows} rows: {steps} steps, {steps / perfect:.3f} of a perfect schedule's {perfect}; "
        f"occupancy {last.occupancy:.3f}; {last.tokens_per_second:.0f} tokens/s"
    )
    return 0


if __name__ == "__main__":
    cli.run(main)
