"""sordino: train PyTorch models with differential privacy, with an ε that is true.

    plan = sordino.dpsgd(epsilon=3.0, delta=1e-5, records=60_000, expected_batch=2048, epochs=30)
    print(plan.guarantee())
    result = sordino.train(model, loss, dataset, plan, optimizer=torch.optim.SGD, lr=0.5)

For your own training loop, use `private_steps` and `record_gradients`. Each method has a function that makes its plans:
`dpsgd`, `modelmix`, `hidden_state`, `dp_mac`, `coupling`, `correlated`.
"""

from typing import TYPE_CHECKING

from sordino.lazy import lazy_names

__version__ = "0.1.0"

__all__ = [
    "AutomaticClip",
    "Averaging",
    "Callback",
    "ClaimBroken",
    "EarlyStopping",
    "FlatClip",
    "Guarantee",
    "InputError",
    "L1Clip",
    "L2LinfClip",
    "Ledger",
    "MLflow",
    "NormalisedClip",
    "PerLayerClip",
    "Plan",
    "PrivateStep",
    "PublicSet",
    "Refused",
    "Result",
    "Rows",
    "Settings",
    "SordinoError",
    "TensorBoard",
    "Trained",
    "brute_force",
    "clipped_sum",
    "correlated",
    "coupling",
    "dp_mac",
    "dpsgd",
    "fix",
    "hidden_state",
    "load",
    "modelmix",
    "pad_to",
    "private_steps",
    "record_gradients",
    "train",
    "verify",
]

if TYPE_CHECKING:
    from sordino.clipping import AutomaticClip, FlatClip, L1Clip, L2LinfClip, NormalisedClip, PerLayerClip
    from sordino.errors import ClaimBroken, InputError, Refused, SordinoError
    from sordino.gradients import Rows, brute_force, clipped_sum, fix, verify
    from sordino.methods.makers import correlated, coupling, dp_mac, dpsgd, hidden_state, modelmix
    from sordino.plan import Guarantee, Plan, PublicSet
    from sordino.records.gradients import record_gradients
    from sordino.release.ledger import Ledger
    from sordino.runs.api import train
    from sordino.runs.trained import Trained, load
    from sordino.training import (
        Averaging,
        Callback,
        EarlyStopping,
        MLflow,
        PrivateStep,
        Result,
        Settings,
        TensorBoard,
        pad_to,
        private_steps,
    )
else:
    # The same names, imported on first use: importing torch takes seconds, and `sordino --help` does not need it.
    # tests/test_lazy_names.py checks that the lists agree and that no submodule has the name of a public object.
    __getattr__, _HOMES = lazy_names(
        __name__,
        {
            "clipping": ("AutomaticClip", "FlatClip", "L1Clip", "L2LinfClip", "NormalisedClip", "PerLayerClip"),
            "errors": ("ClaimBroken", "InputError", "Refused", "SordinoError"),
            "gradients": ("Rows", "brute_force", "clipped_sum", "fix", "verify"),
            "release.ledger": ("Ledger",),
            "methods.makers": ("correlated", "coupling", "dp_mac", "dpsgd", "hidden_state", "modelmix"),
            "plan": ("Guarantee", "Plan", "PublicSet"),
            "records.gradients": ("record_gradients",),
            "runs.trained": ("Trained", "load"),
            "runs.api": ("train",),
            "training": (
                "Averaging",
                "Callback",
                "EarlyStopping",
                "MLflow",
                "PrivateStep",
                "Result",
                "Settings",
                "TensorBoard",
                "pad_to",
                "private_steps",
            ),
        },
    )

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
