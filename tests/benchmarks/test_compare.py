"""The comparison with others: what becomes of its figures. The figures themselves are no matter of a test."""

from pathlib import Path

import pytest

from processes import run_python

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)


def test_ratios_and_targets_come_from_the_medians() -> None:
    import compare

    speeds = {"ours": 300.0, "padded": 100.0, "sorted": 300.0, "trl": 100.0, "generate": 100.0}
    speeds |= {"llama": 100.0, "exact": 100.0, "fast": 200.0, "together": 300.0, "apart": 100.0}
    medians = {
        (measure, side): {"tokens_per_s": speeds[side], "peak_bytes": 1e9 / speeds[side]}
        for measure, sides in compare.MEASURES.items()
        for side in sides
    }
    medians["adapters", "ours"] = {"train 1": 10, "train 8": 9, "train 32": 8} | {
        "sample 1": 10,
        "sample 8": 10,
        "sample 32": 7,
    }
    medians["mode", "exact"] = {"train": 10, "sample": 10, "gap": 0.0}
    medians["mode", "fast"] = {"train": 10, "sample": 20, "gap": 1e-6}
    medians["flat", "ours"] = {"time 1024": 10, "gap 1024": 1e-6, "time 16384": 10.5, "gap 16384": 1e-6}
    medians["prompts", "together"] = {"tokens_per_s 2048": 30, "peak_bytes 2048": 1.0}
    medians["prompts", "apart"] = {"tokens_per_s 2048": 10, "peak_bytes 2048": 4.0}
    medians["mode_bfloat16", "exact"] = {"train": 10, "sample": 9, "gap": 0.0}
    medians["mode_bfloat16", "fast"] = {"train": 10, "sample": 10, "gap": 0.1}
    medians["decode", "ours"], medians["load", "ours"] = {"rows 1": 10.0, "rows 8": 30.0}, {"loads": 0.2}
    medians["decode", "llama"] = {"rows 1": 20.0, "rows 8": 20.0}
    rows = {row.key: row for row in compare.rows_of(medians)}
    assert {key: row.holds for key, row in rows.items() if row.holds is not None} == {
        "train_vs_padded": True,
        "train_vs_sorted": False,
        "memory": False,
        "sample_equal": True,
        "sample_ragged": False,
        "grpo_vs_trl": False,
        "adapters_8": True,
        "adapters_32": False,
        "train_exact": True,
        "sample_exact": False,
        "gap_exact": True,
        "train_exact_bfloat16": True,
        "sample_exact_bfloat16": False,
        "gap_exact_bfloat16": True,
        "decode_vs_llama_8": True,
        "gap_flat": True,
        "time_per_token": True,
    }
    assert (rows["train_vs_padded"].value, rows["gap"].value, rows["adapters_32"].value) == (3.0, 1e-6, 0.7)
    assert (rows["prompts_speed_2048"].value, rows["prompts_memory_2048"].value) == (3.0, 0.25)
    assert (rows["decode_vs_llama_1"].value, rows["decode_vs_llama_8"].value) == (0.5, 1.5)
    assert compare.table_of(list(rows.values())).row_count == len(rows)


def test_each_measure_of_each_side_is_a_function() -> None:
    import compare

    names = {name for sides in compare.MEASURES.values() for name in sides.values()}
    for name in names:
        module, _, function = name.partition(":")
        assert f"def {function}(setting: Setting" in (FOLDER / f"{module}.py").read_text(), name


@pytest.mark.slow
@pytest.mark.real_model
def test_a_measurement_prints_its_numbers_last(smollm2: Path) -> None:
    words = ["--size", "smoke", "--threads", "1", "--side", "ours", "--measure", "train"]
    done = run_python(str(FOLDER / "compare.py"), *words, check=True)
    assert done.stdout.splitlines()[-1].startswith('{"seconds": ')
