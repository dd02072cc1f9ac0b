"""The report says what the files say, escapes what they contain, and names what is missing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_directory import AUDIT, HISTOGRAM, STEPS, guarantee, make_run

from sordino import report
from sordino.errors import InputError
from sordino.report import numbers
from sordino.report.ledger_table import group_releases
from sordino.report.plots import PlotAxis, Series, line_plot
from sordino.shown import up

CLAIM = guarantee()


class _Text(HTMLParser):
    """All text of a page, and every attribute that could fetch something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def page_of(folder: Path) -> _Text:
    return _Text(report.write(folder).read_text(encoding="utf8"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf8")), **changes}), encoding="utf8")


def test_the_guarantee_stands_first_with_all_that_it_depends_on(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    for expected in (
        f"ε = {numbers.epsilon(CLAIM['epsilon'])}",
        "δ = 10⁻⁵",
        "add-remove: one record is added to the data or removed from it",
        "poisson",
        "pld",
        CLAIM["theorem"],
        CLAIM["threat_model"],
        str(CLAIM["sentence"]).partition(" It assumes")[0],
        "fashion-mnist-linear",
        "What this guarantee does not say",
    ):
        assert expected in page.text
    for assumption in CLAIM["assumptions"]:
        assert assumption["text"] in page.text
        assert assumption["check"] in page.text
    assert page.text.index("The guarantee") < page.text.index("The ledger") < page.text.index("Recipe")


def test_epsilon_recomputed_from_the_ledger_stands_beside_the_plans(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    assert "The ledger agrees with the plan" in page.text
    assert f"Ledger alone: ε = {up(CLAIM['epsilon'], 6)}; plan: ε = {up(CLAIM['epsilon'], 6)}" in page.text


def test_a_ledger_with_one_release_too_many_is_called_out(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, released=STEPS + 1))
    assert "The ledger contains more than the plan allows" in page.text
    assert "agrees with the plan" not in page.text


def test_a_ledger_that_is_not_complete_says_so(tmp_path: Path) -> None:
    assert "The ledger contains less than the plan" in page_of(make_run(tmp_path, released=300)).text


def test_like_releases_are_one_row_and_counted(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    assert "gradient 0–599 600 Gaussian, 4.05 × sensitivity 0.1 in l2 poisson, q = 0.136533 39 700" in page.text
    assert f"{STEPS} releases" in page.text


def test_any_difference_or_gap_begins_a_new_row() -> None:
    entry = {"kind": "release", "purpose": "gradient", "mechanism": "laplace", "noise_multiplier": 1.0}
    steps = [{**entry, "step": s} for s in (0, 1, 2, 5, 6)] + [{**entry, "step": 7, "noise_multiplier": 2.0}]
    groups = group_releases(steps)
    assert [(g.first, g.last, g.count) for g in groups] == [(0, 2, 3), (5, 6, 2), (7, 7, 1)]
    assert groups[0].noise == "Laplace, 1 × sensitivity"


@pytest.mark.parametrize("secure", [True, False])
def test_an_insecure_seed_is_an_alarm_and_a_secure_run_has_none(tmp_path: Path, secure: bool) -> None:
    page = page_of(make_run(tmp_path, secure=secure))
    assert ("This run used an insecure seed" in page.text) is not secure
    assert ("there is no privacy guarantee" in page.text) is not secure


def test_record_norms_are_shown_only_if_paid_for(tmp_path: Path) -> None:
    unpaid = page_of(make_run(tmp_path / "unpaid"))
    assert "no noisy histogram of it was released" in unpaid.text
    paid = page_of(make_run(tmp_path / "paid", histogram=HISTOGRAM))
    assert "This histogram was released with noise" in paid.text
    assert "0.2 to 0.4 28.70 %" in paid.text
    assert "0.8 and more -0.40 %" in paid.text
    assert "record-norms" in paid.text
    assert "The ledger agrees with the plan" in paid.text


def test_an_audit_is_shown_if_there_is_one(tmp_path: Path) -> None:
    assert "Not audited" in page_of(make_run(tmp_path / "none")).text
    good = page_of(make_run(tmp_path / "good", audit=AUDIT))
    assert "The audit does not contradict the claim" in good.text
    assert "421 right of 500" in good.text
    broken = page_of(make_run(tmp_path / "bad", audit={**AUDIT, "epsilon_lower": 4.2, "holds": False}))
    assert "The audit breaks the claim" in broken.text


def test_plots_carry_a_description_and_their_numbers(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    assert page.tags.count("svg") == 2
    assert "It rises to ε =" in page.text
    assert "The 24 values" in page.text
    assert "without noise: 90.71 %" in page.text


def test_numbers_about_test_data_and_without_noise_are_labelled(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "a"))
    assert "test data, assumed to be public: the guarantee does not protect test records" in page.text
    assert "the training records without noise: not private, for public data only" in page.text
    assert "accuracy without noise" not in page_of(make_run(tmp_path / "b", noise_free=None)).text


def test_nothing_can_be_fetched_and_nothing_can_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path, audit=AUDIT, histogram=HISTOGRAM)
    page = page_of(folder)
    source = (folder / "report.html").read_text(encoding="utf8")
    assert page.links == ["data:,"]
    assert not {"script", "img", "iframe", "object", "form"} & set(page.tags)
    assert not re.search(r"https?:|@import|url\(", source)
    assert "default-src 'none'" in source
    assert " style=" not in source


def test_what_files_contain_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&<b>"
    folder = make_run(tmp_path, name=evil, audit={**AUDIT, "sentence": evil, "bound": evil, "canaries": evil})
    edit(folder / "result.json", environment={evil: evil}, method=evil, test_accuracy=evil)
    ledger = (folder / "ledger.jsonl").read_text(encoding="utf8")
    (folder / "ledger.jsonl").write_text(ledger.replace('"gradient"', json.dumps(evil)), encoding="utf8")
    page = page_of(folder)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert page.text.count("<script>alert(1)</script>") >= 7  # as text


def test_a_torn_last_line_of_metrics_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 601, "eps')
    assert "The 24 values" in page_of(folder).text


def test_a_broken_line_within_metrics_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], "{oops", *lines[1:]]))
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2"):
        report.write(folder)


