"""Small grey images in a report: PNG data URIs, made without an image library.

`grid` arranges images of one size in rows and returns a JSON-serialisable picture; `shown` reads pictures.json and
leaves out whatever is not a heading, a text and a base64 PNG. Only public images and released values belong here.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SCALE, GAP = 2, 2  # pixels per pixel, pixels between images
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Picture:
    heading: str
    text: str
    uri: str
    width: int
    height: int


def grid(images: Tensor, columns: int, heading: str, text: str, *, stretch: bool = True) -> dict[str, Any]:
    """Images (n, h, w), `columns` to a row. `stretch`: each scaled by its largest absolute value, with 0 as mid-grey;
    otherwise unchanged, in [0, 1]."""
    count, height, width = images.shape
    rows = -(-count // columns)
    canvas = torch.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP), 1.0)
    for index in range(count):
        image = images[index].detach().float()
        if stretch:
            image = 0.5 + 0.5 * image / image.abs().max().clamp_min(1e-12)
        top, left = (index // columns) * (height + GAP), (index % columns) * (width + GAP)
        canvas[top : top + height, left : left + width] = torch.nan_to_num(image).clamp(0, 1)
    large = canvas.repeat_interleave(SCALE, 0).repeat_interleave(SCALE, 1)
    data = png((large * 255).round().to(torch.uint8))
    return {
        "heading": heading, "text": text, "png": base64.b64encode(data).decode(), "width": large.shape[1],
        "height": large.shape[0],
    }  # fmt: skip


def png(pixels: Tensor) -> bytes:
    """An 8-bit grey PNG (ISO/IEC 15948) of pixels (h, w) uint8."""
    height, width = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    raw = b"".join(b"\x00" + bytes(row.tolist()) for row in pixels)  # filter type 0 before every line
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(raw, 9)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def shown(document: Mapping[str, Any] | None) -> list[Picture]:
    """The valid pictures of pictures.json."""
    listed = (document or {}).get("pictures")
    found = [_picture(item) for item in listed] if isinstance(listed, list) else []
    return [picture for picture in found if picture is not None]


def _picture(item: Any) -> Picture | None:
    if not isinstance(item, Mapping) or not all(isinstance(item.get(k), str) for k in ("heading", "text", "png")):
        return None
    size = [item.get("width"), item.get("height")]
    if not all(type(value) is int and 0 < value <= 10_000 for value in size):
        return None
    try:
        content = base64.b64decode(item["png"], validate=True)
    except (binascii.Error, ValueError):
        return None
    if not content.startswith(_SIGNATURE):
        return None
    uri = "data:image/png;base64," + base64.b64encode(content).decode()
    return Picture(item["heading"], item["text"], uri, item["width"], item["height"])
