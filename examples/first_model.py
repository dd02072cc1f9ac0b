"""A first private model: a linear classifier of the embedded images, ε = 3.

Run it with `python examples/first_model.py`.
"""

import torch

import sordino
from sordino.data import load


def main() -> None:
    data = load("fashion-mnist-mini")  # 12,000 images in the package
    plan = sordino.dpsgd(epsilon=3.0, delta=1e-5, records=12_000, expected_batch=1000, steps=60, clip_norm=1.0)
    print(plan.guarantee())

    def accuracy(model: torch.nn.Module) -> dict[str, float]:
        """The accuracy on test images, which must be public: the returned values are logged."""
        return {"accuracy": (model(data.test.inputs).argmax(1) == data.test.targets).float().mean().item()}

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    result = sordino.train(model, torch.nn.functional.cross_entropy, data.train, plan, lr=0.5, evaluate=accuracy)
    print(f"test accuracy {result.metrics[-1]['accuracy']:.1%} at ε = {result.guarantee.epsilon:.3f}")


if __name__ == "__main__":
    main()
