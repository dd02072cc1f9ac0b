"""features.build and the cache: strict options; the second run starts at once; a broken cache is built again."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sordino.errors import InputError
from sordino.features import Extractor, Scattering2D, build, cache, default_folder, group_normalise
from sordino.features.cache import cached

IMAGES = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_none_hands_the_inputs_through() -> None:
    assert build({"name": "none"})(IMAGES) is IMAGES
    assert build({})(IMAGES) is IMAGES


def test_scattering_with_group_normalisation_is_the_two_of_them() -> None:
    extract = build({"name": "scattering", "normalise": "group", "groups": 27})
    assert torch.equal(extract(IMAGES), group_normalise(Scattering2D()(IMAGES), 27))


@pytest.mark.parametrize("chunk", [1, 2, 5, 6])
def test_the_chunk_of_an_extractor_does_not_show(chunk: int) -> None:
    whole = build({"name": "scattering", "normalise": "group"})
    in_parts = Extractor(whole.spec, chunk=chunk)(IMAGES)
    assert in_parts.shape == (5, 81, 2, 2)
    assert torch.allclose(in_parts, whole(IMAGES), atol=1e-5)


def test_no_images_give_no_features_of_the_right_shape() -> None:
    assert build({"name": "scattering"})(IMAGES[:0]).shape == (0, 81, 2, 2)


def test_the_specification_has_all_defaults_filled_in() -> None:
    assert build({"name": "scattering"}).spec == {
        "name": "scattering",
        "J": 2,
        "L": 8,
        "normalise": "none",
        "groups": 27,
    }


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"name": "scatering"}, "did you mean 'scattering'"),
        ({"name": "scattering", "normalize": "group"}, "did you mean 'normalise'"),
        ({"name": "scattering", "normalise": "batch"}, "private_statistics"),
        ({"name": "scattering", "groups": 27}, "would be ignored"),
        ({"name": "scattering", "normalise": "group", "groups": 0}, "at least 1"),
        ({"name": "scattering", "J": 0}, "at least 1"),
        ({"name": "none", "J": 2}, "unknown option 'J'"),
    ],
)
def test_a_wrong_specification_is_an_error_that_says_what_to_write(spec: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        build(spec)


class Counter:
    """An extractor that counts how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return inputs * 2


def test_the_second_call_reads_the_cache(tmp_path: Path) -> None:
    counter = Counter()
    for _ in range(2):
        assert torch.equal(cached(counter, {"name": "x"}, IMAGES, tmp_path), IMAGES * 2)
    assert counter.calls == 1


def test_another_specification_or_another_record_misses_the_cache(tmp_path: Path) -> None:
    counter = Counter()
    changed = IMAGES.clone()
    changed[3, 0, 0, 0] += 1e-6
    for spec, inputs in (({"J": 2}, IMAGES), ({"J": 3}, IMAGES), ({"J": 2}, changed), ({"J": 2}, IMAGES.double())):
        cached(counter, spec, inputs, tmp_path)
    assert counter.calls == 4


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "other"])
def test_a_broken_cache_file_is_built_again(tmp_path: Path, damage: str) -> None:
    counter = Counter()
    cached(counter, {}, IMAGES, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
    path.write_bytes({"truncate": content[:-5], "flip": content, "empty": b"", "other": b"not a cache"}[damage])
    assert torch.equal(cached(counter, {}, IMAGES, tmp_path), IMAGES * 2)
    assert counter.calls == 2
    cached(counter, {}, IMAGES, tmp_path)
    assert counter.calls == 2


def test_the_cache_holds_private_records_so_only_the_owner_reads_it(tmp_path: Path) -> None:
    cached(Counter(), {}, IMAGES, tmp_path / "cache")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache").iterdir()] == [0o600, 0o600]


def test_the_name_of_a_cached_file_says_nothing_about_the_records(tmp_path: Path) -> None:
    """A folder that was there before keeps its mode: whoever can list it must not be able to test a guess."""
    names = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir(mode=0o755)
        cached(Counter(), {}, IMAGES, folder)
        (path,) = folder.glob("*.safetensors")
        names.append(path.name)
        assert not path.name.startswith(cache._key({}, IMAGES)[:8])
    assert names[0] != names[1]


def test_a_key_that_is_lost_costs_time_not_the_run(tmp_path: Path) -> None:
    counter = Counter()
    cached(counter, {}, IMAGES, tmp_path)
    (tmp_path / cache.SECRET).unlink()
    assert torch.equal(cached(counter, {}, IMAGES, tmp_path), IMAGES * 2)
    assert counter.calls == 2


def test_a_folder_that_cannot_be_written_costs_time_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert torch.equal(cached(Counter(), {}, IMAGES, tmp_path / "file" / "cache"), IMAGES * 2)


def test_the_folder_is_the_variables_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("SORDINO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_folder() == Path("/x/sordino/features")
