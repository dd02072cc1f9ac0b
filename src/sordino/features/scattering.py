"""The scattering transform of images: a fixed, public feature extractor of one record at a time.

Two layers of Morlet wavelets, each followed by a modulus, then a low-pass filter (Bruna and Mallat 2013;
Oyallon and Mallat 2015). Nothing is learned, so it has no privacy cost. The numbers are those of kymatio 0.3.0
(`Scattering2D(J, shape, L)`, order 2, output 'array'), to 1e-5; the tests compare them with stored outputs of
kymatio.

For J=2 and L=8 an image of h × w gives 1 + 16 + 64 = 81 maps of h/4 × w/4 per channel.

Wavelet convolutions are products in the Fourier domain, subsampled there by periodisation. The low-pass filter at the
end of each path is linear, so filter, subsampling and cropping are one dense matrix, and one matrix product replaces
two Fourier transforms per path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino.errors import InputError

Float = npt.NDArray[np.float64]
Complex = npt.NDArray[np.complex128]


@dataclass(frozen=True)
class Scattering2D:
    """Scattering of a batch (n, c, h, w) → (n, c·maps, h/2^J, w/2^J); per channel, order 0, then 1, then 2.

    Images are float32 or float64, and so is the result.

    Args:
        J: The number of octaves; h and w must be multiples of 2^J.
        L: The number of angles.
        chunk: The number of images in one pass; the result does not depend on it, up to rounding.

    Raises:
        InputError: a value is not a positive integer, or J exceeds 16.
    """

    J: int = 2
    L: int = 8
    chunk: int = 32

    def __post_init__(self) -> None:
        for name, value in (("J", self.J), ("L", self.L), ("chunk", self.chunk)):
            if not isinstance(value, int) or not 1 <= value < 2**31:
                raise InputError(f"scattering: {name} must be an integer of at least 1, not {value!r}")
        if self.J > 16:
            raise InputError(f"scattering: J = {self.J} octaves need images of 2^J pixels: give at most 16")

    @property
    def maps(self) -> int:
        """Maps per channel: 1 + JL + L²J(J−1)/2."""
        return 1 + self.J * self.L + self.L**2 * self.J * (self.J - 1) // 2

    def __call__(self, x: Tensor) -> Tensor:
        self._check(x)
        n, channels, height, width = x.shape
        bank = _filter_bank(self.J, self.L, height, width, x.dtype)
        images = x.reshape(n * channels, height, width)
        h, w = height >> self.J, width >> self.J
        out = x.new_empty(n * channels, self.maps, h, w)
        with torch.no_grad():
            for start in range(0, n * channels, self.chunk):
                stop = start + self.chunk
                out[start:stop] = _scatter(images[start:stop], bank).view(-1, self.maps, h, w)
        return out.reshape(n, channels * self.maps, h, w)

    def _check(self, x: Tensor) -> None:
        if x.dim() != 4:
            raise InputError(f"scattering takes images (n, channels, height, width), not {tuple(x.shape)}")
        if x.dtype not in (torch.float32, torch.float64):
            raise InputError(f"scattering takes float32 or float64 images, not {x.dtype}; divide bytes by 255 first")
        step = 1 << self.J
        # reflection needs a border narrower than the image: the padding is at most 2^J on each side
        if any(side % step or side <= step for side in x.shape[2:]):
            raise InputError(
                f"scattering with J={self.J} needs sides that are multiples of {step} and larger than it, "
                f"not {x.shape[2]}×{x.shape[3]}; pad or resize the images"
            )


@dataclass(frozen=True)
class _Bank:
    J: int
    pad: tuple[int, int, int, int]  # left, right, top, bottom
    psi: tuple[tuple[Tensor, ...], ...]  # psi[j][level]: (L, H/2^level, W/2^level), level ≤ j
    low: tuple[Tensor, ...]  # low[level]: (H·W/4^level, h·w)


def _scatter(x: Tensor, bank: _Bank) -> Tensor:
    """(n, h, w) → (n, maps, h·w/4^J)."""
    left, right, top, bottom = bank.pad
    x = torch.nn.functional.pad(x.unsqueeze(1), (left, right, top, bottom), mode="reflect").squeeze(1)  # (n, H, W)
    spectrum = torch.fft.fft2(x)
    first, second = [_low_pass(x, bank.low[0]).unsqueeze(1)], []
    for j1 in range(bank.J):
        u1 = _wavelet(spectrum, bank.psi[j1][0], j1)  # (n, L, H/2^j1, W/2^j1)
        first.append(_low_pass(u1, bank.low[j1]))
        if j1 + 1 == bank.J:
            continue
        spectrum1 = torch.fft.fft2(u1)
        paths = []
        for j2 in range(j1 + 1, bank.J):
            u2 = _wavelet(spectrum1, bank.psi[j2][j1], j2 - j1)  # (n, L, L, H/2^j2, W/2^j2)
            paths.append(_low_pass(u2, bank.low[j2]))
        second.append(torch.cat(paths, dim=2).flatten(1, 2))  # angle of j1, then (j2, angle of j2)
    return torch.cat(first + second, dim=1)


def _wavelet(spectrum: Tensor, psi: Tensor, octaves: int) -> Tensor:
    """|x ∗ ψ_θ|, subsampled by 2^octaves, from the spectrum (..., H, W): (..., angles, H/2^octaves,
    W/2^octaves).

    Subsampling is periodisation in the Fourier domain, done while multiplying: the full product is never stored.
    ψ is real in the Fourier domain, so real and imaginary parts are multiplied as plain reals.
    """
    k = 1 << octaves
    h, w = spectrum.shape[-2] // k, spectrum.shape[-1] // k
    parts = _blocks(torch.view_as_real(spectrum), k).unsqueeze(-3)  # (..., 1, k², h·w·2)
    filters = _blocks((psi / k**2).unsqueeze(-1).expand(*psi.shape, 2), k)  # (L, k², h·w·2)
    total = parts[..., 0, :] * filters[:, 0]
    for block in range(1, k * k):
        total.addcmul_(parts[..., block, :], filters[:, block])
    waves = torch.fft.ifft2(torch.view_as_complex(total.view(*total.shape[:-1], h, w, 2)))
    real, imaginary = torch.view_as_real(waves).unbind(-1)
    return torch.addcmul(real.square(), imaginary, imaginary).sqrt_()


def _blocks(x: Tensor, k: int) -> Tensor:
    """(..., k·h, k·w, 2) → (..., k², h·w·2): the k × k blocks that periodisation adds up, each contiguous."""
    h, w = x.shape[-3] // k, x.shape[-2] // k
    blocks = x.reshape(*x.shape[:-3], k, h, k, w, 2).transpose(-4, -3)  # (..., k, k, h, w, 2)
    return blocks.reshape(*x.shape[:-3], k * k, h * w * 2)


def _low_pass(u: Tensor, low: Tensor) -> Tensor:
    return u.flatten(-2) @ low


def _filter_bank(J: int, L: int, height: int, width: int, dtype: torch.dtype) -> _Bank:
    """kymatio's filters for one image size. They take some milliseconds, so they are built for each call."""
    H, W = (((side + 2**J) // 2**J + 1) * 2**J for side in (height, width))
    top, left = (H - height) // 2, (W - width) // 2
    pad = (left, W - width - left, top, H - height - top)
    psi = []
    for j in range(J):
        angles = [(L - L // 2 - 1 - theta) * math.pi / L for theta in range(L)]
        waves = [_morlet(H, W, 0.8 * 2**j, angle, 0.75 * math.pi / 2**j, 4.0 / L) for angle in angles]
        spectra = [np.fft.fft2(wave).real for wave in waves]
        psi.append(
            tuple(
                torch.from_numpy(np.stack([_periodise(s, level) for s in spectra])).to(dtype) for level in range(j + 1)
            )
        )
    phi = np.fft.fft2(_gabor(H, W, 0.8 * 2 ** (J - 1), 0.0, 0.0, 1.0)).real
    low = tuple(torch.from_numpy(_low_matrix(_periodise(phi, level), J - level)).to(dtype) for level in range(J))
    return _Bank(J, pad, tuple(psi), low)


def _low_matrix(phi: Float, octaves: int) -> Float:
    """The linear map (H·W) → (h·w): convolve with φ, keep every 2^octaves-th point, drop the border point."""
    H, W = phi.shape
    k = 2**octaves
    kernel = np.fft.ifft2(phi).real
    rows, columns = np.arange(H)[::k][1:-1], np.arange(W)[::k][1:-1]
    down = (rows[None, :] - np.arange(H)[:, None]) % H  # (H, h)
    across = (columns[None, :] - np.arange(W)[:, None]) % W  # (W, w)
    matrix = kernel[down[:, None, :, None], across[None, :, None, :]]  # (H, W, h, w)
    return np.ascontiguousarray(matrix.reshape(H * W, rows.size * columns.size))


def _morlet(H: int, W: int, sigma: float, theta: float, xi: float, slant: float) -> Complex:
    """A Gabor wavelet minus its mean: ψ = g(e^{iξu} − β), with β such that ψ sums to zero."""
    wave = _gabor(H, W, sigma, theta, xi, slant)
    envelope = _gabor(H, W, sigma, theta, 0.0, slant)
    wave -= wave.sum() / envelope.sum() * envelope
    return wave


def _gabor(H: int, W: int, sigma: float, theta: float, xi: float, slant: float) -> Complex:
    """A Gaussian envelope times a wave of frequency ξ at angle θ, made periodic over H × W."""
    c, s = math.cos(theta), math.sin(theta)
    rotation = np.array([[c, -s], [s, c]])
    curvature = rotation @ np.diag([1.0, slant * slant]) @ rotation.T / (2 * sigma * sigma)
    out = np.zeros((H, W), np.complex128)
    for ex in range(-2, 3):
        for ey in range(-2, 3):
            x = np.arange(ex * H, (ex + 1) * H)[:, None]
            y = np.arange(ey * W, (ey + 1) * W)[None, :]
            quadratic = curvature[0, 0] * x * x + 2 * curvature[0, 1] * x * y + curvature[1, 1] * y * y
            out += np.exp(-quadratic + 1j * xi * (x * c + y * s))
    # 3.1415 instead of π: kymatio's constant, so that the numbers are the same
    out /= 2 * 3.1415 * sigma * sigma / slant
    return out


def _periodise(spectrum: Float, level: int) -> Float:
    """The filter at a resolution 2^level times coarser: frequencies above its band are dropped, then folded."""
    if level == 0:
        return spectrum
    k = 2**level
    kept = spectrum.copy()
    for axis, side in enumerate(spectrum.shape):
        dropped = slice(int(side / (2 * k)), int(side / (2 * k)) + int(side * (1 - 1 / k)))
        kept[(dropped, slice(None)) if axis == 0 else (slice(None), dropped)] = 0
    h, w = (side // k for side in spectrum.shape)
    return np.asarray(kept.reshape(k, h, k, w).sum(axis=(0, 2)), np.float64)
