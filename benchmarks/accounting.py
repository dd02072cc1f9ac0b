"""The time and tightness of ε and of calibrated noise, compared with the peers.

    python benchmarks/accounting.py [--json FILE] [--repeat N]

Each row is one accountant on one setting: the value, and the best processor time of N runs. The value is ε at the noise
multiplier, or the noise multiplier for the target ε. Peers run with their default precision: dp-accounting's PLD with
interval 1e-4, Opacus' PRV with an error of 0.01. A peer that fails is reported as failing.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import dp_accounting
from dp_accounting import dp_event, pld, rdp
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.utils import get_noise_multiplier

from sordino.accounting import epsilon
from sordino.methods.dpsgd.accountant import account_dpsgd, calibrate_dpsgd


class Setting(NamedTuple):
    rate: float
    sigma: float
    steps: int
    delta: float
    target: float


SETTINGS = (
    Setting(0.01, 1.1, 10_000, 1e-5, 2.0),
    Setting(2048 / 60_000, 1.6, 879, 1e-5, 3.0),
    Setting(0.001, 0.7, 20_000, 1e-6, 2.0),
)


class Row(NamedTuple):
    task: str
    setting: str
    accountant: str
    value: float | str
    seconds: float


def event(setting: Setting, sigma: float) -> dp_event.DpEvent:
    step = dp_event.PoissonSampledDpEvent(setting.rate, dp_event.GaussianDpEvent(sigma))
    return dp_event.SelfComposedDpEvent(step, setting.steps)


def google_epsilon(setting: Setting, make: Callable[[], Any]) -> float:
    return float(make().compose(event(setting, setting.sigma)).get_epsilon(setting.delta))


def google_sigma(setting: Setting, make: Callable[[], Any]) -> float:
    return float(
        dp_accounting.calibrate_dp_mechanism(
            make, lambda sigma: event(setting, sigma), setting.target, setting.delta, tol=1e-3
        )
    )


def opacus_epsilon(setting: Setting, make: Callable[[], Any]) -> float:
    accountant = make()
    accountant.history = [(setting.sigma, setting.rate, setting.steps)]
    return float(accountant.get_epsilon(setting.delta))


def opacus_sigma(setting: Setting, name: str) -> float:
    return float(
        get_noise_multiplier(
            target_epsilon=setting.target,
            target_delta=setting.delta,
            sample_rate=setting.rate,
            steps=setting.steps,
            accountant=name,
            epsilon_tolerance=1e-3,
        )
    )


def ours_sigma(setting: Setting, accountant: str) -> float:
    found = calibrate_dpsgd(
        setting.target, setting.steps, setting.delta, sampling_rate=setting.rate, accountant=accountant
    )
    return float(found["noise_multiplier"])


def tasks(setting: Setting) -> dict[tuple[str, str], Callable[[], float]]:
    def google_pld() -> Any:
        return pld.PLDAccountant(value_discretization_interval=1e-4)

    def google_rdp() -> Any:
        return rdp.RdpAccountant()

    ours = event(setting, setting.sigma)
    return {
        ("epsilon", "sordino pld"): lambda: epsilon(ours, setting.delta),
        ("epsilon", "dp-accounting pld"): lambda: google_epsilon(setting, google_pld),
        ("epsilon", "opacus prv"): lambda: opacus_epsilon(setting, PRVAccountant),
        ("epsilon", "sordino rdp"): lambda: epsilon(ours, setting.delta, accountant="rdp"),
        ("epsilon", "dp-accounting rdp"): lambda: google_epsilon(setting, google_rdp),
        ("epsilon", "opacus rdp"): lambda: opacus_epsilon(setting, RDPAccountant),
        ("calibrate", "sordino pld"): lambda: ours_sigma(setting, "pld"),
        ("calibrate", "dp-accounting pld"): lambda: google_sigma(setting, google_pld),
        ("calibrate", "opacus prv"): lambda: opacus_sigma(setting, "prv"),
        ("calibrate", "sordino rdp"): lambda: ours_sigma(setting, "rdp"),
        ("calibrate", "dp-accounting rdp"): lambda: google_sigma(setting, google_rdp),
        ("calibrate", "opacus rdp"): lambda: opacus_sigma(setting, "rdp"),
    }


def measure(action: Callable[[], float], repeat: int) -> tuple[float | str, float]:
    best = float("inf")
    value: float | str = ""
    for _ in range(repeat):
        begin = time.process_time()
        try:
            value = action()
        except Exception as error:  # the failure of a peer is reported as its result
            value = f"fails: {type(error).__name__}"
        best = min(best, time.process_time() - begin)
    return value, best


def run(repeat: int) -> list[Row]:
    account_dpsgd(1.0, 10, 1e-5, sampling_rate=0.1)  # so that imports and first calls are not measured
    rows = []
    for setting in SETTINGS:
        for (task, name), action in tasks(setting).items():
            given = f"σ={setting.sigma}" if task == "epsilon" else f"ε={setting.target}"
            text = f"q={setting.rate:.4g} T={setting.steps} δ={setting.delta:g} {given}"
            value, seconds = measure(action, repeat)
            rows.append(Row(task, text, name, value, seconds))
            shown = value if isinstance(value, str) else f"{value:.5f}"
            print(f"{task:10} {text:38} {name:18} {shown:>22} {seconds:8.3f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning, module="opacus")
    rows = run(arguments.repeat)
    if arguments.json:
        document = {"machine": platform.platform(), "rows": [row._asdict() for row in rows]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
