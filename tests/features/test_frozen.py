"""Frozen networks as features: found by folder, matched strictly, cached in parts; a missing file says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from sordino.data.text import text_bytes
from sordino.errors import InputError
from sordino.features import build, efficientnet, minilm

TINY = minilm.Config(
    hidden_size=8, intermediate_size=12, num_attention_heads=2, num_hidden_layers=2, vocab_size=9,
    max_position_embeddings=16, type_vocab_size=2, layer_norm_eps=1e-12,
)  # fmt: skip
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "fine", "film", "##s", "bad")


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    """A data folder with a tiny model in the published layout."""
    folder = tmp_path / "all-MiniLM-L6-v2"
    folder.mkdir()
    about = {name: getattr(TINY, name) for name in TINY.__dataclass_fields__}
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_act": "gelu", **about}))
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in TINY.shapes().items()}
    save_file({**weights, "pooler.dense.bias": torch.zeros(8)}, folder / "model.safetensors")
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(4)  # the published file truncates and pads: ours must not
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tmp_path


@pytest.fixture(scope="session")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    (root / "efficientnet-lite0").mkdir()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.save(efficientnet.EfficientNetLite0().state_dict(), root / "efficientnet-lite0/efficientnet-lite0-1.pth")
    return root


IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_efficientnet_has_the_published_size_and_gives_1280_features(image_model: Path) -> None:
    assert sum(p.numel() for p in efficientnet.EfficientNetLite0().parameters()) == 4_652_008  # published: 4.65 M
    extract = build({"name": "efficientnet-lite0", "resolution": 48}, image_model)
    assert extract.spec["resolution"] == 48
    features = extract(IMAGES)
    assert features.shape == (3, 1280)
    assert torch.allclose(extract(IMAGES[1:2]), features[1:2], atol=1e-5)  # a function of one record at a time
    assert extract(IMAGES[:0]).shape == (0, 1280)


def test_pixels_reach_efficientnet_as_it_was_trained_on_them(image_model: Path) -> None:
    """ImageNet's standardisation is undone and (x − 127)/128 done: a grey of 127 comes in as zeros."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    grey = ((127 / 255 - mean) / std).view(1, 3, 1, 1).expand(1, 3, 32, 32)
    network = efficientnet.read(image_model)
    expected = network.features(torch.zeros(1, 3, 64, 64))
    assert torch.allclose(efficientnet.embed(network, grey, 64), expected, atol=1e-5)


