"""The reference of `decode_attention` against a masked softmax."""

from decode_attention_suite import DecodeAttentionSuite


class TestReference(DecodeAttentionSuite):
    backend = "reference"
