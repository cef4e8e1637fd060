"""Text to tokens and back."""

from pathlib import Path

import pytest

from kvpop_jax.errors import UserError
from kvpop_jax.models import encode_messages, encode_prompt, load_tokenizer, text_pieces

ROOT = Path(__file__).parents[2]


class Bytes:
    """A tokenizer of single bytes."""

    def decode(self, tokens, skip_special_tokens):
        return bytes(token for token in tokens if token).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["plain words", "naïve ☃ snow 🎉", ""])
def test_streamed_pieces_join_to_the_text_and_never_split_a_character(text):
    pieces = list(text_pieces(Bytes(), [*text.encode(), 0]))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_cut_off_at_the_end_is_still_shown():
    assert "".join(text_pieces(Bytes(), "ab☃".encode()[:-1])) == "ab\ufffd"


@pytest.fixture(scope="module")
def chat_tokenizer():
    return load_tokenizer(ROOT / "assets" / "qwen3-tiny-math")


def test_streamed_text_of_a_real_tokenizer_is_its_decoded_text(chat_tokenizer):
    tokens = chat_tokenizer.encode("abel = 4 7 2\nu 2 + 8 + 0 = 0 carry 1")
    assert "".join(text_pieces(chat_tokenizer, tokens)) == chat_tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_message_is_the_chat_of_one_turn(chat_tokenizer):
    message = {"role": "user", "content": "2 + 2"}
    assert encode_messages(chat_tokenizer, [message]) == encode_prompt(chat_tokenizer, "2 + 2")


def test_a_role_that_the_template_does_not_know_is_refused_in_its_words(chat_tokenizer):
    with pytest.raises(UserError, match="refuses the messages: the tiny_math template knows the roles"):
        encode_messages(chat_tokenizer, [{"role": "tool", "content": "4"}])
