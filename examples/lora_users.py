"""LoRA on a small GPT, on texts of many users: the guarantee protects a user with all their texts.

Run it with `python examples/lora_users.py` (it needs transformers and peft: `pip install sordino[hf]`). The model is
made from a small configuration, so that nothing is downloaded; put `AutoModelForCausalLM.from_pretrained(…)` there.
"""

# ruff: noqa: E402
import sys

sys.modules.setdefault("torchvision", None)  # texts alone: an image library of another build need not load

import peft
import tokenizers
import torch
import transformers

import sordino
import sordino.hf

WORDS = ["the", "a", "ward", "patient", "doctor", "sleeps", "walks", "sees", "helps", "today", "again"]


def messages(users: int) -> list[dict[str, str]]:
    """Made-up messages: up to four of each user."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for user in range(users):
        for _ in range(1 + user % 4):
            words = torch.randint(len(WORDS), (6,), generator=draw).tolist()
            found.append({"user": f"u{user}", "text": " ".join(WORDS[word] for word in words)})
    return found


def main() -> None:
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[END]", *WORDS])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[END]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", eos_token="[END]")
    config = transformers.GPT2Config(vocab_size=len(vocabulary), n_embd=16, n_layer=1, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    plan = sordino.dpsgd(epsilon=3.0, delta=1e-4, records=200, expected_batch=50, steps=5, unit="user", rows_per_user=3)
    result = sordino.hf.train(
        model, messages(200), plan, tokenizer, {"learning_rate": 0.01},
        peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"), length=16, users="user",
    )  # fmt: skip
    trained = sum(p.numel() for p in result.model.parameters() if p.requires_grad)
    print(f"{trained} weights of the adapter, ε = {result.guarantee.epsilon:.3f} for a user with all their texts")


if __name__ == "__main__":
    main()
