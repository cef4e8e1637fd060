"""What policies are made of.

- `base`: the record that a policy is, and what it is shown of a prompt and of a step.
- `keeping`: ranking, protecting and cutting tokens.
- `compose`: the prompt under one policy, the steps under another.
- `expiry_form`: policies whose priorities never change.
- `registry`: policies by name.
"""
