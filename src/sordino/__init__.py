"""sordino: train PyTorch models with differential privacy, with an ε that is true.

    plan = sordino.Plan.dpsgd(epsilon=3.0, delta=1e-5, records=60_000, expected_batch=2048, epochs=30)
    print(plan.guarantee())
    result = sordino.train(model, loss, dataset, plan, optimizer=torch.optim.SGD, lr=0.5)

`private_steps` and `record_gradients` are the same in pieces, for hand-written loops.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

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

if TYPE_CHECKING:
    from sordino.clipping import AutomaticClip, FlatClip, L1Clip, L2LinfClip, NormalisedClip, PerLayerClip
    from sordino.errors import ClaimBroken, InputError, Refused, SordinoError
    from sordino.gradients import Rows, brute_force, clipped_sum, fix, verify
    from sordino.ledger import Ledger
    from sordino.plan import Guarantee, Plan
    from sordino.steps import PrivateStep, private_steps, record_gradients
    from sordino.training import Result, Settings, train
    from sordino.updates import Averaging
else:
    # The same names, imported when they are asked for: torch takes seconds, and `sordino --help` has no use for it.
    # tests/test_lazy_names.py holds the lists together, and keeps submodules from taking a public name.
    _NAMES = {
        "clipping": ("AutomaticClip", "FlatClip", "L1Clip", "L2LinfClip", "NormalisedClip", "PerLayerClip"),
        "errors": ("ClaimBroken", "InputError", "Refused", "SordinoError"),
        "gradients": ("Rows", "brute_force", "clipped_sum", "fix", "verify"),
        "ledger": ("Ledger",),
        "plan": ("Guarantee", "Plan"),
        "steps": ("PrivateStep", "private_steps", "record_gradients"),
        "training": ("Result", "Settings", "train"),
        "updates": ("Averaging",),
    }
    _HOMES = {name: module for module, names in _NAMES.items() for name in names}

    def __getattr__(name: str) -> object:
        """A public name, or a submodule: `sordino.methods` needs no import of its own."""
        from importlib import import_module

        if name in _HOMES:
            found = globals()[name] = getattr(import_module(f"sordino.{_HOMES[name]}"), name)
            return found
        try:
            if not name.startswith("_"):
                return import_module(f"sordino.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"sordino.{name}":
                raise
        raise AttributeError(f"module 'sordino' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
