"""RULER (Hsieh et al., 2024, arXiv 2404.06654): its thirteen tasks, generated at any length.

- `recipe`: what the tasks share: a prompt that grows to the length asked for, and the two metrics.
- `niah`: needles in a haystack, eight tasks.
- `variable_tracking`: `vt`.
- `frequency`: `cwe` and `fwe`, the most common words of a list.
- `question_answering`: `qa_1` (SQuAD) and `qa_2` (HotpotQA), over files in `data_dir`.
- `vocabulary`: where words come from.

`--lengths` is in the model's tokens with chat template, opening and room for the answer counted, as RULER counts.
Templates, constants, answer lengths and metrics are those of RULER's published configuration. What differs, because its
data cannot be had or because a bootstrap over problems wants them independent:

- The essay haystack is running text of yours (`--text`, or `longtext/*.txt` in `--data_dir`) from a random sentence on;
  RULER reads Paul Graham's essays from their first word.
- Keys are adjective-noun pairs from short lists of our own, and a distractor never has the key that is asked for; the
  words of `cwe` are the text's own. RULER takes both from the wonderwords package, and keys may collide by chance.
- Every problem is grown to its length by itself, and is shuffled by its own seed; RULER grows one for all.
- The worked example that precedes `cwe` stands in the user's turn, like that of `vt`; RULER gives it a turn. That of
  `vt` takes at most a quarter of the length where 500 tokens would be more.
- A prompt asks a thinking model not to think (the answers have 30 to 128 tokens). Scores lie in [0, 1]; RULER prints
  them times 100.
"""

from kvpop_jax.evaluation.tasks.ruler import frequency, niah, question_answering, variable_tracking
from kvpop_jax.evaluation.tasks.ruler.recipe import task

RECIPES = (
    *niah.RECIPES,
    *variable_tracking.RECIPES,
    *frequency.RECIPES,
    *question_answering.RECIPES,
)
TASKS = tuple(map(task, RECIPES))
