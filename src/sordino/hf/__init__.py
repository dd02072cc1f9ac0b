"""Hugging Face models, trained with differential privacy.

    import sordino.hf
    result = sordino.hf.train(model, dataset, plan, tokenizer, training_arguments, peft_config)

Causal language models and sequence classifiers, whole or by adapters (peft). The loss is computed per record from the
logits, independently of the model's own loss; rows are padded to a public length. With unit="user" in the plan all rows
of a user are one record, and `users` names their column. Arguments that would change which records take part in a step
are refused.
"""

from __future__ import annotations

from sordino.hf.arguments import optimizer_and_settings
from sordino.hf.texts import TextRecords, causal_loss, class_loss
from sordino.hf.training import train

__all__ = ["TextRecords", "causal_loss", "class_loss", "optimizer_and_settings", "train"]
