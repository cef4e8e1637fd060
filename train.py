"""Train a model, or the scorer that lets it decode with a bounded cache: `python train.py --config FILE`."""

import sys
from collections.abc import Sequence

from kvpop_jax import cli, processes
from kvpop_jax.config import TrainConfig


def main(argv: Sequence[str]) -> int:
    config = cli.parse(TrainConfig, argv, __doc__)
    processes.join(config.processes)  # before anything asks JAX for its devices
    # Only now: `--help` and a misspelt option should not wait for JAX to start.
    from kvpop_jax.training.loop import run
    from kvpop_jax.training.metrics import DivergedError

    try:
        return run(config)
    except DivergedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    cli.run(main)
