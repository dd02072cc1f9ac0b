"""Settings of the process that a pass could change and a later one ask for."""

from __future__ import annotations

import decimal
import gc
import locale
import logging
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as modules

from sordino.gradients.state.marks import NUMBERS

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
# of torch._C, where this version has them
_NAMES = """
    _get_mkldnn_enabled _get_mkldnn_deterministic _get_nnpack_enabled _get_cudnn_enabled _get_cudnn_benchmark
    _get_cudnn_deterministic _get_cudnn_allow_tf32 _get_cublas_allow_tf32 _get_qengine _get_flash_sdp_enabled
    _get_math_sdp_enabled _get_mem_efficient_sdp_enabled _get_cudnn_sdp_enabled
    _get_cublas_allow_fp16_reduced_precision_reduction _get_cublas_allow_bf16_reduced_precision_reduction
    _get_cpu_allow_fp16_reduced_precision_reduction _get_deterministic_algorithms_warn_only
    _get_deterministic_fill_uninitialized_memory _get_warnAlways _is_multithreading_enabled _is_view_replay_enabled
    is_autocast_cache_enabled
"""
_ASKED: list[Callable[[], Any]] = [one for name in _NAMES.split() if (one := getattr(torch._C, name, None)) is not None]
_TINY, _ONE = np.float32(1e-39), np.float32(1)
_HOOKS = [held for name, held in vars(modules).items() if name.startswith("_global_") and isinstance(held, dict)]


def settings() -> dict[str, Any]:
    """By the name of their library."""
    thread, root = threading.current_thread(), logging.getLogger()
    return {
        "Python": (
            *(sys.getrecursionlimit(), sys.getswitchinterval()),
            *(gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()),
            *(sys.getprofile(), sys.gettrace(), getattr(sys, "get_int_max_str_digits", int)()),
            *(locale.setlocale(locale.LC_ALL), repr(decimal.getcontext()), [signal.getsignal(one) for one in _SIGNALS]),
            *(root.level, root.disabled, root.manager.disable),
            [(key, value) for key, value in vars(thread).items() if isinstance(value, NUMBERS)],
        ),
        "numpy": (np.geterr(), np.get_printoptions()),
        "torch": (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_anomaly_enabled(),
            *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            repr(torch._tensor_str.PRINT_OPTS),
            [one() for one in _ASKED],
            list(map(len, _HOOKS)),
            getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is None,
            bool(_TINY * _ONE),  # not so if denormal numbers are flushed
            _saves_tensors(),
        ),
    }


def _saves_tensors() -> bool:
    """Does autograd save tensors as they are, or as a sharded model of ours has it?"""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is None or type(hooks[0]).__module__.partition(".")[0] == "sordino"
