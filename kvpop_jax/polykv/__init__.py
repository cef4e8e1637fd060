"""PolyKV (arXiv 2606.15157 v1): every layer and phase has its own eviction policy and budget, calibrated offline.

- `settings`: what a calibration is asked to do.
- `signals`: what one layer loses under one policy; `measure`: all of them on a set of texts.
- `choose`, `allocation`: from signals to a policy per layer and phase, and to budgets with an exact total.
- `plan`: the file; `picture`: how it looks.
- `command`: what `calibrate.py` does.
"""

from kvpop_jax.polykv.allocation import allocate
from kvpop_jax.polykv.picture import draw_plan
from kvpop_jax.polykv.plan import LayerChoice, Plan, read_plan, write_plan

__all__ = ["LayerChoice", "Plan", "allocate", "draw_plan", "read_plan", "write_plan"]
