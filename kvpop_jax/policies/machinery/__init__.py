"""What policies are made of.

- `base`: the record that a policy is, and what it is shown of a prompt and of a step.
- `settings`: what policies are made from, with every default.
- `registry`, `compose`: policies by name; the prompt under one, the steps under another.
- `expiry_form`: policies whose priorities never change.
- `attend_then_evict`: policies that score anew at every step.
- `prefill_only`: methods that say only what to keep of a prompt.
- `keeping`, `prompt_attention`, `recency`, `rotation`: the functions that these and the remaining policies share.
"""
