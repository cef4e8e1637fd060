"""The shape of a model: what one decoder needs to know to be Qwen3, Llama 3.1 or SmolLM2, and its Hugging Face form."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpop_jax.errors import UserError

ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's rescaling of the rotary frequencies; see `rope.rope_frequencies`."""

    factor: float
    """Wavelengths longer than `original_max_position / low_freq_factor` are stretched by this."""
    low_freq_factor: float
    high_freq_factor: float
    """Wavelengths shorter than `original_max_position / high_freq_factor` are kept; those between are interpolated."""
    original_max_position: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder. Immutable and hashable, so that it can be a static argument of `jax.jit`."""

    family: str
    """"qwen3" or "llama": decides the names written to config.json, never the computation."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    """The unembedding is the embedding; there is no separate head."""
    qk_norm: bool
    """RMS-normalise every query and key head before the rotation (Qwen3)."""
    max_position: int
    """Context length the model was trained for; recorded, not enforced."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Any of these ends a generation."""
    pad_token_id: int | None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd; rotary embedding needs an even head dimension")

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, where: str = "config.json"
    ) -> "ModelConfig":
        """Read a Hugging Face config.json, as transformers 4 (`rope_theta`) or 5 (`rope_parameters`) writes it.

        Args:
            config: the parsed config.json.
            generation: the parsed generation_config.json, whose end-of-sequence ids take precedence.
            where: the file, for error messages.

        Raises:
            UserError: a field is missing, ill-typed, or asks for something this decoder does not compute.
        """
        fields = Fields(config, where)
        family = _family(fields)
        _refuse_unsupported(fields)
        hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        # Llama configs from before transformers 4.45 leave head_dim out; Qwen3 never derives it from the hidden size.
        derived_head_dim = hidden_size // num_heads if family == "llama" else None
        rope_theta, rope_scaling = _rope(fields)
        eos = (generation or {}).get("eos_token_id")
        return cls.read_from(
            where,
            family=family,
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.size("intermediate_size"),
            num_layers=fields.size("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.size("num_key_value_heads", default=num_heads),
            head_dim=fields.size("head_dim", default=derived_head_dim),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=family == "qwen3",
            max_position=fields.size("max_position_embeddings"),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_token_ids(config.get("eos_token_id") if eos is None else eos),
            pad_token_id=config.get("pad_token_id"),
        )

    @classmethod
    def read_from(cls, where: str, **values: Any) -> "ModelConfig":
        """`ModelConfig(**values)`, with `where` in the message if the values contradict each other."""
        try:
            return cls(**values)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """The config.json that transformers 4 and 5 open; `dtype` is the dtype of the weights beside it."""
        architecture = next(name for name, family in ARCHITECTURES.items() if family == self.family)
        return {
            "architectures": [architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            # The older spelling: transformers 5 still reads it, transformers 4 reads no other.
            "rope_theta": self.rope_theta,
            "rope_scaling": _rope_scaling_to_hf(self.rope_scaling),
            "max_position_embeddings": self.max_position,
            "tie_word_embeddings": self.tie_embeddings,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": dtype,
            **self.generation_to_hf(),
        }

    def generation_to_hf(self) -> dict[str, Any]:
        """The generation_config.json: the special token ids."""
        eos = self.eos_token_ids
        return {
            "bos_token_id": self.bos_token_id,
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
            "pad_token_id": self.pad_token_id,
        }


@dataclass(frozen=True)
class Fields:
    """A config dictionary and the file it came from, so that each wrong field is reported by both names."""

    values: Mapping[str, Any]
    where: str

    def size(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.where}: field {name!r} is missing; it must be a positive integer")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{self.where}: field {name!r} must be a positive integer, not {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self.values.get(name)
        if value is None:
            raise UserError(f"{self.where}: field {name!r} is missing; it must be a positive number")
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise UserError(f"{self.where}: field {name!r} must be a positive number, not {value!r}")
        return float(value)


def _family(fields: Fields) -> str:
    name = (fields.values.get("architectures") or [None])[0]
    if name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise UserError(f"{fields.where}: field 'architectures' names {name!r}; supported are {supported}")
    return ARCHITECTURES[name]


def _refuse_unsupported(fields: Fields) -> None:
    """Refuse what would be computed wrongly if it were ignored."""
    for name in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"):
        if fields.values.get(name):
            raise UserError(f"{fields.where}: field {name!r} is {fields.values[name]!r}, which is not supported")
    other = set(fields.values.get("layer_types") or ()) - {"full_attention"}
    if other:
        raise UserError(f"{fields.where}: field 'layer_types' has {sorted(other)}; only 'full_attention' is supported")
    activation = fields.values.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"{fields.where}: field 'hidden_act' is {activation!r}; only 'silu' is supported")


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling. A missing base is an error: transformers' silent default of 10000 ruins a model."""
    name = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    rope = Fields(fields.values.get(name) or {}, f"{fields.where} ({name})")
    theta = rope.number("rope_theta") if "rope_theta" in rope.values else fields.number("rope_theta")
    if rope.values.get("partial_rotary_factor", fields.values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(f"{fields.where}: field 'partial_rotary_factor' is not 1, which is not supported")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{rope.where}: field 'rope_type' is {kind!r}; supported are 'default' and 'llama3'")
    return theta, RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.size("original_max_position_embeddings"),
    )


def _rope_scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
