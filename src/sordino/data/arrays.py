"""Arrays (.npz) and folders of images as sources of a recipe."""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sordino import checks
from sordino.data.own import Source, named
from sordino.data.tabular import Labels, Problems
from sordino.errors import InputError, SordinoError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


@dataclass(frozen=True, kw_only=True)
class NpzSource(Source):
    """Arrays in a .npz file: one entry of each array is a record. Pickled objects are never read."""

    kind: ClassVar[str] = "npz"
    inputs: str = "inputs"  # the array of inputs: floats between the bounds, uint8 images, or int64 ids
    target: str = "targets"  # the array of labels
    low: float | None = None  # public bounds: floats are truncated and scaled to [0, 1]; without them: used as they are
    high: float | None = None  # the upper bound
    user: str | None = None  # the array with the user of each record, for privacy.unit = "user"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.low is None) != (self.high is None):
            raise InputError("data.low and data.high are given together: the public bounds of the inputs")
        if self.low is not None and not checks.real("data.low", self.low) < checks.real("data.high", self.high):
            raise InputError("data.low must be below data.high")
        if self.user is not None and self.user in (self.inputs, self.target):
            raise InputError(f"data.user = {self.user!r} is also the array of inputs or labels")

    def rows(self, path: Path, *, labelled: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        arrays = _arrays(path, [self.inputs, *([self.target] if labelled else [])])
        values = arrays[self.inputs]
        if values.ndim < 2 or not values.size:
            raise InputError(f"{path}: {self.inputs} must have records in its first dimension and values in others")
        if labelled and arrays[self.target].shape != (len(values),):
            raise InputError(f"{path}: {self.target} must have one label for each entry of {self.inputs}")
        problems = Problems(str(path), range(len(values)))
        inputs = self._inputs(path, values, problems)
        targets = None
        if labelled:
            targets = Labels.of(self.classes)(arrays[self.target].tolist(), self.target, problems)
        problems.raise_any()
        return inputs, targets, None

    def users(self, path: Path) -> tuple[str, ...] | None:
        if self.user is None:
            return None
        arrays = _arrays(path, [self.user, self.target])
        ids = arrays[self.user]
        if ids.shape != arrays[self.target].shape or ids.dtype.kind not in "iuU":
            raise InputError(f"{path}: {self.user} must contain one id for each record: whole numbers or texts")
        return named([str(one).strip() for one in ids.tolist()], f"data.user: the array {self.user!r}")

    def _inputs(self, path: Path, values: np.ndarray[Any, Any], problems: Problems) -> Tensor:
        if values.dtype == np.uint8:
            return torch.from_numpy(values.astype(np.float32) / np.float32(255))
        if values.dtype.kind in "iu":
            if self.low is None:
                if values.dtype == np.uint64 and (values > np.iinfo(np.int64).max).any():
                    raise InputError(f"{path}: {self.inputs} has ids that are too large for int64")
                return torch.from_numpy(values.astype(np.int64))
        elif values.dtype.kind != "f":
            raise InputError(f"{path}: {self.inputs} is of type {values.dtype}; give numbers")
        numbers = values.astype(np.float64)
        for row in np.flatnonzero(~np.isfinite(numbers).reshape(len(numbers), -1).all(1)):
            problems.add(int(row), self.inputs, "a value that is not finite")
        if self.low is not None and self.high is not None:
            numbers = (np.clip(numbers, self.low, self.high) - self.low) / (self.high - self.low)
        with np.errstate(over="ignore"):
            out = numbers.astype(np.float32)
        for row in np.flatnonzero((np.isinf(out) & np.isfinite(numbers)).reshape(len(out), -1).any(1)):
            problems.add(int(row), self.inputs, "a value that is too large for single precision: give low and high")
        return torch.from_numpy(out)


def _arrays(path: Path, names: list[str]) -> dict[str, np.ndarray[Any, Any]]:
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    try:
        with np.load(path, allow_pickle=False) as file:
            if not hasattr(file, "files"):
                raise InputError(f"{path}: a single array; save inputs and targets with numpy.savez")
            for name in names:
                if name not in file.files:
                    raise InputError(
                        f"{path} has no array {name!r}: save it with numpy.savez(…, inputs=…, targets=…), or give the "
                        "names of its arrays as data.inputs and data.target",
                        private=f"it has {', '.join(file.files)}",
                    )
            arrays = {name: file[name] for name in names}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, RuntimeError, MemoryError) as error:
        raise InputError(f"{path} can't be read as .npz", private=str(error)) from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy returns the bytes of what is no array
            raise InputError(f"{path} can't be read as .npz", private=f"{name} is not an array")
    return arrays


