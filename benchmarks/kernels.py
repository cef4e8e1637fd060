"""Checks every form of a kernel against its float32 reference, and times the forms in turns.

    python benchmarks/kernels.py --ops decode_attention --output kernels.json

A program runs a form many times over several sets of inputs, so that inputs are in no cache when they are needed, and
several programs are queued at once, so that what it takes to start one is hidden. Times are medians over such bursts.
Shares are of the bandwidth that a copy of 4 GiB reaches in the same run, or, of operations that are held against FLOPs,
of the rate of a large matrix product. The error is the largest one of a result, as a share of its largest entry. On a
CPU the shapes are small and only forms for any platform run.

Everything is compiled first, in as many threads as there are cores, and timed after.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arguments import count
from bandwidth import copy_bandwidth, matmul_rate
from cases import attention, rest
from profiler import kernel_times

from kvpop_jax import cli
from kvpop_jax.errors import UserError
from pallas_kernels.decode_attention import decode_attention, gpu

_BURST = 5  # programs
_COLD_BYTES = 1 << 28  # of inputs, between two uses of one: five times the second-level cache of an H200
_RUNS = 32  # of a short operation, in a program


@dataclass(frozen=True)
class Case:
    """One operation at one shape.

    Attributes:
        inputs: seed -> arguments of `run` and `reference`.
        carry: results of a run and the argument each replaces in the next; those arguments are donated.
        forms: the back ends to time; the last is the one that is always there.
        run: (arguments, back end) -> results, the first of which are compared with those of `reference`.
        bytes: that a run has to move.
        flops: of a run, where they are its ceiling.
        runs: of the operation in a program; None for as many as hide what it takes to start one.
        baseline: the form that computes something else, against which the others' times are held.
        baseline_flops: of a run of that form.
    """

    op: str
    shape: str
    inputs: Callable[[int], tuple[jax.Array, ...]]
    carry: dict[int, int]
    forms: tuple[str, ...]
    run: Callable[..., tuple[Any, ...]]
    reference: Callable[..., Any]
    bytes: int
    flops: int | None = None
    runs: int | None = None
    baseline: str | None = None
    baseline_flops: int | None = None


@dataclass(frozen=True)
class Compiled:
    """A case's programs, as they will be once they are compiled.

    Attributes:
        reference, once: arguments -> results; of each form but the baseline.
        programs: of each form, over all sets of inputs.
        sets, runs: of inputs; of the operation in a program.
    """

    case: Case
    reference: Future[Callable[..., Any]]
    once: dict[str, Future[Callable[..., Any]]]
    programs: dict[str, Future[Callable[..., Any]]]
    sets: int
    runs: int


@dataclass(frozen=True)
class Row:
    """What was measured; rates are FLOP/s where FLOPs are the ceiling, else bytes per second."""

    op: str
    shape: str
    form: str
    ms: float
    tera_per_s: float
    unit: str
    share: float
    of_baseline: float | None
    of_reference: float | None
    error: float | None

    def __str__(self) -> str:
        of_baseline, of_reference = ("" if x is None else f"{x:.2f}" for x in (self.of_baseline, self.of_reference))
        error = "" if self.error is None else f"{self.error:.1e}"
        return (
            f"| {self.op} | {self.shape} | {self.form} | {self.ms:.4g} | {self.tera_per_s:.2f} {self.unit} "
            f"| {self.share:.2f} | {of_baseline} | {of_reference} | {error} |"
        )


def decode_attention_cases(real: bool) -> Iterator[Case]:
    """Batches and slots at the heads of Qwen3-8B, two thirds of the slots occupied."""
    K, G, D = (8, 4, 128) if real else (2, 4, 64)
    sizes = [(1, 4096), (1, 4032), (1, 131_072), (32, 4096), (32, 4097), (128, 4096)] if real else [(1, 64), (2, 100)]
    for B, C in sizes:

        def inputs(seed: int, B: int = B, C: int = C) -> tuple[jax.Array, ...]:
            keys = jax.random.split(jax.random.key(seed), 7)
            shapes = (B, K * G, D), (B, K, C, D), (B, K, C, D), (B, K, D), (B, K, D)
            q, k, v, k_new, v_new = map(partial(jax.random.normal, dtype=jnp.bfloat16), keys[:5], shapes)
            slot = jax.random.randint(keys[5], (B, K), 0, C)
            occupied = jax.random.bernoulli(keys[6], 2 / 3, (B, K, C)) | (jnp.arange(C) == slot[..., None])
            return q, k, v, jnp.where(occupied, jnp.arange(C), -1), k_new, v_new, slot

        arguments = jax.eval_shape(inputs, 0)
        taken = jax.default_backend() == "gpu" and gpu.refuses(*(*arguments, False)) is None
        yield Case(
            op="decode_attention", shape=f"B {B}, C {C}, K {K}, G {G}, D {D}", inputs=inputs,
            carry={0: 0, 2: 1, 3: 2}, forms=("gpu", "reference") if taken else ("reference",),
            run=lambda *arguments, form: decode_attention(*arguments, backend=form),
            reference=_decode_attention_float32, bytes=sum(x.size * x.dtype.itemsize for x in arguments),
        )  # fmt: skip


def _decode_attention_float32(*arguments):
    wide = (x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arguments)
    return decode_attention(*wide, backend="reference")[0]


CASES: dict[str, Callable[[bool], Iterable[Case]]] = {
    "decode_attention": decode_attention_cases,
    "cutoff_expiry": lambda real: (Case(**fields) for fields in rest.cutoff_expiry_cases(real)),
    "mlstm_chunkwise": lambda real: (Case(**fields) for fields in rest.mlstm_chunkwise_cases(real)),
    "take_slot": lambda real: (Case(**fields) for fields in rest.take_slot_cases(real)),
    "thin_matmul": lambda real: (Case(**fields) for fields in rest.thin_matmul_cases(real)),
    "split_qkv": lambda real: (Case(**fields) for fields in rest.split_qkv_cases(real)),
    "policy_step": lambda real: (Case(**fields) for fields in rest.policy_step_cases(real)),
    "masked_attention": lambda real: (Case(**fields) for fields in attention.masked_attention_cases(real)),
    "received_log_mass": lambda real: (Case(**fields) for fields in attention.received_log_mass_cases(real)),
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--shapes", default="", help="only shapes whose name contains this, as in 'B 1, C 4096'")
    parser.add_argument("--bursts", type=count, default=9, help="timed for each form, after one to warm up")
    parser.add_argument("--profile", action="store_true", help="list what each form runs on a GPU, kernel by kernel")
    parser.add_argument("--output", type=Path, help="JSON file to write as well")
    options = parser.parse_args(argv)
    ops = options.ops.split(",")
    if unknown := [op for op in ops if op not in CASES]:
        raise UserError(f"--ops: {', '.join(unknown)} is none of {', '.join(CASES)}")
    real = jax.default_backend() != "cpu"
    chosen = [case for op in ops for case in CASES[op](real) if options.shapes in case.shape]
    if not chosen:
        raise UserError(f"--shapes {options.shapes!r} is part of no shape of {options.ops}")
    if options.output is not None:
        cli.check_output(options.output.parent, "--output")
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    print(
        f"{jax.devices()[0].device_kind}, JAX {jax.__version__}; copy {bandwidth / 1e12:.3f} TB/s, bfloat16 product "
        f"{rate / 1e12:.3g} TFLOP/s",
        flush=True,
    )
    print(
        "| op | shape | form | ms | rate | of the ceiling | of dense | of the reference | error |\n" + "|---" * 9 + "|"
    )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = [compile_case(case, pool) for case in chosen]
    rows = []
    for compiled in waiting:
        for row in measure(compiled, bandwidth, rate, options.bursts):
            print(row, flush=True)
            rows.append(row)
        if options.profile:
            profile(compiled)
    if options.output is not None:
        about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "copy_bytes_per_s": bandwidth}
        about |= {"matmul_flops_per_s": rate}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(about | {"rows": [vars(row) for row in rows]}, indent=2) + "\n")
    return 0


def compile_case(case: Case, pool: Executor) -> Compiled:
    """Traces a case's programs here, and compiles them in the pool."""
    sets = 1 if case.runs is not None else math.ceil(_COLD_BYTES / case.bytes) if jax.default_backend() != "cpu" else 2
    runs = case.runs or (sets * max(1, _RUNS // sets) if sets > 1 else 8)
    arguments = jax.eval_shape(case.inputs, 0)

    def compiled(function: Callable[..., Any], *given: Any, **options: Any) -> Future[Callable[..., Any]]:
        return pool.submit(jax.jit(function, **options).lower(*given).compile)

    return Compiled(
        case,
        compiled(case.reference, *arguments),
        {form: compiled(partial(case.run, form=form), *arguments) for form in case.forms if form != case.baseline},
        {
            form: compiled(program(case, form, runs // sets), [arguments] * sets, donate_argnums=0)
            for form in case.forms
        },
        sets,
        runs,
    )


def measure(compiled: Compiled, bandwidth: float, rate: float, bursts: int) -> list[Row]:
    """One row for each form."""
    case, runs = compiled.case, compiled.runs
    errors = compare(compiled)
    state = [case.inputs(seed) for seed in range(compiled.sets)]
    seconds: dict[str, list[float]] = {form: [] for form in case.forms}
    for _ in range(bursts + 1):
        for form, step in compiled.programs.items():
            state = jax.block_until_ready(state)
            start = time.perf_counter()
            for _ in range(_BURST):
                state = step.result()(state)
            jax.block_until_ready(state)
            seconds[form].append((time.perf_counter() - start) / (runs * _BURST))
    median = {form: float(np.median(times[1:])) for form, times in seconds.items()}
    unit, ceiling = ("TB/s", bandwidth) if case.flops is None else ("TFLOP/s", rate)
    rows = []
    for form in case.forms:
        work = (case.baseline_flops if form == case.baseline else case.flops) or case.bytes
        speed = work / median[form]
        of_baseline, of_reference = (
            median[form] / median[other] if other in median else None for other in (case.baseline, "reference")
        )
        rows.append(
            Row(
                case.op,
                case.shape,
                form,
                median[form] * 1e3,
                speed / 1e12,
                unit,
                speed / ceiling,
                of_baseline,
                of_reference,
                errors.get(form),
            )
        )
    return rows


def profile(compiled: Compiled) -> None:
    """Prints the kernels of every form, per run."""
    for form, step in compiled.programs.items():
        state = step.result()([compiled.case.inputs(seed) for seed in range(compiled.sets)])
        lines = kernel_times(partial(step.result(), jax.block_until_ready(state)), compiled.runs)
        print(f"{form}:", *lines, sep="\n    ", flush=True)


def compare(compiled: Compiled) -> dict[str, float]:
    """Largest error of the results of each form but the baseline, as a share of the largest entry of its array."""
    arguments = compiled.case.inputs(0)
    wanted = [np.asarray(x, np.float64) for x in jax.tree.leaves(compiled.reference.result()(*arguments))]
    errors = {}
    for form, run in compiled.once.items():
        results = run.result()(*arguments)[: len(wanted)]
        errors[form] = max(_error(np.asarray(x, np.float64), y) for x, y in zip(results, wanted, strict=True))
    return errors


def _error(got: np.ndarray, wanted: np.ndarray) -> float:
    finite = np.isfinite(wanted)
    if not np.array_equal(got[~finite], wanted[~finite]):
        return float("inf")
    return float(np.max(np.abs(got[finite] - wanted[finite])) / np.max(np.abs(wanted[finite])))


def program(case: Case, form: str, rounds: int) -> Callable[[Any], Any]:
    """The form over all sets of inputs, `rounds` times, each run taking up the last one's results."""
    run = jax.jit(partial(case.run, form=form))  # lowered once

    def all_runs(state: list[tuple[jax.Array, ...]]) -> list[tuple[jax.Array, ...]]:
        for _ in range(rounds):
            for i, arguments in enumerate(state):
                results = run(*arguments)
                following = list(arguments)
                for result, argument in case.carry.items():
                    following[argument] = results[result]
                state[i] = tuple(following)
        return state

    return all_runs


if __name__ == "__main__":
    cli.run(main)
