"""What the training tests share: two small tokenizers, one with a chat template."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from kvpop_jax.models import load_tokenizer

TINY_MATH = Path(__file__).parents[2] / "assets" / "qwen3-tiny-math"


@pytest.fixture(scope="session")
def chat_tokenizer():
    return load_tokenizer(TINY_MATH)


@pytest.fixture(scope="session")
def plain_tokenizer():
    """Every `wN` is token N; no chat template."""
    words = {"<eos>": 0, "<unk>": 1} | {f"w{index}": index for index in range(2, 64)}
    model = Tokenizer(WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", unk_token="<unk>")
