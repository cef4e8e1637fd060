"""The reference of `masked_attention` against the dense form."""

from masked_attention_suite import MaskedAttentionBiasSuite, MaskedAttentionSuite


class TestReference(MaskedAttentionSuite):
    backend = "reference"


class TestReferenceBias(MaskedAttentionBiasSuite):
    backend = "reference"
