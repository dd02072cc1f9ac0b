"""sordino: train PyTorch models with differential privacy, with an ε that is true.

    plan = sordino.Plan.dpsgd(epsilon=3.0, delta=1e-5, records=60_000, expected_batch=2048, epochs=30)
    print(plan.guarantee())
    result = sordino.train(model, loss, dataset, plan, optimizer=torch.optim.SGD, lr=0.5)

`private_steps` and `record_gradients` are the same in pieces, for hand-written loops.
"""

__version__ = "0.1.0"

from sordino.clipping import AutomaticClip, FlatClip, L1Clip, L2LinfClip, NormalisedClip, PerLayerClip
from sordino.errors import ClaimBroken, InputError, Refused, SordinoError
from sordino.gradients import Rows, brute_force, clipped_sum, fix, verify
from sordino.ledger import Ledger
from sordino.plan import Guarantee, Plan
from sordino.steps import PrivateStep, private_steps, record_gradients
from sordino.training import Result, Settings, train
from sordino.updates import Averaging

__all__ = [
    "AutomaticClip",
    "Averaging",
    "ClaimBroken",
    "FlatClip",
    "Guarantee",
    "InputError",
    "L1Clip",
    "L2LinfClip",
    "Ledger",
    "NormalisedClip",
    "PerLayerClip",
    "Plan",
    "PrivateStep",
    "Refused",
    "Result",
    "Rows",
    "Settings",
    "SordinoError",
    "brute_force",
    "clipped_sum",
    "fix",
    "private_steps",
    "record_gradients",
    "train",
    "verify",
]