def test_metrics_without_evaluation_or_with_odd_values_still_make_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "metrics.jsonl").write_text('{"step": 600, "epsilon": null, "test_accuracy": NaN}\n')
    assert "Nothing was measured during the run" in page_of(folder).text
    (folder / "metrics.jsonl").write_text('{"step": 600, "epsilon": 3.0, "test_accuracy": 0.9}\n')
    assert "The value" in page_of(folder).text


@pytest.mark.parametrize("name", ["recipe.toml", "ledger.jsonl", "metrics.jsonl", "result.json"])
def test_a_missing_file_is_named_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path)
    (folder / name).unlink()
    with pytest.raises(InputError, match=re.escape(name)):
        report.write(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(("name", "content"), [("result.json", "{"), ("result.json", "[]"), ("audit.json", "no")])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    folder = make_run(tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(InputError, match=re.escape(name)):
        report.write(folder)


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a directory"):
        report.write(tmp_path / "nowhere")


def test_a_second_report_replaces_the_first_and_leaves_no_scraps(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    before = report.write(folder).read_bytes()
    assert report.write(folder).read_bytes() == before
    assert not list(folder.glob("*.partial"))


class TestNumbers:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (2.99871, "2.999"),
            (3.0, "3"),
            (1.000343, "1.001"),
            (3.0000000001, "3.001"),
            (0.123411, "0.1235"),
            (12.3401, "12.35"),
            (1234.2, "1235"),
            (0, "0"),
        ],
    )
    def test_epsilon_is_rounded_up(self, value: float, text: str) -> None:
        assert numbers.epsilon(value) == text

    def test_epsilon_that_is_no_number(self) -> None:
        assert numbers.epsilon(float("inf")) == "∞"
        assert numbers.epsilon(None) == "–"

    @pytest.mark.parametrize(
        ("value", "text"),
        [(1e-5, "10⁻⁵"), (2.5e-6, "2.5·10⁻⁶"), (0.01, "0.01"), (None, "–"), (1.0000001e-5, "1.00001·10⁻⁵")],
    )
    def test_powers_of_ten(self, value: float, text: str) -> None:
        assert numbers.power(value) == text

    @pytest.mark.parametrize(("value", "text"), [(12.34, "12.3 s"), (143.27, "2 min 23 s"), (7400, "2 h 03 min")])
    def test_durations(self, value: float, text: str) -> None:
        assert numbers.seconds(value) == text


class TestPlots:
    @pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-1e-9, 1e-9], [0.0, 1e7], [0.1, 0.1 + 1e-15]])
    def test_an_axis_always_has_ticks_around_its_values(self, values: list[float]) -> None:
        axis = PlotAxis.around(values, 0.0, 100.0)
        assert axis.low <= min(values) + 1e-6 * axis.step
        assert axis.high >= max(values) - 1e-6 * axis.step
        assert 2 <= len(axis.ticks()) <= 8

    def test_ticks_are_labelled_exactly(self) -> None:
        axis = PlotAxis.around([0.79, 0.8835], 0.0, 100.0)
        assert [axis.label(t, percent=True) for t in axis.ticks()] == ["77.5", "80.0", "82.5", "85.0", "87.5", "90.0"]
        assert [PlotAxis.around([0, 300], 0.0, 1.0).label(t) for t in (0, 100)] == ["0", "100"]
        assert PlotAxis.around([0, 1e-7], 0.0, 1.0).label(2.5e-8) == "0.000000025"

    def test_the_line_ends_where_the_last_value_is(self) -> None:
        svg = line_plot([0, 10], [0.0, 4.0], Series("t", "s", "step", "privacy"))
        assert 'class="line" d="M52.0 228.0 L462.0 16.0"' in svg


class TestFigures:
    def test_an_axis_of_shares_ends_at_one_hundred_percent(self) -> None:
        for values in ([0.9], [0.97, 0.99], [0.2, 1.0], [1.0], [0.0]):
            axis = PlotAxis.around(values, 0.0, 100.0, share=True)
            assert axis.low >= 0
            assert axis.high <= 1
            assert all(axis.low <= tick <= axis.high + 1e-9 for tick in axis.ticks())
            assert axis.low <= min(values) <= max(values) <= axis.high

    def test_one_evaluation_is_a_point_and_no_line(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path)
        (folder / "metrics.jsonl").write_text('{"step": 600, "epsilon": 3.0, "test_accuracy": 0.9}\n')
        page = report.write(folder).read_text("utf8")
        drawn = re.findall(r'class="line" d="([^"]+)"', page)
        assert drawn
        assert all("L" not in path for path in drawn), "a line from zero to the only point is no ε of any step"

    def test_the_noise_multiplier_is_not_called_sigma(self, tmp_path: Path) -> None:
        page = page_of(make_run(tmp_path))
        assert "σ" not in page.text
        assert "4.05 × sensitivity" in page.text
