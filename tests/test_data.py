"""Reading, checking, preparing, splitting and handing out rows."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_grpo.data import (
    DataSpec,
    PreparedData,
    ProblemStream,
    RawData,
    check_columns,
    guess_columns,
    prepare,
    read_rows,
    sample_rows,
)
from lowmem_grpo.data.values import has_lost_backslash, json_value
from lowmem_grpo.errors import ConfigError, DataError, PluginError
from lowmem_grpo.types import Problem
from tests.tiny import tiny_tokenizer

GOOD = [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}]
TOKENIZER = tiny_tokenizer()


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read(source: Any, base_dir: Path = Path(), **settings_: Any) -> RawData:
    return read_rows(DataSpec(source, **settings_), base_dir=base_dir)


def prepared(source: Any, base_dir: Path = Path(), *, needs_gold: bool = True, **settings_: Any) -> PreparedData:
    spec = DataSpec(source, **settings_)
    return prepare(read_rows(spec, base_dir=base_dir), spec, TOKENIZER, needs_gold=needs_gold)


class TestFileFormats:
    def test_every_format_gives_the_same_rows_and_hash(self, tmp_path: Path) -> None:
        write(tmp_path / "a.jsonl", *GOOD)
        write(tmp_path / "a.ndjson", *GOOD)
        (tmp_path / "a.json").write_text(json.dumps(GOOD, indent=2))
        (tmp_path / "a.csv").write_text("prompt,answer\n1+1,2\n2+2,4\n")
        (tmp_path / "a.tsv").write_text("prompt\tanswer\n1+1\t2\n2+2\t4\n")
        pq.write_table(pa.Table.from_pylist(GOOD), tmp_path / "a.parquet")
        raws = [read(f"a.{end}", tmp_path) for end in ("jsonl", "ndjson", "json", "csv", "tsv", "parquet")]
        raws += [read(GOOD), read(str(tmp_path / "a.jsonl"))]
        assert {json.dumps(raw.train.rows) for raw in raws} == {json.dumps(GOOD)}
        assert {raw.train.columns for raw in raws} == {("prompt", "answer")}
        assert len({raw.sha256 for raw in raws}) == 1
        assert len(raws[0].sha256) == 64
        assert raws[0].sha256 != read(GOOD[:1]).sha256 != read(GOOD[1:]).sha256

    def test_lines_are_those_of_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}\n')
        (tmp_path / "a.csv").write_text('prompt,answer\n"two\nlines",1\n\nb,2\n')
        jsonl, csv = read("a.jsonl", tmp_path).train, read("a.csv", tmp_path).train
        assert (jsonl.unit, jsonl.lines) == ("line", (2, 4))
        assert (csv.unit, csv.lines) == ("line", (2, 5))
        assert csv.rows[0]["prompt"] == "two\nlines"
        listed = read(GOOD).train
        assert (listed.unit, listed.lines) == ("row", (1, 2))

    def test_json_with_one_object_a_line(self, tmp_path: Path) -> None:
        write(tmp_path / "a.json", *GOOD)
        assert read("a.json", tmp_path).train.rows == tuple(GOOD)

    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
    @pytest.mark.parametrize("newline", ["\n", "\r\n"])
    def test_unicode_marks_and_line_ends(self, tmp_path: Path, encoding: str, newline: str) -> None:
        row = {"prompt": "Größe? 数 \u2028 🙂", "answer": "é"}
        text = json.dumps(row, ensure_ascii=False)
        (tmp_path / "a.jsonl").write_bytes((text + newline + text + newline).encode(encoding))
        cells = newline.join(["prompt,answer", f"{row['prompt']},é", f"{row['prompt']},é", ""])
        (tmp_path / "a.csv").write_bytes(cells.encode(encoding))
        assert read("a.jsonl", tmp_path).train.rows == (row, row)
        assert read("a.csv", tmp_path).train.rows == (row, row)

    def test_csv_keeps_text_and_reads_empty_cells_as_missing(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text('prompt; answer;note\nab;007;\n"a;""b""";1,5;x\n')
        assert read("a.csv", tmp_path).train.rows == (
            {"prompt": "ab", "answer": "007", "note": None},
            {"prompt": 'a;"b"', "answer": "1,5", "note": "x"},
        )

    def test_csv_cells_may_be_long(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("prompt,answer\n" + "a" * 200_000 + ",1\n")
        assert len(read("a.csv", tmp_path).train.rows[0]["prompt"]) == 200_000

    def test_parquet_with_message_lists(self, tmp_path: Path) -> None:
        rows = [{"prompt": [{"role": "user", "content": "1+1"}], "answer": 2}]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        assert read("a.parquet", tmp_path).train.rows == tuple(rows)

    def test_sample_rows_are_the_first(self, tmp_path: Path) -> None:
        assert sample_rows(write(tmp_path / "a.jsonl", *GOOD), 1) == GOOD[:1]
        assert sample_rows(tmp_path / "a.jsonl", 9) == GOOD


class TestFileErrors:
    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.jsonl", b"", r"a.jsonl has no rows"),
            ("a.jsonl", b"\n\n", r"a.jsonl has no rows"),
            ("a.json", b"[]", r"a.json has no rows"),
            ("a.csv", b"prompt,answer\n", r"a.csv has no rows"),
            ("a.jsonl", b'{"prompt": "a"}\n{"prompt": \n', r"a.jsonl line 2 is not valid JSON: .* column 12"),
            ("a.jsonl", b'{"prompt": "\\alpha"}\n', r"line 1 is not valid JSON: .*escape.*a backslash is written \\\\"),
            ("a.jsonl", b'{"prompt": "a"}\n3\n', r"a.jsonl line 2 holds 3 where a row \(a JSON object\)"),
            ("a.jsonl", b'[{"prompt": "a"}]\n', r"line 1 holds .* where a row .*name the file .json if it is one list"),
            ("a.json", b'[{"prompt": "a"},\n 3]', r"a.json row 2 holds 3 where a row"),
            ("a.json", b'[{"prompt": "a"},\n {]', r"a.json is not valid JSON: .* at line 2 column 3"),
            ("a.json", b'{\n"data": []}', r"a.json line 1 is not valid JSON"),
            (
                "a.jsonl",
                b'{"prompt": "a"}\n{"prompt": "\xff"}',
                r"a.jsonl line 2 is not UTF-8 .*save .* as UTF-8",
            ),
            ("a.jsonl", b'{"prompt": "a", "x": "\\ud83d"}', r"line 1, column 'x', holds half a surrogate pair"),
            ("a.csv", b"prompt,answer\na,1\nb,2,3\n", r"a.csv line 3 has 3 cells under a header of 2 columns"),
            ("a.csv", b"prompt,answer\na\n", r"a.csv line 2 has 1 cells under a header of 2 columns"),
            ("a.csv", b'prompt,answer\n"a"b,1\n', r"a.csv line 2 is not valid CSV"),
            ("a.csv", b"prompt,prompt\na,b\n", r"a.csv line 1 names a column twice: prompt, prompt"),
            ("a.parquet", b"PAR?", r"a.parquet is not a readable Parquet file"),
            ("a.xlsx", b"", r"ends in '.xlsx'; data files end in .jsonl, .ndjson, .json, .csv, .tsv, .parquet"),
            ("rows", b"", r"ends in 'nothing'"),
        ],
    )
    def test_content(self, tmp_path: Path, name: str, content: bytes, message: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            read(name, tmp_path)

    def test_missing_file_names_the_nearest(self, tmp_path: Path) -> None:
        write(tmp_path / "train.jsonl", *GOOD)
        with pytest.raises(DataError, match=r"there is no file .*trian.jsonl; did you mean train.jsonl\?"):
            read("trian.jsonl", tmp_path)
        with pytest.raises(DataError, match=r"there is no file .*rows.jsonl: its folder does not exist"):
            read("nowhere/rows.jsonl", tmp_path)
        with pytest.raises(DataError, match=r"there is no file .*zzz.parquet$"):
            read("zzz.parquet", tmp_path)
        with pytest.raises(DataError, match=r"there is no file .*train.txt"):
            read("./train.txt", tmp_path)

    def test_an_empty_list_of_rows(self) -> None:
        with pytest.raises(DataError, match="the given rows has no rows"):
            read([])


class TestColumns:
    def test_missing_prompt_column(self) -> None:
        with pytest.raises(
            DataError,
            match=r"no column 'prompt' for the prompt; columns found: question, answer; .* data.prompt_column=question",
        ):
            read([{"question": "1+1", "answer": "2"}])
        with pytest.raises(DataError, match=r"no column 'qestion' .* data.prompt_column=question"):
            read([{"id": 1, "question": "1+1"}], prompt_column="qestion")

    def test_a_test_source_without_the_prompt_column(self, tmp_path: Path) -> None:
        write(tmp_path / "test.jsonl", {"question": "1+1"})
        with pytest.raises(DataError, match=r"test.jsonl has no column 'prompt'"):
            read(GOOD, tmp_path, test_source="test.jsonl")

    def test_mappings_that_name_no_column(self) -> None:
        with pytest.raises(DataError, match=r"data.answer_column=anwser names no column .*did you mean .*=answer\?"):
            read(GOOD, answer_column="anwser")
        with pytest.raises(DataError, match=r"data.columns.solution=level names no column .* found: prompt, answer$"):
            read(GOOD, columns={"solution": "level"})
        with pytest.raises(DataError, match=r"data.columns.completions uses a name that every reward already gets"):
            read(GOOD, columns={"completions": "answer"})

    def test_a_reward_wants_a_column_that_is_not_there(self) -> None:
        with pytest.raises(
            DataError,
            match=r"the reward 'sympy' wants the column 'solution', which the given rows has not; columns found: "
            r"prompt, answer; map one of them, for example data.columns.solution=answer",
        ):
            check_columns(read(GOOD), DataSpec(GOOD), {"number": ["answer"], "sympy": ["solution"]})

    def test_a_reward_wants_the_gold_and_no_column_is_called_answer(self) -> None:
        rows = [{"prompt": "1+1", "output": "2"}]
        with pytest.raises(DataError, match=r"'number' wants the column 'answer'.* data.answer_column=output"):
            check_columns(read(rows), DataSpec(rows), {"number": {"answer"}})

    def test_columns_that_are_there(self) -> None:
        rows = [{"prompt": "1+1", "output": "2", "level": 3}]
        spec = DataSpec(rows, answer_column="output", columns={"difficulty": "level"})
        check_columns(read_rows(spec, base_dir=Path()), spec, {"mine": ["answer", "output", "level", "difficulty"]})

    def test_a_test_source_without_the_wanted_column(self) -> None:
        spec = DataSpec(GOOD, test_source=[{"prompt": "3+3"}])
        with pytest.raises(DataError, match=r"the reward 'number' wants the column 'answer'"):
            check_columns(read_rows(spec, base_dir=Path()), spec, {"number": ["answer"]})

    def test_instruction_output_level_reach_the_reward(self) -> None:
        rows = [{"instruction": "1+1", "output": "2", "level": 3}]
        problem = prepared(rows, prompt_column="instruction", answer_column="output").train[0]
        assert problem.prompt == "1+1"
        assert problem.columns == {"instruction": "1+1", "output": "2", "level": 3, "answer": "2"}

    def test_mapped_names_are_added_and_the_prompt_is_not_a_column(self) -> None:
        problem = prepared(GOOD, columns={"solution": "answer", "question": "prompt"}).train[1]
        assert problem.columns == {"answer": "4", "solution": "4", "question": "2+2"}

    def test_the_gold_hides_a_column_called_answer_with_a_warning(self) -> None:
        rows = [{"prompt": "1+1", "answer": "It is 2.", "final": "2"}]
        data = prepared(rows, answer_column="final", columns={"rationale": "answer"})
        assert data.train[0].columns == {"answer": "2", "final": "2", "rationale": "It is 2."}
        assert len(data.report.warnings) == 1 and "rewards get the column final as `answer`" in data.report.warnings[0]

    def test_a_mapping_called_answer_is_the_gold(self) -> None:
        rows = [{"prompt": "1+1", "output": "2"}, {"prompt": "2+2", "output": None}]
        data = prepared(rows, columns={"answer": "output"})
        assert [problem.columns["answer"] for problem in data.train] == ["2"]

    def test_reserved_names_stay_out_with_a_warning(self) -> None:
        data = prepared([{"prompt": "1+1", "answer": "2", "completions": "x"}])
        assert data.train[0].columns == {"answer": "2"}
        assert "the column completions is not passed to rewards" in data.report.warnings[0]

    def test_a_column_that_a_row_lacks_is_none(self) -> None:
        data = prepared([{"prompt": "a", "answer": "1", "level": 3}, {"prompt": "b", "answer": "2"}])
        assert [problem.columns["level"] for problem in data.train] == [3, None]

    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ({"prompt": "a", "answer": "b"}, ("prompt", "answer")),
            ({"id": 1, "Question": "a", "Solution": "b"}, ("Question", "Solution")),
            ({"instruction": "a", "input": "b", "output": "c"}, ("instruction", "output")),
            ({"problem": "a", "solution": "b", "answer": "c"}, ("problem", "answer")),
            ({"messages": [{"role": "user", "content": "a"}], "label": 1}, ("messages", "label")),
            ({"sql": "a", "rows": 3}, ("sql", None)),
            ({"prompt": 3, "query": "a"}, ("query", None)),
        ],
    )
    def test_guess_columns(self, row: dict[str, Any], expected: tuple[str, str | None]) -> None:
        assert guess_columns([row]) == expected

    def test_guess_columns_without_text(self) -> None:
        with pytest.raises(DataError, match="no column holds text, so none can be the prompt; columns found: a, b"):
            guess_columns([{"a": 1, "b": 2}])


