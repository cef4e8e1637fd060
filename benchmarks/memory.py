"""What a compiled training step holds at growing lengths, as a table: nothing may grow with the square of the length.

    python benchmarks/memory.py --lengths 4096,16384,65536

Nothing runs and no weights are made: shapes only, compiled by XLA for the platform at hand. Temporaries that grow in
proportion to the length hold no S x S array; ones below the size of all logits do not hold those either.
"""

import argparse
import time
from collections.abc import Sequence

import jax
from arguments import counts
from training import METHODS, Shape, abstract_step, add_options, shape_of

from kvpop_jax import cli


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="kvpop", choices=METHODS)
    add_options(parser)
    parser.add_argument("--lengths", type=counts, default="4096,16384,65536", help="tokens of a row, comma-separated")
    options = parser.parse_args(argv)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}; MiB a device, one row")
    print("| tokens | method | arguments | temporaries | a token | logits | S x S, a head | compiled in s |")
    print("|---|---|---|---|---|---|---|---|")
    for length in options.lengths:
        shape: Shape = shape_of(options, length=length)
        begin = time.monotonic()
        memory = abstract_step(shape).compile().memory_analysis()
        held, logits = memory.temp_size_in_bytes / 2**20, shape.model.vocab_size * length * 4 / 2**20
        print(
            f"| {length} | {shape.method} | {memory.argument_size_in_bytes / 2**20:.0f} | {held:.0f} "
            f"| {held * 2**10 / length:.1f} KiB | {logits:.0f} | {length**2 * 4 / 2**20:.0f} "
            f"| {time.monotonic() - begin:.0f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    cli.run(main)
