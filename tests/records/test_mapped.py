"""Datasets that do not fit into memory: mapped arrays, Arrow files and folders of images, read while others compute."""

from __future__ import annotations

import multiprocessing
import resource
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sordino
from sordino.errors import InputError
from sordino.records.mapped import Mapped

RECORDS, WIDTH, CLASSES = 600, 12, 3


def _rows(records: int = RECORDS) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return random.integers(0, 200, (records, WIDTH)).astype(np.uint8), random.integers(0, CLASSES, records)


def _weights(dataset: Any, **options: Any) -> bytes:
    torch.manual_seed(0)
    net = nn.Linear(WIDTH, CLASSES)
    plan = sordino.dpsgd(noise_multiplier=2.0, delta=1e-4, records=RECORDS, expected_batch=60, steps=3, insecure_seed=1)
    settings = sordino.Settings(chunk=16, progress=False)
    sordino.train(net, cross_entropy, dataset, plan, lr=0.1, settings=settings, **options)
    return b"".join(p.detach().numpy().tobytes() for p in net.parameters())


class Arrow:
    """A map-style dataset of dicts over a memory-mapped Arrow file."""

    def __init__(self, path: Path) -> None:
        self.table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.threads.add(threading.current_thread().name)
        row = self.table.slice(index, 1)
        values = np.asarray(row["pixels"][0].values)
        return {"input": torch.tensor(values, dtype=torch.float32), "label": int(row["label"][0].as_py())}


class Folder:
    """A folder of images, one directory for each class, as torchvision's ImageFolder."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*/*.png"), key=lambda path: path.name)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.files[index]) as image:
            return torch.from_numpy(np.array(image)).float().flatten(), int(self.files[index].parent.name)


def _arrow(folder: Path, kind: type[Arrow] = Arrow) -> Any:
    x, y = _rows()
    table = pa.table({"pixels": list(x), "label": y})
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return kind(folder / "rows.arrow")


def _folder(folder: Path) -> Any:
    for number, (pixels, label) in enumerate(zip(*_rows(), strict=True)):
        (folder / str(label)).mkdir(exist_ok=True)
        Image.fromarray(pixels.reshape(3, 4)).save(folder / str(label) / f"{number:04d}.png")
    return Folder(folder)


class Pairs(Arrow):
    """The same rows as (input, target)."""

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        return item["input"], item["label"]


def _mapped(folder: Path) -> Any:
    x, y = _rows()
    np.save(folder / "x.npy", x.astype(np.float64))
    np.save(folder / "y.npy", y.astype(np.uint16))
    return np.load(folder / "x.npy", mmap_mode="r"), np.load(folder / "y.npy", mmap_mode="r")


def _stacked(items: list[Any]) -> Any:
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


@pytest.fixture(scope="module")
def in_memory() -> bytes:
    x, y = _rows()
    return _weights((torch.from_numpy(x).float(), torch.from_numpy(y)))


@pytest.mark.parametrize("made", [partial(_arrow, kind=Pairs), _folder], ids=["arrow", "images"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "collate": _stacked}])
def test_a_run_over_files_is_the_run_over_tensors(
    made: Callable[[Path], Any], options: dict[str, Any], in_memory: bytes, tmp_path: Path
) -> None:
    assert _weights(made(tmp_path), **options) == in_memory


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_mapped_arrays_of_any_type_give_the_run_over_tensors(
    options: dict[str, Any], in_memory: bytes, tmp_path: Path
) -> None:
    assert _weights(_mapped(tmp_path), **options) == in_memory


def test_items_of_an_arrow_file_are_read_by_threads_while_others_are_computed(tmp_path: Path) -> None:
    class Net(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    dataset = _arrow(tmp_path)
    plan = sordino.dpsgd(noise_multiplier=2.0, delta=1e-4, records=RECORDS, expected_batch=60, steps=2)
    sordino.train(
        Net(WIDTH, CLASSES), cross_entropy, dataset, plan, lr=0.1, num_workers=2,
        settings=sordino.Settings(progress=False),
    )  # fmt: skip
    assert any("ThreadPoolExecutor" in name for name in dataset.threads)


def test_wrong_labels_of_a_mapped_array_are_found_before_anything_is_spent(tmp_path: Path) -> None:
    x, y = _mapped(tmp_path)
    bad = np.lib.format.open_memmap(tmp_path / "bad.npy", "w+", np.int64, (RECORDS,))
    bad[:] = y
    bad[-1] = CLASSES
    with pytest.raises(InputError, match="labels are not in"):
        _weights((x, bad))
    with pytest.raises(InputError, match="whole numbers"):
        _weights((x, np.lib.format.open_memmap(tmp_path / "f.npy", "w+", np.float32, (RECORDS,))))
    with pytest.raises(InputError, match="lengths differ"):
        Mapped(x, bad[:-1])


def test_threads_for_arrays_in_memory_are_refused() -> None:
    x, y = _rows()
    with pytest.raises(InputError, match="leave them out"):
        _weights((torch.from_numpy(x).float(), torch.from_numpy(y)), num_workers=2)


def _limited(folder: Path, queue: Any) -> None:
    records, wide = 40_000, 1024  # 160 MB of float32
    x = np.load(folder / "large.npy", mmap_mode="r")
    torch.set_num_threads(1)
    plan = sordino.dpsgd(noise_multiplier=1.0, delta=1e-6, records=records, expected_batch=64, steps=3)
    held = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (held + (80 << 20), resource.RLIM_INFINITY))
    try:
        np.array(x)
        queue.put("the limit does not bind")
    except MemoryError:
        pass
    try:
        settings = sordino.Settings(chunk=16, progress=False)
        made = sordino.train(
            nn.Linear(wide, 2), cross_entropy, (x, np.zeros(records, dtype=np.int64)), plan, lr=0.1, settings=settings,
            out=folder / "run",
        )  # fmt: skip
        queue.put(made.metrics[-1]["step"])
    except Exception as error:
        queue.put(repr(error))


def test_a_mapped_array_larger_than_the_limit_on_memory_is_trained_on(tmp_path: Path) -> None:
    large = np.lib.format.open_memmap(tmp_path / "large.npy", "w+", np.float32, (40_000, 1024))
    del large  # the file has no blocks on disk yet: reading gives zeros
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_limited, args=(tmp_path, queue))
    child.start()
    assert queue.get(timeout=240) == 3
    child.join()
