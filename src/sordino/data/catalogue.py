"""The catalogue of datasets: where they come from, their checksums, and how they are scaled.

Every SHA-256 here was found in public code that checks the same files, and recomputed where we had the bytes (the
content of Fashion-MNIST, MNIST, CIFAR-10, Adult). `Content.sha256` is the hash of the unpacked bytes, so a copy that
was compressed differently verifies too. The scaling constants are published ones; they are public by convention and
never measured from the records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sordino.errors import InputError, did_you_mean

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Remote:
    """One download: its path (relative to the data folder), its addresses, and its hash."""

    path: str
    addresses: tuple[str, ...]
    sha256: str
    size: int | None  # bytes; None if unknown
    members: str | None = None  # for a tar archive: the folder in it that is unpacked next to it


@dataclass(frozen=True)
class Content:
    """One file of the layout, plain or compressed; `sha256` is that of its unpacked bytes (None: there is no canonical
    content).
    """

    path: str
    sha256: str | None = None


@dataclass(frozen=True)
class Entry:
    """A dataset of the catalogue.

    Args:
        name: Its name, as in `load(name)` and a recipe's [data].
        title: A short description.
        classes: The number of classes.
        records: The numbers of training and of test records.
        shape: The shape of one record.
        licence: The licence, as the authors state it.
        homepage: The address of the dataset's page.
        layouts: The sets of files in which it may be stored; `fetch` makes the first one.
        remotes: The downloads that `fetch` makes.
        mean: The public mean of each channel, for scaling.
        std: The public standard deviation of each channel.
        embedded: Whether it comes with the package.
        vectors: Whether it also needs GloVe's word vectors (sordino.data.glove), which are not fetched.
    """

    name: str
    title: str
    classes: int
    records: tuple[int, int]
    shape: tuple[int, ...]
    licence: str
    homepage: str
    layouts: tuple[tuple[Content, ...], ...] = ()
    remotes: tuple[Remote, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    embedded: bool = False
    vectors: bool = False


def catalogue() -> tuple[Entry, ...]:
    """The datasets that sordino knows.

    Returns:
        One entry for each; the embedded dataset is the first.
    """
    return _ENTRIES


def entry(name: str) -> Entry:
    """A dataset of the catalogue.

    Args:
        name: Its name.

    Returns:
        Its entry.

    Raises:
        InputError: the name is unknown; the message has the nearest one.
    """
    for one in _ENTRIES:
        if one.name == name:
            return one
    raise InputError(f"unknown dataset {name!r}: {did_you_mean(name, [one.name for one in _ENTRIES])}")


_IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def _idx(folder: str, bases: tuple[str, ...], packed: tuple[tuple[str, int], ...]) -> tuple[Remote, ...]:
    return tuple(
        Remote(f"{folder}/{name}.gz", tuple(f"{base}{name}.gz" for base in bases), sha256, size)
        for name, (sha256, size) in zip(_IDX, packed, strict=True)
    )


def _idx_content(folder: str, hashes: tuple[str, ...]) -> tuple[Content, ...]:
    return tuple(Content(f"{folder}/{name}", sha256) for name, sha256 in zip(_IDX, hashes, strict=True))


_FASHION_PACKED = (
    ("3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", 26_421_880),
    ("a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 29_515),
    ("346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", 4_422_102),
    ("67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 5_148),
)
_FASHION_CONTENT = (
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
_MNIST_PACKED = (
    ("440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9_912_422),
    ("3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28_881),
    ("8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1_648_877),
    ("f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542),
)
_MNIST_CONTENT = (
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
_CIFAR_CONTENT = (
    ("data_batch_1", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
    ("data_batch_2", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
    ("data_batch_3", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
    ("data_batch_4", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
    ("data_batch_5", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    ("test_batch", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
)
_CIFAR100_CONTENT = (
    ("train", "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
    ("test", "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
)
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
_SVHN = "http://ufldl.stanford.edu/housenumbers/"
_SVHN_TRAIN = "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"
_SVHN_TEST = "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"
_ADULT_TRAIN = "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"
_ADULT_TEST = "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"

_IMDB = Entry(
    name="imdb",
    title="IMDb movie reviews, positive or negative",
    classes=2,
    records=(25_000, 25_000),
    shape=(256,),
    licence="not stated by the authors (Maas et al. 2011)",
    homepage="https://ai.stanford.edu/~amaas/data/sentiment/",
    layouts=(
        (Content("aclImdb/train"), Content("aclImdb/test")),
        (Content("IMDb/train.csv"), Content("IMDb/test.csv")),
    ),
    remotes=(
        Remote(
            "aclImdb_v1.tar.gz",
            ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
            "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
            84_125_825,
            members="aclImdb",
        ),
    ),
)
_ENTRIES = (
    Entry(
        name="fashion-mnist-mini",
        title="Fashion-MNIST, a class-balanced subset that comes with sordino",
        classes=10,
        records=(12_000, 4_000),
        shape=(1, 28, 28),
        licence="MIT (Copyright 2017 Zalando SE)",
        homepage="https://github.com/zalandoresearch/fashion-mnist",
        mean=(0.2860,),
        std=(0.3530,),
        embedded=True,
    ),
    Entry(
        name="fashion-mnist",
        title="Fashion-MNIST",
        classes=10,
        records=(60_000, 10_000),
        shape=(1, 28, 28),
        licence="MIT (Copyright 2017 Zalando SE)",
        homepage="https://github.com/zalandoresearch/fashion-mnist",
        layouts=(
            _idx_content("FashionMNIST/raw", _FASHION_CONTENT),
            _idx_content("FashionMNIST", _FASHION_CONTENT),
            _idx_content("fashion-mnist", _FASHION_CONTENT),
        ),
        remotes=_idx(
            "FashionMNIST/raw",
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            ),
            _FASHION_PACKED,
        ),
        mean=(0.2860,),
        std=(0.3530,),
    ),
    Entry(
        name="mnist",
        title="MNIST handwritten digits",
        classes=10,
        records=(60_000, 10_000),
        shape=(1, 28, 28),
        licence="CC BY-SA 3.0 (as commonly stated; LeCun, Cortes, Burges)",
        homepage="http://yann.lecun.com/exdb/mnist/",
        layouts=(
            _idx_content("MNIST/raw", _MNIST_CONTENT),
            _idx_content("MNIST", _MNIST_CONTENT),
            _idx_content("mnist", _MNIST_CONTENT),
        ),
        remotes=_idx(
            "MNIST/raw",
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
            ),
            _MNIST_PACKED,
        ),
        mean=(0.1307,),
        std=(0.3081,),
    ),
    Entry(
        name="cifar10",
        title="CIFAR-10, binary version",
        classes=10,
        records=(50_000, 10_000),
        shape=(3, 32, 32),
        licence="not stated by the authors (Krizhevsky 2009)",
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        layouts=(
            tuple(Content(f"cifar-10-batches-bin/{name}.bin", sha256) for name, sha256 in _CIFAR_CONTENT),
            tuple(Content(f"CIFAR10/cifar-10-batches-bin/{name}.bin", sha256) for name, sha256 in _CIFAR_CONTENT),
        ),
        remotes=(
            Remote(
                "cifar-10-binary.tar.gz",
                ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                170_052_171,
                members="cifar-10-batches-bin",
            ),
        ),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    Entry(
        name="cifar100",
        title="CIFAR-100, binary version, the 100 fine labels",
        classes=100,
        records=(50_000, 10_000),
        shape=(3, 32, 32),
        licence="not stated by the authors (Krizhevsky 2009)",
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        layouts=tuple(
            tuple(Content(f"{folder}cifar-100-binary/{name}.bin", sha256) for name, sha256 in _CIFAR100_CONTENT)
            for folder in ("", "CIFAR100/")
        ),
        remotes=(
            Remote(
                "cifar-100-binary.tar.gz",
                ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                None,
                members="cifar-100-binary",
            ),
        ),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    ),
    Entry(
        name="svhn",
        title="Street View House Numbers, cropped digits",
        classes=10,
        records=(73_257, 26_032),
        shape=(3, 32, 32),
        licence="for non-commercial use only (Netzer et al. 2011)",
        homepage="http://ufldl.stanford.edu/housenumbers/",
        layouts=tuple(
            (
                Content(f"{folder}train_32x32.mat", _SVHN_TRAIN),
                Content(f"{folder}test_32x32.mat", _SVHN_TEST),
            )
            for folder in ("SVHN/", "svhn/", "")
        ),
        remotes=(
            Remote("SVHN/train_32x32.mat", (f"{_SVHN}train_32x32.mat",), _SVHN_TRAIN, 182_040_794),
            Remote("SVHN/test_32x32.mat", (f"{_SVHN}test_32x32.mat",), _SVHN_TEST, 64_275_384),
        ),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    ),
    Entry(
        name="usps",
        title="USPS handwritten digits, 16×16",
        classes=10,
        records=(7_291, 2_007),
        shape=(1, 16, 16),
        licence="not stated by the authors (Hull 1994)",
        homepage="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",
        layouts=(
            # the hash of the unpacked bytes is unknown: `remotes` checks the compressed file after fetching
            (Content("USPS/usps.bz2"), Content("USPS/usps.t.bz2")),
            (Content("USPS/usps.npz"),),
            (Content("USPS/zip.train.gz"), Content("USPS/zip.test.gz")),
        ),
        remotes=(
            Remote(
                "USPS/usps.bz2",
                (f"{_LIBSVM}usps.bz2",),
                "3771e9dd6ba685185f89867b6e249233dd74652389f263963b3b741e994b034f",
                None,
            ),
            Remote(
                "USPS/usps.t.bz2",
                (f"{_LIBSVM}usps.t.bz2",),
                "a9c0164e797d60142a50604917f0baa604f326e9a689698763793fa5d12ffc4e",
                None,
            ),
        ),
        mean=(0.5,),
        std=(0.5,),
    ),
    _IMDB,
    replace(
        _IMDB,
        name="imdb-glove",
        title="IMDb movie reviews as ids of GloVe's 30,000 most frequent words, with their vectors",
        shape=(64,),
        vectors=True,
    ),
    replace(
        _IMDB,
        name="imdb-texts",
        title="IMDb movie reviews as UTF-8 bytes, for a network that reads texts",
        shape=(2048,),
    ),
    Entry(
        name="adult",
        title="Adult (census income), above 50K or not",
        classes=2,
        records=(32_561, 16_281),
        shape=(104,),
        licence="CC BY 4.0 (UCI; Becker and Kohavi 1996)",
        homepage="https://archive.ics.uci.edu/dataset/2/adult",
        layouts=(
            (Content("Adult/adult.data", _ADULT_TRAIN), Content("Adult/adult.test", _ADULT_TEST)),
            (Content("adult/adult.data", _ADULT_TRAIN), Content("adult/adult.test", _ADULT_TEST)),
        ),
        remotes=(
            Remote("Adult/adult.data", (f"{_UCI}adult.data",), _ADULT_TRAIN, 3_974_305),
            Remote("Adult/adult.test", (f"{_UCI}adult.test",), _ADULT_TEST, 2_003_153),
        ),
    ),
)
