"""Data of one's own: encoded by public bounds, checked before anything is spent, split by content."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from small_recipes import small_recipe
from sordino.data import published, read
from sordino.data.arrays import NpzSource
from sordino.data.own import CsvSource, HfSource, ParquetSource, chosen_by_content
from sordino.data.tabular import Encoding, Problems
from sordino.errors import InputError, Refused
from sordino.runs.recipe import DataSection

COLUMNS: dict[str, Any] = {
    "age": {"kind": "number", "low": 0, "high": 100},
    "glucose": {"kind": "number", "low": 40, "high": 400, "missing": True},
    "sex": {"kind": "category", "values": ["f", "m"]},
    "ward": {"kind": "category", "values": ["a", "b"], "other": True, "missing": True},
    "note": {"kind": "text", "buckets": 4},
}
TEXT = "id,age,glucose,sex,ward,note,y\n1,50,,f,a,hello,no\n2,250,220,m,zz,,yes\n"


def section(folder: Path, text: str = TEXT, **options: Any) -> DataSection:
    path = folder / "visits.csv"
    path.write_text(text, encoding="utf8")
    known = {"path": str(path), "target": "y", "classes": ["no", "yes"], "columns": COLUMNS, "ignore": ["id"]}
    return DataSection("csv", 2, {**known, **options})


def test_a_table_is_encoded_by_its_public_bounds(tmp_path: Path) -> None:
    found = read(section(tmp_path))
    # age; glucose and its flag; f, m; a, b, other, missing; four buckets of words
    assert found.train.inputs[:, :9].tolist() == [
        [0.5, 0, 1, 1, 0, 1, 0, 0, 0],
        [1.0, 0.5, 0, 0, 1, 0, 0, 1, 0],
    ]
    assert found.train.inputs[:, 9:].norm(dim=1).tolist() == [1, 0]
    assert found.train.targets.tolist() == [0, 1]
    assert len(found.test) == 0
    assert found.labels == ("no", "yes")
    assert published(section(tmp_path)).shape == (13,)


def test_a_row_is_encoded_the_same_whatever_the_others_are(tmp_path: Path) -> None:
    both, one = read(section(tmp_path)), read(section(tmp_path, TEXT.rsplit("2,250", 1)[0]))
    assert torch.equal(both.train.inputs[:1], one.train.inputs)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT.replace("50,", "fifty,"), r"nothing was spent: .*\.csv: age: not a number"),
        (TEXT.replace("50,", "5_0,"), r"nothing was spent: .*\.csv: age: not a number"),
        (TEXT.replace(",", ";"), r"only one: is data\.delimiter right"),
        (TEXT.replace(",", ";") + "1;2,5;3\n", r"only one: is data\.delimiter right"),
        (TEXT + "\n3," + "x" * 140_000, "more than 131072 characters"),
        (TEXT + '\n3,"open', "a quotation mark that is not closed"),
        (TEXT.replace("50,", "inf,"), r"nothing was spent: .*\.csv: age: not a finite number"),
        (TEXT.replace("50,", "nan,"), r"nothing was spent: .*\.csv: age: no value"),
        (
            TEXT.replace(",m,", ",x,"),
            r"nothing was spent: .*\.csv: sex: a value that is not in the column's public list",
        ),
        (TEXT.replace("yes", "perhaps"), r"nothing was spent: .*\.csv: y: a label that is not in data.classes"),
        (TEXT.replace("2,250", "2,3,250"), "more or fewer fields"),
        (TEXT.replace("id,", "age,"), "repeats a column name"),
        (TEXT.replace("id,age", "id,years"), "there is no column 'age'"),
        (TEXT.replace("id,", "postcode,"), "neither in"),
        ("", "the file is empty"),
    ],
)
def test_what_is_wrong_is_told_by_column_and_the_line_to_the_owner_alone(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said) as error:
        read(section(tmp_path, text))
    public = str(error.value).replace(str(tmp_path), "")
    assert not {"fifty", "perhaps", "years", "postcode"} & set(re.findall(r"\w+", public))
    assert not re.search(r"line \d", public)


def test_a_compressed_table_is_called_so(tmp_path: Path) -> None:
    given = section(tmp_path)
    Path(given.options["path"]).write_bytes(gzip.compress(TEXT.encode()))
    with pytest.raises(InputError, match="unpack it with gunzip"):
        read(given)


def test_a_record_in_the_place_of_the_header_is_not_shown(tmp_path: Path) -> None:
    """Where the header was forgotten the first line is somebody's."""
    with pytest.raises(InputError, match="the first line must name the columns") as error:
        read(section(tmp_path, TEXT.split("\n", 1)[1]))
    first = TEXT.split("\n")[1].split(",")
    assert all(value not in str(error.value).replace(str(tmp_path), "") for value in first if len(value) > 2)
    assert first[1] in error.value.private


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": {"age": {"kind": "number"}}}, "low and high, public bounds, given by you"),
        ({"columns": {"age": {"kind": "number", "low": 3, "high": 3}}}, "must be below"),
        ({"columns": {"sex": {"kind": "category", "values": []}}}, "list of the values"),
        ({"columns": {"y": {"kind": "category", "values": ["no"]}}}, "can't be an input of the model"),
        ({"columns": {}}, "is empty"),
        ({"classes": ["no"]}, "at least two"),
        ({"test_fraction": 0.5}, "test_public"),
        ({"test_fraction": 0.5, "test_path": "x", "test_public": "yes"}, "give one of them"),
        ({"colums": {}}, "did you mean 'columns'"),
    ],
)
def test_keys_that_are_wrong_are_named(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        read(section(tmp_path, **options))


def test_the_number_of_records_is_never_counted(tmp_path: Path) -> None:
    own = DataSection("csv", None, section(tmp_path).options)
    with pytest.raises(InputError, match="never counts them"):
        published(own)


def test_whether_a_row_is_held_out_depends_on_that_row_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.rand(400, 3, generator=generator), torch.arange(400) % 2
    held = chosen_by_content(inputs, targets, 0.25, 0)
    without = chosen_by_content(inputs[1:], targets[1:], 0.25, 0)
    assert torch.equal(held[1:], without)
    assert 60 < int(held.sum()) < 140


def test_a_column_can_mark_the_rows_that_are_held_out(tmp_path: Path) -> None:
    found = read(section(tmp_path, TEXT.replace("id,", "set,").replace("\n2,", "\ntest,"), ignore=[],
                         test_column="set", test_public="volunteers who agreed"))  # fmt: skip
    assert (len(found.train), len(found.test)) == (1, 1)


def test_arrays_are_read_without_pickles_and_scaled_by_public_bounds(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    np.savez(path, inputs=np.array([[0.0, 5.0], [-9.0, 10.0]]), targets=np.array([0, 1]))
    source = NpzSource(path=str(path), classes=2, low=0.0, high=10.0)
    assert source.read(None).train.inputs.tolist() == [[0, 0.5], [0, 1]]
    np.savez(path, inputs=np.array([[0.0, np.nan], [1e300, 1.0]]), targets=np.array([0, 7]))
    said = r"nothing was spent: .*\.npz: inputs: .*finite; inputs: .*too large.*; targets: a label"
    with pytest.raises(InputError, match=said) as error:
        NpzSource(path=str(path), classes=2).read(None)
    assert [word in error.value.private for word in ("line 0", "line 1")] == [True, True]
    assert "line" not in str(error.value)
    np.savez(path, inputs=np.array([None, "x"], dtype=object), targets=np.array([0, 1]))
    with pytest.raises(InputError, match="can't be read"):
        source.read(None)


def test_a_folder_of_images_is_scaled_picture_by_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, colour in (("cat", 255), ("dog", 0)):
        (tmp_path / name).mkdir()
        image.new("L", (7, 5), colour).save(tmp_path / name / "1.png")
    options = {"path": str(tmp_path), "classes": ["cat", "dog"], "size": [4, 6], "channels": 1}
    found = read(DataSection("images", 2, options))
    assert found.train.inputs.shape == (2, 1, 4, 6)
    assert found.train.inputs.flatten(1).mean(1).tolist() == [1, 0]
    (tmp_path / "dog" / "2.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match="not an image"):
        read(DataSection("images", 2, options))
    with pytest.raises(InputError, match=r"not in data\.classes"):
        read(DataSection("images", 2, {**options, "classes": ["cat", "bird"]}))


def test_a_picture_of_sixteen_bits_is_refused(tmp_path: Path) -> None:
    """Pillow cuts its values off at 255: it was trained on as a white picture."""
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        image.fromarray(np.full((4, 4), 9000, dtype=np.uint16)).save(tmp_path / name / "1.png")
    options = {"path": str(tmp_path), "classes": ["cat", "dog"], "size": [4, 4], "channels": 1}
    with pytest.raises(InputError, match="more than 8 bits per value"):
        read(DataSection("images", 2, options))


def test_parquet_and_a_hugging_face_dataset_are_tables(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"age": [50.0, None], "y": [0, 1]})
    pq.write_table(table, tmp_path / "rows.parquet")
    folder = tmp_path / "saved"
    folder.mkdir()
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    columns = {"age": {"kind": "number", "low": 0, "high": 100, "missing": True}}
    for name, path in (("parquet", tmp_path / "rows.parquet"), ("hf", folder)):
        options = {"path": str(path), "target": "y", "classes": [0, 1], "columns": columns}
        found = read(DataSection(name, 2, options))
        assert found.train.inputs.tolist() == [[0.5, 0], [0, 1]]
        assert found.train.targets.tolist() == [0, 1]


def test_tokens_are_padded_to_a_public_length() -> None:
    encoding = Encoding.of({"text": {"kind": "tokens", "vocabulary": 50, "length": 4}})
    found = encoding({"text": ["one two three four five", "", None]}, Problems("t", [1, 2, 3]))
    assert found.shape == (3, 4)
    assert found.dtype == torch.int64
    assert found[1:].tolist() == [[0] * 4] * 2


def test_a_recipe_alone_never_runs_code() -> None:
    with pytest.raises(Refused, match="--allow-code"):
        small_recipe(data={"name": "os:getcwd", "records": 5})
    with pytest.raises(Refused, match="--allow-code"):
        small_recipe(model={"name": "os:getcwd"})


def test_keys_of_ones_own_data_are_not_for_published_sets() -> None:
    with pytest.raises(InputError, match=r"unknown key in .data. of fashion-mnist-mini: 'path'"):
        small_recipe(data={"path": "x"})
    assert CsvSource.__dataclass_fields__.keys() >= {"path", "delimiter"}


def many(glucose: int = 60, changed: int = 40) -> str:
    """Forty rows, the last ones with this glucose."""
    lines = [f"{n},{20 + n},{glucose if n >= 40 - changed else 50},f,a,,no" for n in range(40)]
    return "\n".join([TEXT.splitlines()[0], *lines])


def read_with_test(folder: Path, text: str, other: str) -> int:
    (folder / "test.csv").write_text(other, encoding="utf8")
    return len(read(section(folder, text, test_path=str(folder / "test.csv"))).test)


def test_test_rows_that_are_trained_on_are_refused(tmp_path: Path) -> None:
    """Their metrics would tell of private rows without noise; `test_path` was once taken for whatever it named."""
    assert read_with_test(tmp_path, many(), many(51)) == 40
    assert read_with_test(tmp_path, many(50), many(51, changed=20)) == 40
    for other in (many(50), many(51, changed=19), many(50).rsplit("\n", 12)[0]):
        with pytest.raises(Refused, match="most test rows are training rows"):
            read_with_test(tmp_path, many(50), other)


def test_tables_with_few_different_rows_may_share_them(tmp_path: Path) -> None:
    text = "\n".join([TEXT.splitlines()[0], *(f"{n},50,,f,a,,no" for n in range(40))])
    assert read_with_test(tmp_path, text, text) == 40


@pytest.mark.parametrize(
    ("begins", "said"),
    [
        (b"PK\x03\x04\x14\0", "an Excel workbook"),
        (b"\xd0\xcf\x11\xe0\xa1", "an Excel workbook"),
        (b"PAR1", 'name = "parquet"'),
        ("id,age\n1,J\u00fcrgen\n".encode("latin-1"), "CSV UTF-8"),
        ("id,age\n1,2\n".encode("utf-16"), "CSV UTF-8"),
    ],
)
def test_a_file_that_is_not_csv_is_called_what_it_is(begins: bytes, said: str, tmp_path: Path) -> None:
    described = section(tmp_path)
    (tmp_path / "visits.csv").write_bytes(begins)
    with pytest.raises(InputError, match=said):
        read(described)


def test_an_ignored_column_that_is_not_in_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.ignore has 'idd', which is not a column"):
        read(section(tmp_path, ignore=["idd"]))


def test_a_date_is_called_a_date(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="age: a date, not a number"):
        read(section(tmp_path, TEXT.replace("1,50,", "1,2020-01-31,")))
    with pytest.raises(InputError, match="days since a public date"):
        read(section(tmp_path, columns={**COLUMNS, "age": {"kind": "date"}}))


def test_bounds_in_another_unit_are_told_without_a_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read(section(tmp_path))
    assert "bounds" not in capsys.readouterr().err  # one of two ages is above its bound: not most of them
    read(section(tmp_path, columns={**COLUMNS, "age": {"kind": "number", "low": 0, "high": 1}}))
    said = capsys.readouterr().err
    assert "most values of some columns lie outside their bounds" in said
    assert "age" not in said  # the column is for the owner's terminal


class _Opened:
    """Unpickled, it makes a file."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return Path.touch, (self.made,)


@pytest.mark.parametrize("name", ["inputs", "targets", "who"])
@pytest.mark.parametrize("inside", [False, True], ids=["an array of objects", "a pickle in the archive"])
def test_objects_of_an_npz_file_are_refused_and_never_unpickled(name: str, inside: bool, tmp_path: Path) -> None:
    path, made = tmp_path / "rows.npz", tmp_path / "made"
    arrays: dict[str, Any] = {"inputs": np.ones((4, 2)), "targets": np.zeros(4, int), "who": np.arange(4)}
    objects = np.array([_Opened(made)] * 4, dtype=object)
    with zipfile.ZipFile(path, "w") as archive:
        for key, array in arrays.items():
            with archive.open(f"{key}.npy", "w") as file:
                if key == name and inside:
                    file.write(pickle.dumps(_Opened(made)))
                else:
                    np.lib.format.write_array(file, objects if key == name else array)
    source = NpzSource(path=str(path), classes=[0, 1], user="who")
    with pytest.raises(InputError, match=r"can't be read as \.npz"):
        source.users(path) if name == "who" else source.rows(path, labelled=True)
    assert not made.exists()


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (np.ones((0, 2)), "must have records"),
        (np.ones((4, 0)), "must have records"),
        (np.full((4, 2), 2**63 + 5, np.uint64), "too large for int64"),
    ],
)
def test_arrays_that_hold_nothing_or_ids_that_would_wrap_are_refused(inputs: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    np.savez(path, inputs=inputs, targets=np.zeros(len(inputs), int))
    with pytest.raises(InputError, match=said):
        NpzSource(path=str(path), classes=[0, 1]).rows(path, labelled=True)


def test_a_hugging_face_folder_with_a_list_of_chosen_rows_is_refused(tmp_path: Path) -> None:
    """All rows would be used, also those that the owner left out."""
    pytest.importorskip("pyarrow")
    state = {"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "i.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match="selection of rows"):
        HfSource(path=str(tmp_path), target="y", classes=[0, 1], columns=COLUMNS).rows(tmp_path, labelled=True)


def test_ids_that_single_precision_has_merged_are_refused(tmp_path: Path) -> None:
    """2^24 and 2^24 + 1 are one float32: two users would be clipped as one."""
    age = {"age": {"kind": "number", "low": 0, "high": 100}}
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for kind, refused in ((pa.float32(), True), (pa.float64(), False)):
        path = tmp_path / "visits.parquet"
        ids = pa.array(np.array([2.0**24, 2.0**24 + 1, 3.0], np.float32 if refused else np.float64), kind)
        pq.write_table(pa.table({"who": ids, "ill": ["no", "yes", "no"]}), path)
        source = ParquetSource(path=str(path), target="ill", classes=["no", "yes"], user="who", columns=age)
        if refused:
            with pytest.raises(InputError, match="too large for a float"):
                source.users(path)
        else:
            assert len(set(source.users(path) or ())) == 3