class TestGenerators:
    def test_a_built_in_task(self) -> None:
        raw = read("addition", args={"low": 3, "high": 3})
        assert raw.train.rows == ({"prompt": "What is 3 + 3? Reply with only the number.", "answer": "6"},)

    def test_a_function_in_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text("def rows(n=1):\n    for i in range(n):\n        yield {'prompt': str(i)}\n")
        raw = read("mine.py:rows", tmp_path, args={"n": 2})
        assert raw.train.rows == ({"prompt": "0"}, {"prompt": "1"})
        assert raw.train.label == "mine.py:rows"
        with pytest.raises(PluginError, match="did you mean 'rows'"):
            read("mine.py:rowz", tmp_path)

    def test_wrong_arguments_name_the_right_ones(self) -> None:
        with pytest.raises(ConfigError, match=r"data.args .*'hihg'.*it takes low, high, seed; did you mean high\?"):
            read("addition", args={"hihg": 9})

    def test_arguments_of_a_file_are_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "a.jsonl", *GOOD)
        with pytest.raises(ConfigError, match=r"data.args is for tasks, functions and hub ids, not for a.jsonl"):
            read("a.jsonl", tmp_path, args={"high": 9})

    def test_a_function_that_fails_is_shown(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text("def rows():\n    return 1 / 0\n\ndef three():\n    return [3]\n")
        with pytest.raises(DataError, match=r"mine.py:rows raised ZeroDivisionError: division by zero") as caught:
            read("mine.py:rows", tmp_path)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(DataError, match=r"mine.py:three row 1 holds 3 where a row"):
            read("mine.py:three", tmp_path)

    def test_a_misspelt_task(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"no task named 'additon'; did you mean data.source=addition\?"):
            read("additon", tmp_path)


class TestFoldersAndHub:
    def test_a_folder_by_split(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
        folder = tmp_path / "sums"
        folder.mkdir()
        write(folder / "train.jsonl", *GOOD)
        write(folder / "test.jsonl", {"prompt": "3+3", "answer": "6"})
        raw = read("sums", tmp_path, test_source="sums")
        assert raw.train.rows == tuple(GOOD)
        assert raw.test is not None and raw.test.rows == ({"prompt": "3+3", "answer": "6"},)
        with pytest.raises(DataError, match=r"Unknown split \"trian\". Should be one of \['train', 'test'\]"):
            read("sums", tmp_path, split="trian")
        (tmp_path / "empty").mkdir()
        with pytest.raises(DataError, match=r"cannot load the folder .*empty: .*doesn't contain any data files"):
            read("empty", tmp_path)

    def test_a_folder_saved_by_datasets(self, tmp_path: Path) -> None:
        rows = datasets.Dataset.from_list(GOOD)
        rows.save_to_disk(tmp_path / "one")
        datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "more")
        assert read("one", tmp_path).train.rows == read("more", tmp_path).train.rows == tuple(GOOD)
        with pytest.raises(DataError, match=r"has no split 'dev'; it has train"):
            read("more", tmp_path, split="dev")

    def test_no_internet(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        with pytest.raises(DataError, match=r"owner/sums is neither a file here nor within reach: .*connection"):
            read("owner/sums", tmp_path)

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (
                datasets.exceptions.DatasetNotFoundError("Dataset 'o/s' is a gated dataset on the Hub."),
                r"the data set o/s is gated: accept its terms .*HF_TOKEN",
            ),
            (
                datasets.exceptions.DatasetNotFoundError("Dataset 'o/s' doesn't exist on the Hub or is closed."),
                r"no file, folder, task or hub data set 'o/s', or it is private and needs HF_TOKEN",
            ),
            (
                datasets.exceptions.DatasetNotFoundError("Revision 'v9' doesn't exist for dataset 'o/s' on the Hub."),
                r"the data set o/s has no such revision: Revision 'v9'",
            ),
            (
                ValueError("Config name is missing.\nPlease pick one of the available configs: ['main', 'socratic']"),
                r"cannot load o/s: it has several configurations; choose one with data.args.name=.*'main', 'socratic'",
            ),
            (OSError("disk full\nmore"), r"cannot load o/s: disk full$"),
        ],
    )
    def test_what_can_go_wrong(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(datasets, "load_dataset", fail)
        with pytest.raises(DataError, match=message):
            read("o/s", tmp_path)

    def test_configuration_and_split_are_passed_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []

        def load(path: str, **arguments: Any) -> datasets.Dataset:
            calls.append((path, arguments))
            return datasets.Dataset.from_list(GOOD)

        monkeypatch.setattr(datasets, "load_dataset", load)
        read("o/s", tmp_path, args={"name": "main"}, test_source="o/s", test_split="validation")
        assert calls == [
            ("o/s", {"split": "train", "name": "main"}),
            ("o/s", {"split": "validation", "name": "main"}),
        ]
        with pytest.raises(ConfigError, match=r"data.args.nane is unknown; .* takes name, .*did you mean name\?"):
            read("o/s", tmp_path, args={"nane": "main"})


class TestValues:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (datetime.datetime(2024, 5, 1, 12, 30), "2024-05-01T12:30:00"),
            (datetime.date(2024, 5, 1), "2024-05-01"),
            (datetime.timedelta(minutes=2), 120.0),
            (decimal.Decimal("3.00"), 3),
            (decimal.Decimal("0.1"), 0.1),
            (decimal.Decimal("0.12345678901234567890123"), "0.12345678901234567890123"),
            (decimal.Decimal("NaN"), None),
            (float("nan"), None),
            (pd.NaT, None),
            (pd.NA, None),
            (pd.Timestamp("2024-05-01"), "2024-05-01T00:00:00"),
            (np.int64(3), 3),
            (np.float32(0.5), 0.5),
            (np.float64("nan"), None),
            (np.bool_(True), True),
            (np.array([[1, 2]]), [[1, 2]]),
            (np.array(["2024-05-01"], dtype="datetime64[ns]"), ["2024-05-01T00:00:00.000000000"]),
            (np.str_("a"), "a"),
            (torch.tensor([1.5]), [1.5]),
            (b"caf\xc3\xa9", "café"),
            (b"\xff\x00", "/wA="),
            ((1, {2: {"b", "a"}}), [1, {"2": ["a", "b"]}]),
            (Path("a/b"), "a/b"),
        ],
    )
    def test_json_value(self, value: Any, expected: Any) -> None:
        found = json_value(value)
        assert found == expected
        assert type(found) is type(expected)
        assert json.loads(json.dumps(found)) == found

    def test_what_is_not_json_is_refused_by_row_and_column(self) -> None:
        with pytest.raises(DataError, match=r"the given rows row 2, column 'x', holds a value of type object"):
            read([{"prompt": "a"}, {"prompt": "b", "x": object()}])

    def test_parquet_values(self, tmp_path: Path) -> None:
        table = pa.table(
            {
                "prompt": ["a"],
                "price": pa.array([decimal.Decimal("1.25")], pa.decimal128(5, 2)),
                "day": pa.array([datetime.date(2024, 5, 1)]),
                "score": pa.array([math.nan]),
                "ids": pa.array([[1, 2]]),
            }
        )
        pq.write_table(table, tmp_path / "a.parquet")
        row = {"prompt": "a", "price": 1.25, "day": "2024-05-01", "score": None, "ids": [1, 2]}
        assert read("a.parquet", tmp_path).train.rows == (row,)

    @pytest.mark.parametrize(
        ("text", "lost"),
        [
            ("\frac{1}{4}", True),
            (r"\frac{1}{4}", False),
            ("\beta", True),
            ("3 \times 4", True),
            ("a\tb\ttable", False),
            ("line\nnext\r\nright here", False),
            ("\right)", True),
            ("\nabla f", True),
            ("plain", False),
        ],
    )
    def test_lost_backslash(self, text: str, lost: bool) -> None:
        assert has_lost_backslash(text) is lost
        assert has_lost_backslash([{"role": "user", "content": text}]) is lost


