"""From a data set to problems: read, check, render, split, hand out.

    DataSpec --read_rows--> RawData --check_columns--> (or DataError)
                               |
                               +--prepare(tokenizer)--> PreparedData(train, dev, test, report)
                                                            |
                                                            +--ProblemStream.at(step)--> the problems of one step

`read_rows` and `check_columns` need no tokenizer and no model, so a wrong column is known before a download. Nothing is
dropped without being counted, by line, in the report; nothing is ever cut.
"""

from __future__ import annotations

from lowmem_grpo.data.columns import check_columns, guess_columns
from lowmem_grpo.data.preparing import DataReport, Dropped, PreparedData, prepare
from lowmem_grpo.data.reading import read_rows, read_table, sample_rows
from lowmem_grpo.data.rendering import RenderedPrompt, TemplateRecord, render_prompt, template_record
from lowmem_grpo.data.spec import DataSpec, RawData, Table
from lowmem_grpo.data.stream import ProblemStream

__all__ = [
    "DataReport",
    "DataSpec",
    "Dropped",
    "PreparedData",
    "ProblemStream",
    "RawData",
    "RenderedPrompt",
    "Table",
    "TemplateRecord",
    "check_columns",
    "guess_columns",
    "prepare",
    "read_rows",
    "read_table",
    "render_prompt",
    "sample_rows",
    "template_record",
]
