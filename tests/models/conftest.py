import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(params=["qwen3_untied", "qwen3_tied", "llama31"])
def golden(request) -> Path:
    """Folder of a tiny random model that transformers made, with the logits that transformers computed."""
    return GOLDEN / request.param


@pytest.fixture
def llama31() -> Path:
    return GOLDEN / "llama31"


@pytest.fixture
def smollm2_golden() -> Path:
    return GOLDEN / "smollm2.npz"


@pytest.fixture
def model_folder(tmp_path) -> Path:
    """A copy of the untied tiny Qwen3 that a test may damage."""
    return Path(shutil.copytree(GOLDEN / "qwen3_untied", tmp_path / "model"))


@pytest.fixture
def edit_config(model_folder):
    """Change fields of the copy's config.json; None removes a field."""

    def edit(**changes) -> Path:
        file = model_folder / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
        return model_folder

    return edit


@pytest.fixture
def tokenizer():
    """A real tokenizer of 64 words, the tiny models' vocabulary size."""
    transformers = pytest.importorskip("transformers")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0")
