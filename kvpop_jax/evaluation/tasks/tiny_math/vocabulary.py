"""The closed vocabulary of tiny_math: every token of every problem, in token-id order.

Text is words separated by one space, lines separated by a newline; the newline is a token of its own. A number is
three digit tokens. `tools/build_tiny_tokenizer.py` turns `TOKENS` into the tokenizer of `assets/qwen3-tiny-math`;
`encode` gives the same ids without it, fast enough to feed training from one core.
"""

PAD, UNKNOWN, BEGIN, END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (PAD, UNKNOWN, BEGIN, END)
NEWLINE = "\n"
DIGITS = tuple("0123456789")
OPERATORS = ("+", "-", "*", "=")
LABELS = tuple(f"s{number}" for number in range(1, 41))
# fmt: off
NAMES = (
    "abel", "anna", "arlo", "beth", "bora", "carl", "cleo", "cora", "dana", "dina", "edda", "egon", "elin", "emil",
    "enzo", "ezra", "fay", "finn", "gita", "glen", "hana", "hugo", "ida", "igor", "ines", "ivan", "jana", "joel",
    "juno", "kai", "kara", "kim", "lars", "lena", "lora", "luca", "mara", "max", "mila", "milo", "nils", "nina",
    "nora", "olga", "omar", "otto", "paul", "petra", "rafe", "rita", "rosa", "sara", "seth", "tara", "theo", "tom",
    "uma", "vera", "wim", "zoe",
)
KINDS = ("red", "blue", "green", "amber")
STRUCTURE = (
    "u", "t", "h", "units", "tens", "carry", "borrow", "total", "add", "take", "at", "last", "work", "sum",
    "receipt", "from", "keep", "three", "digits", "find", "solution", "answer",
)
# fmt: on
# A filler sentence may put any name in for N and any number in for D.
FILLER = (
    "the train was late again",
    "snow lay on the hills",
    "N and N played chess until dark",
    "the train to the coast left N behind",
    "N walked D steps along the river",
    "page D of the book was torn",
    "the baker gave D loaves to N",
    "the clock in the tower struck D times for N",
    "N sold D pears and N sold D plums",
    "it rained for D days on the hills of N",
)
FILLER_WORDS = tuple(dict.fromkeys(word for line in FILLER for word in line.split() if word not in ("N", "D")))

TOKENS = (*SPECIALS, NEWLINE, ":", *DIGITS, *OPERATORS, *LABELS, *NAMES, *KINDS, *STRUCTURE, *FILLER_WORDS)
TOKEN_ID = {token: index for index, token in enumerate(TOKENS)}

CLASSES = ("digit", "name", "label", "operator", "punctuation", "word")
_CLASS = (
    dict.fromkeys(TOKENS, "word")
    | dict.fromkeys(DIGITS, "digit")
    | dict.fromkeys(NAMES, "name")
    | dict.fromkeys(LABELS, "label")
    | dict.fromkeys(OPERATORS, "operator")
    | dict.fromkeys((*SPECIALS, NEWLINE, ":"), "punctuation")
)


def token_class(token_text: str) -> str:
    """The class of one token, out of `CLASSES`. Unknown text counts as a word."""
    bare = token_text if token_text == NEWLINE else token_text.strip(" ")
    return _CLASS.get(bare, "word")


def words(text: str) -> list[str]:
    """The token texts of `text`. Special tokens have to stand apart, as `document` writes them."""
    return [word for word in text.replace(NEWLINE, " \n ").split(" ") if word]


def encode(text: str) -> list[int]:
    """Token ids of `text`, equal to the tokenizer's; KeyError on a word outside the vocabulary."""
    return [TOKEN_ID[word] for word in text.replace(NEWLINE, " \n ").split(" ") if word]
