"""Training of which only the last iterate is seen: certified losses, the certificate, and the loop.

    loss = Softmax(outputs=10, cap=0.1)
    certify(loss, Geometry(feature_norm=1.0, bias=0.3), regularisation=1e-4)      what the guarantee rests on
    plan = sordino.methods.hidden_state.plan(loss=loss, epsilon=3, delta=1e-5, records=60000, batch=60000, …)
    sordino.hidden.training.train_hidden(plan, dataset)                           the last iterate, and nothing else

What is proved, and of which adversary: docs/guarantees/hidden_state.md. What it reaches: docs/hidden_state.md.
"""

from __future__ import annotations

from sordino.hidden.certificate import Certificate, Geometry, certify
from sordino.hidden.losses import Huber, Loss, OneVsRest, Softmax, Squared, clipped_softmax, loss_from_dict

__all__ = [
    "Certificate",
    "Geometry",
    "Huber",
    "Loss",
    "OneVsRest",
    "Softmax",
    "Squared",
    "certify",
    "clipped_softmax",
    "loss_from_dict",
]
