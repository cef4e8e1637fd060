"""Evaluate a model under cache budgets, or generate with one: `python eval.py --help`."""

from kvpop_jax import cli
from kvpop_jax.evaluation.command import main

if __name__ == "__main__":
    cli.run(main)