class TestDropping:
    def test_one_good_row_and_three_reported_by_line(self, tmp_path: Path) -> None:
        write(
            tmp_path / "a.jsonl",
            {"prompt": "", "answer": "1"},
            {"prompt": None, "answer": "1"},
            {"prompt": "a", "answer": None},
            {"prompt": "b", "answer": "2"},
        )
        data = prepared("a.jsonl", tmp_path)
        assert [problem.id for problem in data.train] == ["train-4"]
        assert [(item.reason, item.lines) for item in data.report.dropped] == [
            ("the prompt is empty", (1,)),
            ("the prompt is null", (2,)),
            ("the answer is null", (3,)),
        ]
        assert data.report.describe()[:2] == [
            "4 rows read: 1 to train on, 0 dev, 0 test; longest prompt 20 tokens",
            "a.jsonl: 1 row left out because the prompt is empty (line 1)",
        ]

    def test_a_null_gold_stays_when_no_reward_needs_it(self) -> None:
        rows = [{"prompt": "a", "answer": None}, {"prompt": "b"}]
        assert [p.columns for p in prepared(rows, needs_gold=False).train] == [{"answer": None}, {"answer": None}]

    @pytest.mark.parametrize("answer", ["", "  \n"])
    def test_a_blank_gold_counts_as_none(self, answer: str) -> None:
        data = prepared([{"prompt": "a", "answer": answer}, {"prompt": "b", "answer": 0}])
        assert [(item.reason, item.lines) for item in data.report.dropped] == [("the answer is empty", (1,))]
        assert data.train[0].columns["answer"] == 0

    @pytest.mark.parametrize("prompt", [" \n", [], [{"role": "user", "content": " "}]])
    def test_blank_prompts_in_any_form(self, prompt: Any) -> None:
        good = "a" if isinstance(prompt, str) else [{"role": "user", "content": "a"}]
        data = prepared([{"prompt": prompt, "answer": "1"}, {"prompt": good, "answer": "1"}])
        assert [(item.reason, item.lines) for item in data.report.dropped] == [("the prompt is empty", (1,))]

    def test_no_row_left_stops(self) -> None:
        with pytest.raises(DataError, match=r"no row that can be used: .*1 row .* empty \(row 1\); .* null \(row 2\)"):
            prepared([{"prompt": "", "answer": "1"}, {"prompt": None, "answer": "1"}])

    def test_a_test_source_with_no_row_left_stops(self) -> None:
        with pytest.raises(DataError, match=r"no row that can be used: .*the answer is null \(row 1\)"):
            prepared(GOOD, test_source=[{"prompt": "3+3", "answer": None}])

    def test_too_long_is_dropped_and_counted_never_cut(self) -> None:
        rows = [{"prompt": "x" * 200}, {"prompt": "x" * 32}, {"prompt": "x" * 33}]
        data = prepared(rows, needs_gold=False, format="text", max_prompt_tokens=32)
        assert [len(problem.prompt_ids) for problem in data.train] == [32]
        assert data.report.longest_prompt == 32
        assert [(item.reason, item.lines) for item in data.report.dropped] == [
            ("the prompt is longer than data.max_prompt_tokens=32", (1, 3))
        ]

    def test_the_template_counts_towards_the_length(self) -> None:
        # 2 markers, "user\n", "hi", the end, "\n", "assistant\n": 1 + 5 + 2 + 1 + 1 + 1 + 10 = 21 one-byte tokens.
        assert prepared([{"prompt": "hi"}], needs_gold=False, max_prompt_tokens=21).report.longest_prompt == 21
        with pytest.raises(DataError, match=r"longer than data.max_prompt_tokens=20"):
            prepared([{"prompt": "hi"}], needs_gold=False, max_prompt_tokens=20)

    def test_rows_a_reward_cannot_use(self) -> None:
        rows = [{"prompt": "a", "answer": "???"}, {"prompt": "b", "answer": "2"}]
        spec = DataSpec(rows)
        data = prepare(
            read_rows(spec, base_dir=Path()),
            spec,
            TOKENIZER,
            needs_gold=True,
            unusable=lambda columns: "the gold is no number" if columns["answer"] == "???" else None,
        )
        assert [problem.id for problem in data.train] == ["train-2"]
        assert [(item.reason, item.lines) for item in data.report.dropped] == [("the gold is no number", (1,))]

    def test_a_lost_backslash_is_a_warning_with_the_lines(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(
            r'{"prompt": "a", "answer": "\frac{1}{4}"}' + "\n"
            r'{"prompt": "b", "answer": "\\frac{1}{4}"}' + "\n"
            r'{"prompt": "Simplify \beta", "answer": "1"}' + "\n"
        )
        data = prepared("a.jsonl", tmp_path)
        assert data.report.train == 3
        assert len(data.report.warnings) == 1
        assert data.report.warnings[0].startswith("a.jsonl lines 1, 3: a control character where a LaTeX command")
        assert data.report.describe()[-1].startswith("warning: a.jsonl lines 1, 3")

    def test_many_lines_are_shortened(self) -> None:
        data = prepared([{"prompt": "a", "answer": "1"}, *({"prompt": "", "answer": "1"} for _ in range(12))])
        assert data.report.describe()[1].endswith("(rows 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more)")

    def test_duplicates_are_kept_and_counted(self) -> None:
        data = prepared([GOOD[0], GOOD[0], GOOD[1]])
        assert [problem.id for problem in data.train] == ["train-1", "train-2", "train-3"]
        assert data.report.duplicates == 1
        assert "1 repeated prompts kept" in data.report.describe()[0]

    def test_example_is_the_first_rendered_prompt(self) -> None:
        assert prepared(GOOD).example == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"


def many(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {i}", "answer": str(i)} for i in range(count)]


def prompts(problems: tuple[Problem, ...]) -> list[Any]:
    return [problem.prompt for problem in problems]


class TestSplits:
    def test_sizes_ids_and_nothing_lost(self) -> None:
        data = prepared(many(10), dev_size=2, test_size=3)
        assert (data.report.rows, data.report.train, data.report.dev, data.report.test) == (10, 5, 2, 3)
        ids = [problem.id for problem in (*data.train, *data.dev, *data.test)]
        assert {i.split("-")[0] for i in ids[:5]} == {"train"}
        assert {i.split("-")[0] for i in ids[5:7]} == {"dev"}
        assert {i.split("-")[0] for i in ids[7:]} == {"test"}
        assert sorted(int(i.split("-")[1]) for i in ids) == list(range(1, 11))

    def test_stable_and_by_seed(self) -> None:
        first, again = (prepared(many(40), dev_size=5, test_size=5) for _ in range(2))
        other = prepared(many(40), dev_size=5, test_size=5, seed=1)
        assert first == again
        assert prompts(first.test) != prompts(other.test)

    def test_one_size_does_not_move_the_other_split(self) -> None:
        base = prepared(many(40), dev_size=5, test_size=5)
        assert prepared(many(40), dev_size=9, test_size=5).test == base.test
        assert prepared(many(40), dev_size=5, test_size=9).dev == base.dev
        assert set(prompts(base.test)) < set(prompts(prepared(many(40), dev_size=5, test_size=9).test))

    def test_the_order_of_the_rows_does_not_matter(self) -> None:
        forward, backward = (prepared(rows, dev_size=5, test_size=5) for rows in (many(40), many(40)[::-1]))
        assert set(prompts(forward.test)) == set(prompts(backward.test))
        assert set(prompts(forward.dev)) == set(prompts(backward.dev))

    def test_held_out_rows_are_spread_over_the_file(self) -> None:
        lines = [int(problem.id.split("-")[1]) for problem in prepared(many(100), test_size=20).test]
        assert min(lines) < 34 and max(lines) > 66

    def test_rows_that_ask_the_same_stay_together(self) -> None:
        rows = [{"prompt": f"  Question\t{i}\n" if j else f"question {i}"} for i in range(10) for j in range(2)]
        data = prepared(rows, needs_gold=False, dev_size=4, test_size=6)
        sides = [{" ".join(p.lower().split()) for p in prompts(part)} for part in (data.train, data.dev, data.test)]
        assert [len(side) for side in sides] == [5, 2, 3]
        assert [len(part) for part in (data.train, data.dev, data.test)] == [10, 4, 6]
        assert len(set.union(*sides)) == 10

    def test_the_system_message_is_part_of_what_is_asked(self) -> None:
        def row(system: str) -> dict[str, Any]:
            return {"prompt": [{"role": "system", "content": system}, {"role": "user", "content": "hi"}]}

        assert prepared([row("Be brief."), row("Be long.")], needs_gold=False, test_size=1).report.test == 1
        with pytest.raises(DataError, match="rows with the same prompt stay together"):
            prepared([row("Be brief."), row("be  brief.")], needs_gold=False, test_size=1)

    def test_repeats_that_do_not_fit_are_a_warning(self) -> None:
        rows = [{"prompt": f"q{i}"} for i in range(6) for _ in range(4)]
        data = prepared(rows, needs_gold=False, test_size=10)
        assert data.report.test == 8
        assert data.report.warnings == (
            "data.test_size=10 gives 8 rows, because rows with the same prompt stay together",
        )

    @pytest.mark.parametrize("sizes", [{"dev_size": 10}, {"test_size": 10}, {"dev_size": 4, "test_size": 6}])
    def test_too_few_rows(self, sizes: dict[str, int]) -> None:
        with pytest.raises(DataError, match=r"10 usable rows are too few for data.dev_size=\d+ and data.test_size=\d+"):
            prepared(many(10), **sizes)

    def test_test_source_drops_its_prompts_from_training(self) -> None:
        data = prepared(
            many(6), test_source=[{"prompt": " QUESTION 2", "answer": "2"}, {"prompt": "new", "answer": "1"}]
        )
        assert prompts(data.train) == ["question 0", "question 1", "question 3", "question 4", "question 5"]
        assert prompts(data.test) == [" QUESTION 2", "new"]
        assert [problem.id for problem in data.test] == ["test-1", "test-2"]
        assert [(item.reason, item.lines) for item in data.report.dropped] == [
            ("the same prompt is in the test source", (3,))
        ]

    def test_test_source_with_a_size_and_dev(self) -> None:
        data = prepared(many(10), test_source=many(14)[8:], test_size=2, dev_size=3)
        assert (data.report.rows, data.report.train, data.report.dev, data.report.test) == (16, 5, 3, 2)
        # All six prompts of the test source leave the training rows, whichever two are used.
        assert not {"question 8", "question 9"} & {*prompts(data.train), *prompts(data.dev)}
        with pytest.raises(DataError, match=r"data.test_size=7 is more than the 6 usable rows of data.test_source"):
            prepared(many(10), test_source=many(14)[8:], test_size=7)

    def test_test_source_equal_to_the_source(self) -> None:
        with pytest.raises(DataError, match=r"every training prompt is also in data.test_source"):
            prepared(many(3), test_source=many(3))

    @settings(max_examples=30, deadline=None)
    @given(
        questions=st.lists(st.sampled_from([f"q{i}" for i in range(12)]), min_size=4, max_size=40),
        dev=st.integers(0, 6),
        test=st.integers(0, 6),
        seed=st.integers(0, 3),
    )
    def test_splits_are_disjoint_and_lose_nothing(self, questions: list[str], dev: int, test: int, seed: int) -> None:
        rows = [{"prompt": question.upper() if i % 2 else question} for i, question in enumerate(questions)]
        try:
            data = prepared(rows, needs_gold=False, format="text", dev_size=dev, test_size=test, seed=seed)
        except DataError as error:
            assert "too few" in str(error) or "stay together" in str(error)
            return
        parts = (data.train, data.dev, data.test)
        sides = [{problem.prompt.casefold() for problem in part} for part in parts]
        assert sum(len(side) for side in sides) == len(set(questions))
        assert sum(len(part) for part in parts) == len(questions)
        assert len(data.train) > 0 and len(data.dev) <= dev and len(data.test) <= test


def problems(count: int, prompt: str = "?") -> list[Problem]:
    return [Problem(f"train-{i + 1}", prompt, prompt, (5,)) for i in range(count)]


class TestStream:
    def test_five_prompts_three_a_step(self) -> None:
        stream = ProblemStream(problems(5), prompts_per_step=3, seed=0)
        assert stream.steps_per_epoch == 2
        assert [len(stream.at(step)) for step in range(4)] == [3, 2, 3, 2]
        for epoch in range(2):
            seen = [p.id for step in (0, 1) for p in stream.at(2 * epoch + step)]
            assert sorted(seen) == [f"train-{i}" for i in range(1, 6)]

    def test_two_prompts_three_a_step_are_refused(self) -> None:
        with pytest.raises(DataError, match=r"2 training problems are fewer than rollout.prompts_per_step=3; set .* 2"):
            ProblemStream(problems(2), prompts_per_step=3, seed=0)
        with pytest.raises(DataError, match="0 training problems"):
            ProblemStream([], prompts_per_step=0, seed=0)

    def test_sixteen_prompts_four_a_step(self) -> None:
        stream = ProblemStream(problems(16), prompts_per_step=4, seed=0)
        assert stream.steps_per_epoch == 4
        assert stream.describe() == "16 training problems, 4 a step: 4 steps an epoch"

    def test_identical_prompts_stay_two_problems(self) -> None:
        pair = ProblemStream(problems(2, "same"), prompts_per_step=2, seed=0).at(0)
        assert sorted(problem.id for problem in pair) == ["train-1", "train-2"]

    def test_epochs_and_seeds_differ(self) -> None:
        stream = ProblemStream(problems(30), prompts_per_step=30, seed=0)
        orders = {tuple(p.id for p in stream.at(step)) for step in range(3)}
        orders.add(tuple(p.id for p in ProblemStream(problems(30), prompts_per_step=30, seed=1).at(0)))
        assert len(orders) == 4

    def test_the_order_is_fixed_for_ever(self) -> None:
        # sha256 of seed, epoch and index decides; a changed order would break the resume of every older run.
        stream = ProblemStream(problems(5), prompts_per_step=5, seed=0)
        assert [p.id for p in stream.at(0)] == ["train-5", "train-1", "train-4", "train-2", "train-3"]

    @settings(max_examples=50, deadline=None)
    @given(count=st.integers(1, 20), per_step=st.integers(1, 20), seed=st.integers(0, 99), epoch=st.integers(0, 3))
    def test_every_epoch_covers_every_problem_once(self, count: int, per_step: int, seed: int, epoch: int) -> None:
        if per_step > count:
            return
        stream = ProblemStream(problems(count), per_step, seed)
        steps = range(epoch * stream.steps_per_epoch, (epoch + 1) * stream.steps_per_epoch)
        parts = [stream.at(step) for step in steps]
        assert sorted(p.id for part in parts for p in part) == sorted(p.id for p in problems(count))
        assert all(len(part) == per_step for part in parts[:-1]) and len(parts[-1]) >= 1
        # A pure function of seed and step: a fresh stream that looks at one step only sees the same.
        assert ProblemStream(problems(count), per_step, seed).at(steps[-1]) == parts[-1]
