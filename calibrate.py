"""Choose an eviction policy and a budget for every layer of a model: `python calibrate.py --help`."""

from kvpop_jax import cli
from kvpop_jax.polykv.command import main

if __name__ == "__main__":
    cli.run(main)
