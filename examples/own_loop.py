"""Your own training loop with any optimizer and scheduler, on released gradients.

Run it with `python examples/own_loop.py`.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import sordino


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2000, 8)
    targets = (inputs[:, 0] + inputs[:, 1] > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    plan = sordino.dpsgd(epsilon=3.0, delta=1e-5, records=2000, expected_batch=200, steps=50)
    gradient_sum = sordino.record_gradients(model, torch.nn.functional.cross_entropy, (inputs, targets), plan.clipping)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=plan.steps)

    with TemporaryDirectory() as folder, sordino.Ledger.open(Path(folder) / "ledger.jsonl", plan.to_dict()) as ledger:
        for step in sordino.private_steps(plan, gradient_sum, records=2000, source=plan.source(), ledger=ledger):
            step.assign(model)  # stores the released gradients in parameter.grad
            optimizer.step()
            scheduler.step()
        print(f"{len(ledger.entries)} releases in the ledger, ε = {plan.guarantee().epsilon:.3f}")


if __name__ == "__main__":
    main()
