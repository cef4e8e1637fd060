"""The reference of `masked_attention` against the dense form."""

from dataclasses import replace

import jax
import numpy as np
from masked_attention_suite import CASES, MaskedAttentionBiasSuite, MaskedAttentionSuite, random_inputs, run

from pallas_kernels.masked_attention import NEVER


class TestReference(MaskedAttentionSuite):
    backend = "reference"


class TestReferenceBias(MaskedAttentionBiasSuite):
    backend = "reference"


def test_none_is_an_expiry_that_never_comes_and_a_row_of_one_document():
    x = random_inputs(CASES["seven_tokens_group_3"], "float32")
    never_BKS, one_BS = np.full_like(x.expiry_BKS, NEVER), np.ones_like(x.segment_BS)
    got = run("reference", replace(x, expiry_BKS=None, segment_BS=None))
    wanted = run("reference", replace(x, expiry_BKS=never_BKS, segment_BS=one_BS))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
