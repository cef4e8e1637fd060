"""From a row of text to tokens: chat template, end of text, which tokens are the prompt and which are predicted."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvpop_jax.errors import UserError
from kvpop_jax.models import chat_text
from kvpop_jax.training.sources import Row


@dataclass(frozen=True)
class Encoder:
    """Turns rows into the arrays that are packed. Picklable, so that worker processes can have it.

    Attributes:
        tokenizer: a transformers tokenizer.
        seq_len: longest document in tokens.
        overlong: "skip" or "truncate" what is longer.
        loss_tokens: predict "all" tokens, or the "response" only.
        longest_prompt: a longer prompt is refused; None for no limit.
        own_row: give every document a row of its own.
    """

    tokenizer: Any
    seq_len: int
    overlong: Literal["skip", "truncate"]
    loss_tokens: Literal["all", "response"]
    longest_prompt: int | None
    own_row: bool

    def __call__(self, row: Row) -> dict[str, np.ndarray]:
        """Encodes one document of n tokens.

        Returns:
            `token`, `prompt`, `loss` of length n (0 for a skipped document); `overlong` of length 1 if the document was
            skipped or truncated, else 0; `own_row` of length 1 if it may not share a row. Counts are array lengths
            because packing adds lengths up: a skipped document then takes no room, and a row shows how many there were.

        Raises:
            UserError: the prompt is longer than `longest_prompt`, or the chat template cannot be split at the response.
        """
        prompt, response = encode(self.tokenizer, row)
        if self.longest_prompt is not None and len(prompt) > self.longest_prompt:
            raise UserError(
                f"{row.where}: its prompt of {len(prompt)} tokens leaves no pool when it is pinned; the smallest of "
                f"policy.budgets holds prompts of at most {self.longest_prompt}"
            )
        tokens = prompt + response
        overlong = len(tokens) > self.seq_len
        tokens = [] if overlong and self.overlong == "skip" else tokens[: self.seq_len]
        index = np.arange(len(tokens))
        loss = index >= (1 if self.loss_tokens == "all" else max(len(prompt), 1))
        return {
            "token": np.asarray(tokens, np.int32),
            "prompt": (index < len(prompt)).astype(np.int32),
            "loss": loss.astype(np.int32),
            "overlong": np.ones(int(overlong), np.int32),
            "own_row": np.ones(int(self.own_row and len(tokens) > 0), np.int32),
        }


def encode(tokenizer: Any, row: Row) -> tuple[list[int], list[int]]:
    """Tokens of a row's prompt and of its response, encoded apart, as generation will meet them.

    The response of a chat is its last message; it ends with the end-of-text token. Without a chat template the messages
    are joined by newlines.
    """
    if not row.messages:
        return _plain(tokenizer, row.prompt, row.response)
    if not tokenizer.chat_template:
        *before, last = (message["content"] for message in row.messages)
        return _plain(tokenizer, "\n".join(before), ("\n" if before else "") + last)
    try:
        prompt_text = chat_text(tokenizer, row.messages[:-1], add_generation_prompt=True)
        text = chat_text(tokenizer, row.messages)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from error
    if not text.startswith(prompt_text):
        raise UserError(f"{row.where}: the tokenizer's chat template does not put the last message after the others")
    prompt, response = (
        list(tokenizer.encode(part, add_special_tokens=False)) for part in (prompt_text, text[len(prompt_text) :])
    )
    return prompt, _ended(response, tokenizer.eos_token_id)


def _plain(tokenizer: Any, prompt: str, response: str) -> tuple[list[int], list[int]]:
    # An empty prompt still encodes to the beginning-of-text token, where the tokenizer has one.
    prompt_ids = list(tokenizer.encode(prompt))
    response_ids = list(tokenizer.encode(response, add_special_tokens=False))
    if not prompt:
        return [], _ended(prompt_ids + response_ids, tokenizer.eos_token_id)
    return prompt_ids, _ended(response_ids, tokenizer.eos_token_id)


def _ended(tokens: list[int], end: int | None) -> list[int]:
    """`tokens` up to and with the last end-of-text token, which is added where there is none."""
    if end is None:
        return tokens
    if end not in tokens:
        return [*tokens, end]
    return tokens[: len(tokens) - tokens[::-1].index(end)]
