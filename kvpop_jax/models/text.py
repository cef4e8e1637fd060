"""From what a user writes to tokens, and from tokens back to text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jinja2 import TemplateError

from kvpop_jax.errors import UserError

Message = Mapping[str, str]
"""One turn of a chat: `role` ("system", "user", "assistant") and `content`."""

Style = Literal["chat", "brief", "plain"]


def encode_prompt(tokenizer: Any, message: str, opening: str = "", style: Style = "chat") -> list[int]:
    """Token ids of a user's message under the tokenizer's chat template, or as plain text when it has none.

    Args:
        tokenizer: A transformers tokenizer.
        message: The user's turn.
        opening: Beginning of the assistant's turn; tokenized together with what stands before it.
        style: "chat" is the template as it comes; "brief" asks a template that knows thinking to leave it out, for
            answers of a few tokens; "plain" is text to go on from, without template, the tokenizer's start token kept.
    """
    if style == "plain" or not tokenizer.chat_template:
        return list(tokenizer(message + opening)["input_ids"])
    asked = {"enable_thinking": False} if style == "brief" else {}
    text = chat_text(tokenizer, [{"role": "user", "content": message}], add_generation_prompt=True, **asked)
    return list(tokenizer(text + opening, add_special_tokens=False)["input_ids"])


def encode_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a chat up to where the assistant answers; without a chat template, of its lines as they are.

    Raises:
        UserError: a chat that the template refuses.
    """
    if not tokenizer.chat_template:
        return list(tokenizer.encode("\n".join(message["content"] for message in messages) + "\n"))
    text = chat_text(tokenizer, messages, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def chat_text(tokenizer: Any, messages: Sequence[Message], **asked: bool) -> str:
    """A chat under the tokenizer's template, which is `asked` for what transformers and the template know.

    Raises:
        UserError: a chat that the template refuses: a role that it does not know, turns out of order.
    """
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **asked)
    except TemplateError as error:
        raise UserError(f"the tokenizer's chat template refuses the messages: {error}") from error


def decode_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """What a reader sees of tokens: their text without special tokens."""
    return tokenizer.decode(tokens, skip_special_tokens=True)


def text_pieces(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Text of tokens as they come, in pieces that join to the whole; a character waits for all of its bytes.

    Each piece is decoded together with the one before it, because a tokenizer may treat a text's first token apart.
    """
    seen: list[int] = []
    start = read = 0
    for token in tokens:
        seen.append(token)
        before = decode_text(tokenizer, seen[start:read])
        text = decode_text(tokenizer, seen[start:])
        if text.endswith("\ufffd"):
            continue
        if len(text) > len(before):
            yield text[len(before) :]
            start, read = read, len(seen)
    if read < len(seen):
        before = decode_text(tokenizer, seen[start:read])
        yield decode_text(tokenizer, seen[start:])[len(before) :]
