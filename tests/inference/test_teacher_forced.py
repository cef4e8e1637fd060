"""`Generator.teacher_forced`: text read through the bounded cache, and what that is reported to have cost."""

import numpy as np
import pytest
from inference.parallel_pass import parallel_logits
from inference.tiny_model import CONFIG, distinct_tokens, make_policy, random_scorer, tiny_model
from oracles import assert_close

from kvpop_jax.inference import Generator

LENGTH, BUDGET = 56, 30
TOKEN_BT = distinct_tokens(2, LENGTH)
SEEDS = [3, 4]


@pytest.mark.parametrize(("name", "pin_prompt", "prompt"), [("kvpop", True, 8)])
def test_teacher_forcing_gives_the_logits_of_one_parallel_pass_and_reports_its_cache(name, pin_prompt, prompt):
    scorers = [random_scorer(name, layer) for layer in range(CONFIG.num_layers)]
    generator = Generator(tiny_model(), make_policy(name), BUDGET, scorers, pin_prompt)
    reading, logits_nBV = generator.teacher_forced(TOKEN_BT, prompt, SEEDS), []
    try:
        while True:
            logits_nBV.append(np.asarray(next(reading)))
    except StopIteration as end:
        reports = end.value
    plans = list(generator.plans(LENGTH))
    wanted_BTV, most_seen = parallel_logits(
        [make_policy(name)] * 2, plans, scorers, TOKEN_BT, np.array(SEEDS), np.full(2, prompt * pin_prompt)
    )
    assert_close(np.stack(logits_nBV, axis=1), wanted_BTV[:, prompt - 1 : -1], 2e-5)
    for report in reports:
        assert report.sinks + report.window + report.pool + report.state_entries == report.budget == BUDGET
        assert report.peak_live == report.allocated == max(most_seen)
        assert (report.prompt_survival == 1) == report.pin_prompt == pin_prompt