@dataclass(frozen=True, kw_only=True)
class ImagesSource(Source):
    """A folder of images, one subfolder for each class: an image is a record."""

    kind: ClassVar[str] = "images"
    size: Any  # [height, width], public: every image is scaled to it separately
    channels: int = 3  # 3: colour, 1: grey
    user: str | None = None  # a regular expression whose one group finds the user in a file's name (unit = "user")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.size, list | tuple) or len(self.size) != 2:
            raise InputError(f"data.size = {self.size!r} must be [height, width]")
        for one in self.size:
            checks.whole("data.size", one, minimum=1)
        if self.channels not in (1, 3):
            raise InputError(f"data.channels = {self.channels!r} must be 3 (colour) or 1 (grey)")
        for name in self.labels:
            if Path(name).name != name or name in (".", ".."):
                raise InputError(f"data.classes: {name!r} is not the name of a folder")
        if self.user is not None:
            _pattern(self.user)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, *self.size)

    def rows(self, path: Path, *, labelled: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if not path.is_dir():
            raise InputError(f"{path} is not a folder")
        if labelled:
            further = [one.name for one in path.iterdir() if one.is_dir() and one.name not in self.labels]
            if further:
                raise InputError(f"{path} has folders that are not in data.classes: remove them, or list them")
            files = self._files(path)
        else:
            files = [(0, file) for file in pictures(path)]
        if not files:
            raise InputError(f"{path}: no images ({', '.join(SUFFIXES)}) in {'its folders' if labelled else 'it'}")
        problems = Problems(str(path), range(1, len(files) + 1))
        images = torch.stack([self._picture(file, row, problems) for row, (_, file) in enumerate(files)])
        problems.raise_any()
        return images, torch.tensor([at for at, _ in files]) if labelled else None, None

    def _files(self, path: Path) -> list[tuple[int, Path]]:
        """(class, picture) of all pictures, folder by folder."""
        return [(at, file) for at, name in enumerate(self.labels) for file in pictures(path / name)]

    def users(self, path: Path) -> tuple[str, ...] | None:
        if self.user is None:
            return None
        matches = [_pattern(self.user).search(file.name) for _, file in self._files(path)]
        return named(["" if one is None else one.group(1) or "" for one in matches], f"data.user = {self.user!r}")

    def _picture(self, file: Path, row: int, problems: Problems) -> Tensor:
        try:
            from PIL import Image, UnidentifiedImageError
        except ImportError as error:
            raise SordinoError("reading images needs Pillow: install sordino[images]") from error
        height, width = self.size
        try:
            with Image.open(file) as picture:
                if picture.mode[0] in "IF":  # Pillow would replace everything above 255 by 255
                    problems.add(row, "images", "more than 8 bits per value: save it with 8 bits", file.name)
                    return torch.zeros(self.shape)
                scaled = picture.convert("L" if self.channels == 1 else "RGB").resize((width, height))
                values = np.asarray(scaled, dtype=np.float32) / np.float32(255)
        except (OSError, UnidentifiedImageError, ValueError, Image.DecompressionBombError):
            problems.add(row, "images", "not an image that can be read", file.name)
            return torch.zeros(self.shape)
        return torch.from_numpy(values).reshape(height, width, self.channels).permute(2, 0, 1).contiguous()


def _pattern(user: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(user)
    except re.error as error:
        raise InputError(f"data.user = {user!r} is not a regular expression: {error}") from error
    if pattern.groups != 1:
        raise InputError(f"data.user = {user!r} must have one group, whose text is the user: for example ^([^_]+)_")
    return pattern


def pictures(folder: Path) -> list[Path]:
    """The image files of a folder, sorted by name."""
    if not folder.is_dir():
        return []
    return sorted(one for one in folder.iterdir() if one.suffix.lower() in SUFFIXES and one.is_file())
