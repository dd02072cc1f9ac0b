"""An interrupted run is resumed: released steps whose update was lost are skipped, and ε remains that of the plan.

Run it with `python examples/resume.py`.
"""

from tempfile import TemporaryDirectory

import torch

import sordino


def interrupted(row: dict[str, float]) -> None:
    """Simulates a kill: it is called after step 8, when the last checkpoint is that of step 5."""
    raise KeyboardInterrupt


def main() -> None:
    inputs = torch.randn(1000, 8)
    dataset = inputs, (inputs[:, 0] > 0).long()
    loss = torch.nn.functional.cross_entropy
    plan = sordino.dpsgd(epsilon=3.0, delta=1e-5, records=1000, expected_batch=100, steps=20)
    settings = sordino.Settings(checkpoint_every=5, eval_every=8)
    with TemporaryDirectory() as folder:
        try:
            sordino.train(
                *(torch.nn.Linear(8, 2), loss, dataset, plan),
                lr=0.5,
                settings=settings,
                out=folder,
                callbacks=[interrupted],
            )
        except KeyboardInterrupt:
            print("interrupted")
        result = sordino.train(
            torch.nn.Linear(8, 2), loss, dataset, plan, lr=0.5, settings=settings, out=folder, resume=True
        )
        print(f"{result.skipped_steps} steps skipped, ε = {result.guarantee.epsilon:.3f}")


if __name__ == "__main__":
    main()