def test_a_record_less_moves_the_features_of_the_others_by_rounding_alone(image_model: Path) -> None:
    """docs/guarantees/noise.md, section 7: batches shift, and with them the last bits of some."""
    extract = build({"name": "efficientnet-lite0", "resolution": 32}, image_model)
    images = torch.randn(67, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    whole, less = extract(images), extract(images[1:])
    moved = torch.linalg.vector_norm(whole[1:] - less, dim=1) / torch.linalg.vector_norm(whole[1:], dim=1)
    assert moved.max() < 1e-5


def test_the_cache_is_in_parts_so_that_a_killed_run_goes_on(
    image_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sordino.features.extractor.PART", 2)
    extract, heard = build({"name": "efficientnet-lite0", "resolution": 32}, image_model), []
    features = extract.cached(IMAGES, tmp_path, heard.append)
    assert heard == ["efficientnet-lite0: 0 of 3 records", "efficientnet-lite0: 2 of 3 records"]
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    monkeypatch.setattr(efficientnet, "embed", None)  # the second time nothing is computed
    assert torch.equal(extract.cached(IMAGES, tmp_path), features)


def test_a_picture_and_its_mirror_image_may_have_the_same_features(image_model: Path, tmp_path: Path) -> None:
    spec = {"name": "efficientnet-lite0", "resolution": 32}
    plain, both = build(spec, image_model), build({**spec, "mirror": True}, image_model)
    assert torch.allclose(both(IMAGES), (plain(IMAGES) + plain(IMAGES.flip(-1))) / 2)
    assert torch.allclose(both(IMAGES), both(IMAGES.flip(-1)), atol=1e-5)
    plain.cached(IMAGES, tmp_path)
    assert torch.allclose(both.cached(IMAGES, tmp_path), both(IMAGES))
    assert len(list(tmp_path.glob("*.safetensors"))) == 2  # the features of the pictures themselves were there
    with pytest.raises(InputError, match="mirror must be true or false"):
        build({**spec, "mirror": 1}, image_model)


def test_features_of_an_image_may_be_raised_to_a_power_from_the_same_cache(image_model: Path, tmp_path: Path) -> None:
    spec = {"name": "efficientnet-lite0", "resolution": 32}
    plain, root = build(spec, image_model), build({**spec, "power": 0.5}, image_model)
    assert (plain(IMAGES) >= 0).all()
    assert torch.allclose(root(IMAGES), plain(IMAGES).sqrt())
    plain.cached(IMAGES, tmp_path)
    assert torch.allclose(root.cached(IMAGES, tmp_path), root(IMAGES))
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    scaled = build({**spec, "power": 0.5, "normalise": "record"}, image_model)(IMAGES)
    assert torch.allclose(scaled.norm(dim=1), torch.ones(3))
    for wrong in (-1, True, "half"):
        with pytest.raises(InputError, match="power must be a number"):
            build({**spec, "power": wrong}, image_model)


def test_other_weights_never_read_an_old_cache(image_model: Path, tmp_path: Path) -> None:
    (tmp_path / "efficientnet-lite0").mkdir()
    torch.save({}, tmp_path / "efficientnet-lite0/efficientnet-lite0-2.pth")
    one, other = (build({"name": "efficientnet-lite0"}, root).spec["weights"] for root in (image_model, tmp_path))
    assert one != other


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("a pickle was executed",)


@pytest.mark.parametrize("content", [{"_fc.bias": torch.zeros(1000)}, {"x": Harmful()}, [1, 2]])
def test_a_file_of_other_weights_is_refused_and_nothing_is_unpickled(
    tmp_path: Path, content: object, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(InputError, match="does not contain the weights of EfficientNet-Lite0"):
        efficientnet.load(tmp_path / "w.pth")
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["efficientnet-lite0", "minilm"])
def test_a_missing_model_says_where_it_looked_and_how_to_get_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        build({"name": name}, tmp_path)
    assert all(part in str(caught.value) for part in (str(tmp_path), "SORDINO_DATA", "Apache 2.0"))


def test_two_files_are_not_chosen_from(image_model: Path, tmp_path: Path) -> None:
    (tmp_path / "efficientnet-lite0").mkdir()
    for name in "12":
        (tmp_path / f"efficientnet-lite0/efficientnet-lite0-{name}.pth").write_bytes(b"x")
    with pytest.raises(InputError, match="keep one"):
        build({"name": "efficientnet-lite0"}, tmp_path)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"name": "efficientnet-lite0", "resolution": 8}, "from 32 to 512"),
        ({"name": "efficientnet-lite0", "size": 96}, "unknown option 'size'"),
        ({"name": "minilm", "tokens": 2.5}, "from 4 to 512"),
    ],
)
def test_a_wrong_option_is_an_error(spec: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        build(spec)


def test_texts_become_embeddings_of_length_one_whatever_is_beside_them(text_model: Path) -> None:
    extract = build({"name": "minilm", "tokens": 8}, text_model)
    texts = text_bytes(["a fine film", "bad", "", "a fine<br />FILMS " * 9], 64)
    features = extract(texts)
    assert features.shape == (4, 8)
    assert torch.allclose(features.norm(dim=1), torch.ones(4))
    for row in range(4):
        assert torch.allclose(extract(texts[row : row + 1])[0], features[row], atol=1e-5)
    assert not torch.allclose(features[0], features[1])


def test_a_long_text_keeps_its_first_and_last_word_pieces(text_model: Path) -> None:
    model = minilm.read(text_model)
    short, cut = (model.embed(text_bytes([text]), 6) for text in ("a fine bad film", "a fine a a a a bad film"))
    assert torch.allclose(short, cut, atol=1e-6)  # [CLS] a fine … bad film [SEP]
    assert not torch.allclose(short, model.embed(text_bytes(["a fine a a a a bad film"]), 10))


def test_bytes_of_texts_are_cut_in_the_middle_and_read_back() -> None:
    texts = text_bytes(["ünd<br />so", "x" * 20 + "é" * 20, "\0"], 21)
    assert minilm.decode(texts) == ["ünd so", "x" * 10 + "é" * 5, " "]  # half a character at the cut is dropped
    with pytest.raises(InputError, match="imdb-texts"):
        minilm.decode(torch.zeros(2, 5))


def test_texts_do_not_reach_a_model_as_bytes(tmp_path: Path) -> None:
    for seen in (build({}), lambda texts: build({}).cached(texts, tmp_path)):
        with pytest.raises(InputError, match="minilm"):
            seen(text_bytes(["a text"]))


@pytest.mark.parametrize("damage", ["config", "weights", "tokenizer", "kind"])
def test_a_damaged_text_model_is_named(text_model: Path, damage: str) -> None:
    folder = text_model / "all-MiniLM-L6-v2"
    if damage == "kind":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "roberta"}))
    elif damage == "weights":
        save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    else:
        (folder / f"{damage}.json").write_text("{}")
    with pytest.raises(InputError, match=r"model\.safetensors" if damage == "weights" else r"\.json"):
        minilm.read(text_model)
