"""Tokenizers: transformers' for model folders, and the byte-level BPE inside a GGUF file, rebuilt."""

import os
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing

from kvpop_jax.errors import UserError
from kvpop_jax.models.gguf import GGUFFile

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a model folder, as transformers' AutoTokenizer builds it.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{folder}: holds no tokenizer (tokenizer.json)")
    try:
        return _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: the tokenizer cannot be read: {' '.join(str(error).split())}") from error


def gguf_tokenizer(file: GGUFFile) -> Any:
    """The file's tokenizer as a transformers fast tokenizer, chat template included.

    transformers itself can do this only where torch is installed, and ignores the file's rule for splitting numbers.

    Raises:
        UserError: the file holds none, or one of a kind that is not byte-level BPE with a known splitting rule.
    """

    def field(name: str) -> Any:
        if f"tokenizer.ggml.{name}" not in file.metadata:
            raise UserError(f"{file.path}: metadata key tokenizer.ggml.{name} is missing")
        return file.metadata[f"tokenizer.ggml.{name}"]

    model = field("model")
    if model != "gpt2":
        raise UserError(f"{file.path}: tokenizer.ggml.model is {model!r}; only 'gpt2' (byte-level BPE) is supported")
    rule, tokens, kinds = field("pre"), field("tokens"), field("token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in field("merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=rule == "llama-bpe"))
    byte_level = ByteLevel(add_prefix_space=False, use_regex=rule == "smollm")
    tokenizer.pre_tokenizer = Sequence([*_splitters(file, rule), byte_level])
    tokenizer.decoder = ByteLevelDecoder()
    if rule == "qwen2":
        tokenizer.normalizer = NFC()
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False) for token, kind in added])

    special = {
        role: tokens[file.metadata[key]]
        for role, key in {
            "bos_token": "tokenizer.ggml.bos_token_id",
            "eos_token": "tokenizer.ggml.eos_token_id",
            "unk_token": "tokenizer.ggml.unknown_token_id",
            "pad_token": "tokenizer.ggml.padding_token_id",
        }.items()
        if key in file.metadata
    }
    if file.metadata.get("tokenizer.ggml.add_bos_token", rule == "llama-bpe"):
        bos = special["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return _transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _splitters(file: GGUFFile, rule: str) -> list[PreTokenizer]:
    """What comes before the byte-level step, by the name that llama.cpp gives to the rule."""
    match rule:
        case "smollm":
            return [Digits(individual_digits=True)]
        case "qwen2":
            return [Split(Regex(_SPLIT.format(number=r"\p{N}")), "isolated")]
        case "llama-bpe":
            return [Split(Regex(_SPLIT.format(number=r"\p{N}{1,3}")), "isolated")]
        case _:
            raise UserError(f"{file.path}: tokenizer.ggml.pre is {rule!r}; supported are smollm, qwen2, llama-bpe")


def _transformers() -> Any:
    """transformers, imported at first use because it takes seconds, and without its advice to install torch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers
