"""What is known of models by their family. So far: which renderer speaks a model's language."""

from stovetop.client import Tokenizer


def recommended_renderer_name(tokenizer: Tokenizer) -> str:
    """The model's own chat template where its tokenizer has one; else it is a base model, spoken to in plain text."""
    return "role_colon" if tokenizer.chat_template is None else "chat_template"
