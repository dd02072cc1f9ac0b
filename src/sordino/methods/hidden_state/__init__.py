"""Hidden state (Ye & Shokri 2022): training with a certified loss, of which only the last iterate is published.

    loss = Softmax(outputs=10, cap=0.1)
    certify(loss, Geometry(feature_norm=1.0, bias=0.3), regularisation=1e-4)      the constants that the proof needs
    made = plan(loss=loss, epsilon=3, delta=1e-5, records=60000, batch=60000, …)
    train_hidden(made, dataset)                                                   the last iterate, and nothing else

What is proved, against which adversary: docs/guarantees/hidden_state.md. Measured accuracy: docs/hidden_state.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino.lazy import lazy_names

if TYPE_CHECKING:
    from sordino.methods.hidden_state.certificate import Certificate, Geometry, certify
    from sordino.methods.hidden_state.losses import (
        Huber,
        Loss,
        OneVsRest,
        Softmax,
        Squared,
        clipped_softmax,
        loss_from_dict,
    )
    from sordino.methods.hidden_state.method import PURPOSE, HiddenState, plan
    from sordino.methods.hidden_state.training import train_hidden
else:
    __getattr__, _ = lazy_names(
        __name__,
        {
            "certificate": ["Certificate", "Geometry", "certify"],
            "losses": ["Huber", "Loss", "OneVsRest", "Softmax", "Squared", "clipped_softmax", "loss_from_dict"],
            "method": ["PURPOSE", "HiddenState", "plan"],
            "training": ["train_hidden"],
        },
    )

__all__ = [
    "PURPOSE",
    "Certificate",
    "Geometry",
    "HiddenState",
    "Huber",
    "Loss",
    "OneVsRest",
    "Softmax",
    "Squared",
    "certify",
    "clipped_softmax",
    "loss_from_dict",
    "plan",
    "train_hidden",
]
