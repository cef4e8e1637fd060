"""Where RULER's tasks take words from: pairs from two short lists for keys, the running text for everything else."""

import random
import re
from collections import Counter

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import corpus
from kvpop_jax.evaluation.settings import EvalSettings

_ADJECTIVES = """
able aged amber ample azure basic bitter blue bold brave brief bright broad busy calm careful cheap chief civil clean
clear clever cold common cool crisp curious dark dear deep direct double dry dull eager early easy empty equal fair
famous fancy final fine firm fresh full gentle glad golden grand green happy hard heavy high hollow honest huge humble
icy ideal keen kind large late lazy level light little live local lone long loud lucky mellow mild modern modest
narrow neat new noble odd old open orange patient plain polite proud pure quick quiet rapid rare ready real rich ripe
robust rough round royal
"""
_NOUNS = """
acorn anchor apple arrow autumn badge basket beach bell bench berry bird blanket boat book bottle branch bread bridge
brush bucket butter button cabin camel candle canyon carpet castle cedar chair cherry circle city clock cloud coast
coffee comet copper corner cottage cotton crane crown desert dinner door dragon drum eagle engine farm feather fence
field finger flag flower forest fountain fox garden gate glass glove harbor hat hill horse house island jacket jewel
kettle key kitchen ladder lake lamp lantern leaf lemon letter lion maple market meadow mirror moon mountain music
needle night ocean olive orchard oven owl palace paper pearl pencil piano pillow planet pocket pond potato pumpkin
rabbit rain ribbon river road rocket roof rose sail salt school shadow ship shoe silver spoon spring square stone
storm street summer table tent tiger tower train tree valley violin wagon wall watch water wheel window winter wolf
yard
"""
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())
_SHORTEST, _LONGEST = 4, 10  # letters of a word in a list
_LEAST_USES = 2  # of a word in the text: what stands there once is mostly a name or a misprint


def compound(rng: random.Random) -> str:
    """A key such as `amber-lantern`."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def running_text(settings: EvalSettings, name: str) -> str:
    """All text that the settings point to, one file after the other.

    Raises:
        UserError: They point to none; `name` says which task wants it.
    """
    files = corpus.text_files(settings)
    text = " ".join(map(corpus.read_text, files))
    if not text.strip():
        raise UserError(f"{name} needs running text: --text FILE, or --data_dir with a folder longtext of .txt files")
    return text


def words_of(text: str) -> list[str]:
    """The different lower-case words of ordinary length in the text, in alphabetical order."""
    inside = r"[\w'\u2019-]"  # of a longer word
    uses = Counter(re.findall(rf"(?<!{inside})[a-z]{{{_SHORTEST},{_LONGEST}}}(?!{inside})", text))
    return sorted(word for word, count in uses.items() if count >= _LEAST_USES)
