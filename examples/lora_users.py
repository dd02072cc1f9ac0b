"""LoRA on a small GPT, on texts of many users: the guarantee protects a user with all their texts.

Run it with `python examples/lora_users.py` (it needs transformers and peft: `pip install sordino[hf]`). To avoid a
download, a small GPT is first trained on public sentences; replace it by `AutoModelForCausalLM.from_pretrained(…)` and
its tokenizer.
"""

# ruff: noqa: E402
import sys

sys.modules.setdefault("torchvision", None)  # only texts are used: a torchvision of another build is not loaded

import peft
import tokenizers
import torch
import transformers

import sordino
import sordino.hf

PARTS = ("the a", "ward patient doctor nurse", "sleeps walks sees helps", "today again soon")
WORDS = [word for part in PARTS for word in part.split()]


def sentences(count: int, order: tuple[int, ...], seed: int) -> list[str]:
    """Synthetic sentences: one word of each part of speech, in this order."""
    draw = torch.Generator().manual_seed(seed)
    words = [PARTS[part].split() for part in order]
    return [" ".join(some[int(torch.randint(len(some), (), generator=draw))] for some in words) for _ in range(count)]


def small_gpt(texts: list[str]) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerFast]:
    """A GPT trained on public texts, in place of a downloaded one."""
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[END]", *WORDS])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[END]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", eos_token="[END]")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=len(vocabulary), n_embd=32, n_layer=2, n_head=2, n_positions=8, bos_token_id=1, eos_token_id=1
        )
    )
    tokens = tokenizer(texts, return_tensors="pt")["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model, tokenizer


def main() -> None:
    public, private = (0, 1, 2, 3), (3, 0, 1, 2)  # in the users' sentences the adverb comes first
    model, tokenizer = small_gpt(sentences(200, public, seed=0))
    texts = iter(sentences(1000, private, seed=1))
    messages = [{"user": f"u{user}", "text": next(texts)} for user in range(400) for _ in range(1 + user % 4)]
    held_out = tokenizer(sentences(100, private, seed=2), return_tensors="pt")["input_ids"]

    def evaluate(gpt: torch.nn.Module) -> dict[str, float]:
        """The loss on sentences that belong to no user; the returned values are logged."""
        return {"test_loss": gpt(input_ids=held_out, labels=held_out).loss.item()}

    before = evaluate(model)["test_loss"]
    plan = sordino.dpsgd(epsilon=3.0, delta=1e-4, records=400, expected_batch=100, steps=30, unit="user",
                         rows_per_user=3)  # fmt: skip
    adapter = peft.LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    result = sordino.hf.train(
        model, messages, plan, tokenizer, {"learning_rate": 0.03}, adapter, length=8, users="user", evaluate=evaluate
    )
    trained = sum(p.numel() for p in result.model.parameters() if p.requires_grad)
    after = result.metrics[-1]["test_loss"]
    print(f"{trained} weights of the adapter, ε = {result.guarantee.epsilon:.3f} for a user with all their texts")
    print(f"loss on held-out sentences: {before:.2f} before, {after:.2f} after")


if __name__ == "__main__":
    main()
