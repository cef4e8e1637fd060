"""Writes the tokenizer of the tiny_math model: `python tools/build_tiny_tokenizer.py [FOLDER]`."""

import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvpop_jax.evaluation.tasks.tiny_math import vocabulary

# The generation prompt ends where the solution starts, as in `Problem.document`.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{ '<|im_start|> ' + message['content'] + '\\n' }}
{%- elif message['role'] == 'assistant' -%}{{ 'solution :\\n' + message['content'] + ' <|im_end|>' }}
{%- else -%}{{ raise_exception('the tiny_math template knows the roles user and assistant') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'solution :\\n' }}{%- endif -%}"""


def build() -> PreTrainedTokenizerFast:
    """Word-level tokenizer over `vocabulary.TOKENS`: words end at spaces, every newline is a token."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary.TOKEN_ID, unk_token=vocabulary.UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(" +"), "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    # Joined by spaces (no token starts with the prefix), then lines without spaces at their ends.
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=False),
            decoders.Fuse(),
            decoders.Replace(" \n", "\n"),
            decoders.Replace("\n ", "\n"),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=vocabulary.PAD,
        unk_token=vocabulary.UNKNOWN,
        bos_token=vocabulary.BEGIN,
        eos_token=vocabulary.END,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        chat_template=CHAT_TEMPLATE,
    )


def main() -> None:
    default = Path(__file__).resolve().parent.parent / "assets" / "qwen3-tiny-math"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    build().save_pretrained(folder)
    # transformers 5 writes a class name that transformers 4 does not know; both know this one.
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    print(f"wrote {len(vocabulary.TOKENS)} tokens to {folder}")


if __name__ == "__main__":
    main()
