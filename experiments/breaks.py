"""What an attack of two hours broke in the code of 2026-11-16, what excludes its kind, and the tests that detect it.

Each row: its number, what was broken, what excludes this kind of fault now, and the tests (file::name).
`trust.py` shows the table on docs/trust.md, with what old_breaks.py saw on the code of 2026-11-16;
tests/experiments/test_trust.py checks that each test exists and that each point was seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

SEEN = Path(__file__).parent / "results" / "breaks.json"

Break = tuple[int, str, str, tuple[str, ...]]

BREAKS: tuple[Break, ...] = (
    (
        1,
        "truncated Poisson under add/remove: 7.0395 printed, 7.0432 certified, 7.849 with 10 % fewer records",
        "the bound holds for every number of records that is accepted, not for one",
        (
            "tests/accounting/test_samplers.py::test_truncated_poisson_is_not_below_a_certified_bound_for_any_number_of"
            "_records_that_is_accepted",
            "tests/accounting/test_samplers.py::test_truncated_poisson_bounds_every_number_of_records_that_is_accepted",
        ),
    ),
    (
        2,
        "rows of 1e-200 and 1e-300 moved sums by 7e107 and 8e15",
        "one function scales rows, by powers of two before it squares them, for every method",
        (
            "tests/test_clipping_unit_ball.py::test_a_record_of_any_size_moves_the_sums_of_both_methods_by_at_most_its"
            "_bound",
            "tests/test_clipping_unit_ball.py::test_every_kind_of_float_and_every_power_of_two",
        ),
    ),
    (
        3,
        "ε printed was never compared with the ledger: 0.385 against 10.02 and 159.4",
        "the ledger refuses an entry that the plan does not explain; a result's ε is the ledger's",
        (
            "tests/plan/test_explained.py::test_a_histogram_that_was_declared_at_a_lower_rate_is_refused_before_anything"
            "_is_released",
            "tests/plan/test_explained.py::test_a_statistic_that_the_plan_does_not_declare_does_not_leave",
        ),
    ),
    (
        4,
        "a partition resumed under a new shuffle; copies and forks that release twice",
        "the ledger names the key of the shuffle, its place on the disk and its process",
        (
            "tests/release/test_one_shuffle.py::test_a_partition_is_not_continued_under_another_key",
            "tests/release/test_ledger_chain.py::test_a_copy_is_refused_until_somebody_states_that_the_original_is_gone",
            "tests/release/test_one_shuffle.py::test_a_fork_does_not_release_under_its_parent_s_lock",
        ),
    ),
    (
        5,
        "ε and δ rounded to the nearest",
        "one function shows them, rounded up; a search of the source finds any other format",
        (
            "tests/test_shown.py::test_a_little_above_one_is_nowhere_shown_as_one",
            "tests/test_shown.py::test_no_source_file_formats_an_epsilon_or_a_delta_by_itself",
        ),
    ),
    (
        6,
        "leaks that no ledger entry covers: times, mtimes, error messages, the feature cache, noise-free accuracy",
        "two runs with different records and equal releases must write equal files; the rest is listed in the threat "
        "model",
        (
            "tests/runs/test_leaks.py::test_other_records_under_the_same_releases_change_nothing_that_leaves",
            "tests/runs/test_sweep_paid.py::test_a_paid_sweep_leaves_one_run_whose_papers_state_the_whole_cost",
            "tests/test_files.py::test_what_an_error_found_in_the_records_is_not_in_its_message",
            "tests/features/test_build.py::test_the_name_of_a_cached_file_says_nothing_about_the_records",
        ),
    ),
    (
        7,
        "an untrained model published with the lost model's accuracy; two resumes at once",
        "metrics beyond the checkpoint are dropped; a directory is locked before it is read; the last step is saved",
        (
            "tests/runs/test_resumed_honestly.py::test_metrics_of_lost_weights_are_dropped",
            "tests/runs/test_resumed_honestly.py::test_a_run_that_was_finished_meanwhile_is_left_as_it_is",
            "tests/runs/test_resumed_honestly.py::test_a_signal_saves_the_step_under_way",
            "tests/methods/dp_mac/test_mac_training.py::test_the_last_step_is_saved_whatever_the_checkpoints_are_due_at",
        ),
    ),
    (
        8,
        "a ledger that is lost, emptied, cut or rolled back; bytes changed unnoticed",
        "every line has a hash of all before it; checkpoint, model and result have checksums and the ledger's head",
        (
            "tests/release/test_ledger_chain.py::test_no_byte_can_change_unnoticed",
            "tests/release/test_ledger_chain.py::test_a_ledger_that_lost_its_end_is_refused_by_whoever_kept_its_head",
            "tests/training/test_resumed_ledger.py::test_no_byte_of_a_sealed_file_can_change_unnoticed",
        ),
    ),
    (
        9,
        "bad input found only after a release; another dataset of equal size on resume",
        "one update is rehearsed on zeros before the ledger exists; a keyed digest of the records is stored",
        (
            "tests/training/test_rehearsal.py::test_it_is_refused_and_nothing_is_written",
            "tests/training/test_resumed_ledger.py::test_other_records_of_equal_number_are_refused",
        ),
    ),
    (
        10,
        "tracebacks at bad files, directories, recipes, command lines; files that unpack without end",
        "one module (files.py) turns errors of the disk into messages; fuzzers and faults at every file operation stay "
        "in the tests",
        (
            "tests/experiments/test_faults.py::test_mutated_recipes_are_refused_by_a_sentence",
            "tests/experiments/test_faults.py::test_no_fault_loses_an_entry_or_draws_a_step_twice",
            "tests/data/test_images_readers.py::test_a_file_that_unpacks_without_end_is_refused",
            "tests/experiments/test_faults.py::test_asserts_narrow_types_and_guard_nothing",
            "tests/test_files.py::test_the_parents_of_a_directory_are_synced",
        ),
    ),
)


def lines() -> Iterator[str]:
    """The tables, for the page."""
    yield "| | what was broken | what excludes its kind | tests |"
    yield "|---|---|---|---|"
    for number, what, how, tests in BREAKS:
        yield f"| {number} | {what} | {how} | {', '.join(f'`{test}`' for test in tests)} |"
    yield ""
    yield from _seen()


def _seen() -> Iterator[str]:
    """Each point on the old code, by old_breaks.py."""
    if not SEEN.exists():
        yield "Not yet tried on the old code."
        return
    document = json.loads(SEEN.read_text(encoding="utf8"))
    points = document["points"]
    yield (
        f"`python experiments/old_breaks.py` tries each point on the code before these repairs "
        f"(commit {document['code_of']}), through the interface of that commit: modules and signatures have changed "
        "since, so the tests above can't run there. "
        f"{sum(point['shown'] for point in points)} of {len(points)} faults occur in that code:"
    )
    yield ""
    yield "| | point | seen in that code |"
    yield "|---|---|---|"
    for point in points:
        seen = point["seen"] if point["shown"] else f"**not shown**: {point['seen']}"
        yield f"| {point['break']} | {point['point']} | {seen.replace('|', '/')} |"
