"""Makes the embedded subset of Fashion-MNIST from the original IDX files.

    python scripts/make_embedded.py DATA_DIR

It consists of the first 1,200 training and 400 test images of each class, in the order of the original files, as IDX
files compressed with xz in src/sordino/data/embedded, with SHA256SUMS of the uncompressed bytes. Fashion-MNIST is
MIT-licensed (Copyright 2017 Zalando SE); the licence text is in the same folder.
"""

from __future__ import annotations

import hashlib
import lzma
import sys
from pathlib import Path

import numpy as np

from sordino.data import data_directory
from sordino.data.images import read_idx

PER_CLASS = {"train": 1_200, "t10k": 400}
TARGET = Path(__file__).resolve().parents[1] / "src" / "sordino" / "data" / "embedded"


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape)
    return header + array.astype(np.uint8).tobytes()


def main(root: Path) -> None:
    sums = []
    for side, count in PER_CLASS.items():
        folder = root / "FashionMNIST" / "raw"
        images = read_idx(folder / f"{side}-images-idx3-ubyte.gz", 3)
        labels = read_idx(folder / f"{side}-labels-idx1-ubyte.gz", 1)
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == c)[:count] for c in range(10)]))
        for name, array in (("images-idx3-ubyte", images[chosen]), ("labels-idx1-ubyte", labels[chosen])):
            content = idx_bytes(array)
            path = TARGET / f"fashion-mnist-mini-{side}-{name}.xz"
            path.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
            sums.append(f"{hashlib.sha256(content).hexdigest()}  {path.stem}\n")
            print(f"{path.name}: {array.shape}, {path.stat().st_size:,} bytes")
    (TARGET / "SHA256SUMS").write_text("".join(sums), "ascii")


if __name__ == "__main__":
    main(data_directory(sys.argv[1] if len(sys.argv) > 1 else None))
