"""Prints the losses of a few steps of training on each mesh, one JSON object; needs eight devices.

mesh_losses.py FOLDER [stateless | distillation]
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import tiny_run

from kvpop_jax import sharding
from kvpop_jax.sharding import MeshSettings
from kvpop_jax.training.data import to_batch
from kvpop_jax.training.setup import Setup
from kvpop_jax.training.setup_distill import prepare_distill
from kvpop_jax.training.step import TrainState, init_state, make_step

MESHES = {
    "one": MeshSettings(),
    "data": MeshSettings(data=8),
    "fsdp": MeshSettings(fsdp=8),
    "model": MeshSettings(model=2),
    "mixed": MeshSettings(data=2, fsdp=2, model=2),
}


@dataclass(frozen=True)
class Run:
    """A step lowered for one mesh, and what it begins with."""

    mesh: Any
    setup: Setup
    state: TrainState
    lowered: Any
    first: Any

    @classmethod
    def on(cls, config):
        mesh = sharding.global_mesh(config.mesh)
        with jax.set_mesh(mesh):
            setup = prepare_distill(config, mesh)
            state = sharding.make_on(mesh, partial(init_state, optimizers=setup.optimizers), setup.weights)
            placed = jax.tree.map(lambda leaf: leaf.sharding, state)
            step = make_step(setup.objective, setup.optimizers, pools=setup.pools, seed=0, state_shardings=placed)
            batch = sharding.place(to_batch(next(setup.data))[0], mesh)
            return cls(mesh, setup, state, step.lower(state, setup.frozen, batch), batch)

    def losses(self, step, steps):
        state, batch = self.state, self.first
        for _ in range(steps):
            state, metrics = step(state, self.setup.frozen, batch)
            yield {name: float(metrics[name]) for name in ("loss", "kl", "grad_norm/base", "grad_norm/scorer")}
            batch = sharding.place(to_batch(next(self.setup.data))[0], self.mesh)
        self.setup.data.close()


def main(folder, kind):
    tiny_run.save_base(folder / "base")
    config = getattr(tiny_run, kind)(folder / "base", folder)
    runs = {name: Run.on(replace(config, mesh=mesh)) for name, mesh in MESHES.items()}
    # Compiling is all the time there is. Running side by side is for no one: programs would wait for each other.
    with ThreadPoolExecutor(2) as pool:
        steps = list(pool.map(lambda run: run.lowered.compile(), runs.values()))
    found = {name: list(run.losses(step, config.steps)) for (name, run), step in zip(runs.items(), steps, strict=True)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
