"""Models in GGUF files, as transformers reads them: every value as it is. Weights that are quantised in blocks are
dequantised, and fit no shorter float than float32 without loss."""

# transformers has next to no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stovetop.extras import require_extra

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def require_gguf_extra() -> None:
    """transformers reads GGUF files through these two."""
    require_extra("gguf", "gguf", "accelerate")


def load_gguf_config(path: Path) -> "PretrainedConfig":
    from transformers import AutoConfig

    require_gguf_extra()
    return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


def load_gguf_model(path: Path, **options: Any) -> "PreTrainedModel":
    """`options` are those of `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    require_gguf_extra()
    try:  # a transformers that can leave weights quantised must be told not to
        from transformers import GgufConfig
    except ImportError:
        pass
    else:
        options["quantization_config"] = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)


def load_gguf_tokenizer(path: Path, config: "PretrainedConfig") -> "PreTrainedTokenizerBase":
    """`config` is the model's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers 5.17 takes these from its defaults instead of the file
    tokenizer.eos_token_id, tokenizer.pad_token_id = config.eos_token_id, config.pad_token_id
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer
