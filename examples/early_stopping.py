"""Your own module: training is stopped early by a metric of public data, and later resumed to the end of the plan.

Run it with `python examples/early_stopping.py`.
"""

from tempfile import TemporaryDirectory

import torch

import sordino


class Net(torch.nn.Module):
    """Any module whose records do not interact."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(rows)))


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2000, 8)
    targets = (inputs[:, 0] > 0).long()
    public = torch.randn(200, 8)

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        """The metrics of the model on public rows."""
        return {"test_loss": torch.nn.functional.cross_entropy(model(public), (public[:, 0] > 0).long()).item()}

    plan = sordino.dpsgd(epsilon=3.0, delta=1e-5, records=2000, expected_batch=200, steps=40)
    settings = sordino.Settings(eval_every=5)
    with TemporaryDirectory() as folder:
        options = {"lr": 0.5, "settings": settings, "evaluate": evaluate, "out": f"{folder}/run"}
        loss, records = torch.nn.functional.cross_entropy, (inputs.numpy(), targets.numpy())
        stop = sordino.EarlyStopping("test_loss", patience=1, least=0.05)
        first = sordino.train(Net(), loss, records, plan, callbacks=[stop], **options)
        print(f"stopped after {first.stopped_at} steps; ε spent: {first.guarantee.beside.get('epsilon_spent')}")
        result = sordino.train(Net(), loss, records, plan, resume=True, **options)  # makes the remaining steps
        model = sordino.load(f"{folder}/run", model=Net())
        print(f"ε = {result.guarantee.epsilon:.3f} after all steps; predictions {model.predict(public[:3])}")


if __name__ == "__main__":
    main()
