"""Tables with a schema: what is written comes back as it was, and what does not fit is refused."""

import numpy as np
import pytest

from moejax.report import reduction_tables
from moejax.report.schema import Column, readme, Table

TABLE = Table(
  "things",
  "A thing.",
  ("name", "at"),
  (
    Column("name", "str", "which"),
    Column("at", "int", "where"),
    Column("size", "float", "how large, nats"),
    Column("good", "bool", "whether"),
    Column("note", "text", "anything"),
    Column("share", "float", "of it", optional=True),
  ),
)


def row(**more):
  return dict(name="a", at=1, size=0.1, good=True, note="", share=None) | more


@pytest.mark.parametrize(
  "values",
  [
    dict(size=1 / 3),
    dict(size=float("inf"), share=5e-324),
    dict(note="one\ttwo\nthree\\n \r", at=-7),
    dict(note="朋友\n说", good=False),
    dict(note="朋友 \\ no break"),
    dict(name="an id", share=0.0),
  ],
)
def test_a_row_comes_back_as_it_was(tmp_path, values):
  TABLE.write(tmp_path, [row(**values)])
  assert TABLE.read(tmp_path) == [row(**values)]


def test_numbers_of_numpy_are_numbers(tmp_path):
  TABLE.write(tmp_path, [row(at=np.int64(3), size=np.float32(0.1), good=np.bool_(False))])
  assert TABLE.read(tmp_path) == [row(at=3, size=float(np.float32(0.1)), good=False)]


@pytest.mark.parametrize(
  ("rows", "message"),
  [
    ([row(), row()], r"things: two rows have the key \{'name': 'a', 'at': 1\}"),
    ([row(at=1.5)], r"at: 1\.5 is no int"),
    ([row(at=True)], r"at: True is no int"),
    ([row(good=1)], r"good: 1 is no bool"),
    ([row(size="1")], r"size: '1' is no float"),
    ([row(size=None)], r"size: None is no float"),
    ([row(other=1)], r"column other is missing or unknown"),
    ([{k: v for k, v in row().items() if k != "good"}], r"column good is missing or unknown"),
    ([row(name="a\tb")], r"a cell may not hold a tab"),
  ],
)
def test_rows_that_do_not_fit_are_refused_and_nothing_is_written(tmp_path, rows, message):
  with pytest.raises(ValueError, match=message):
    TABLE.write(tmp_path, rows)
  assert not TABLE.path(tmp_path).exists()


@pytest.mark.parametrize(
  ("old", "new", "message"),
  [
    ("name\tat", "at\tname", r"columns are \['at', 'name'"),
    ("\t1\t", "\tone\t", r"things\.tsv: at: 'one' is no int"),
    ("0.1\t1\t", "0.1\ttrue\t", r"things\.tsv: good: 'true' is no bool"),
  ],
)
def test_a_file_that_was_changed_is_refused(tmp_path, old, new, message):
  TABLE.write(tmp_path, [row()])
  path = TABLE.path(tmp_path)
  path.write_text(path.read_text().replace(old, new))
  with pytest.raises(ValueError, match=message):
    TABLE.read(tmp_path)


def test_a_table_that_is_not_there():
  with pytest.raises(FileNotFoundError, match=r"things\.tsv: no such table"):
    TABLE.read("/nowhere")


def test_the_description_names_every_column_of_the_study():
  text = readme("Tables", reduction_tables.TABLES.values())
  for table in reduction_tables.TABLES.values():
    assert f"## {table.name}.tsv" in text
    assert table.key and set(table.key) <= {column.name for column in table.columns}
    for column in table.columns:
      assert f"| {column.name} |" in text and column.what


def test_the_twenty_tables_of_the_paper_and_the_five_beside_them_are_there():
  paper = """basin_counts basin_rank_frequency breadth_summary c_intermediate_summary
    canonical_reference event_direction_counts event_direction_unique_continuations
    human_annotation_agreement human_annotation_confusion mhc_equivalence mhc_prefork_equivalence
    mhc_equivalence_summary kv_equivalence kv_equivalence_layers kv_equivalence_summary
    persistent_ablation propagation_trace replay_branches replay_environment replay_pairs"""
  beside = "native_replay mediation certificate contract_cost topologies"
  assert len(paper.split()) == 20
  assert set(paper.split()) | set(beside.split()) <= set(reduction_tables.TABLES)
